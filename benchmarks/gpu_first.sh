#!/usr/bin/env bash
# The first minutes on a machine with a GPU and without a network, in three commands of less than
# eight minutes each:
#
#   OUT=FOLDER benchmarks/gpu_first.sh 1   looks around, builds, and tries the simplest things
#   OUT=FOLDER benchmarks/gpu_first.sh 2   tests
#   OUT=FOLDER benchmarks/gpu_first.sh 3   figures
#
# Everything is written to FOLDER as it comes. The machine may be another one each time: what
# command 1 has built lies in FOLDER/built, and the others use a copy of it in .built, or build
# again. Each command ends within SECONDS_MOST (450): its programs share what is left of it, also
# where it had to build. Wheels of Python modules that the machine lacks (pytest, pytest-timeout,
# pybind11, ml_dtypes) are installed from .whl:
#
#   pip download -d .whl --only-binary :all: --python-version 3.12 pytest pytest-timeout pybind11 ml_dtypes
#
# NCCL 2.30 or later, as .nccl/libnccl.so.2, takes the place of torch's. DEVICE=threads does all of
# it on the emulated device, with tiny sizes, whose figures mean nothing; TESTS names other tests
# than tests/device.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?OUT=FOLDER names the folder of the results}"
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
SECONDS_MOST=${SECONDS_MOST:-450}
BUILD_SECONDS=${BUILD_SECONDS:-280}
BUILD=$PWD/build/gpu
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

if compgen -G ".whl/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target .site .whl/*.whl || exit
fi
export PYTHONPATH=$PWD:$PWD/.site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 PYTORCH_NVML_BASED_CUDA_CHECK=1

# The smaller of this number of seconds and what is left of the command's time; 0: none is left.
most() {
  local left=$((SECONDS_MOST - SECONDS))
  local seconds=$((left < $1 ? left : $1))
  echo $((seconds < 0 ? 0 : seconds))
}

check() {
  local part=$1 seconds
  seconds=$(most "$2")
  # The program ends by itself, but for a defect.
  timeout --kill-after 5 $((seconds + 20)) "$PYTHON" benchmarks/gpu_check.py --part "$part" \
    --seconds "$seconds" --device "$DEVICE" --build-folder "$BUILD" --out "$OUT" \
    ${TESTS:+--tests "$TESTS"}
}

# Programs, one after another, each with a limit of seconds and a log; the next one runs in any
# case.
try() {
  local seconds log=$2
  seconds=$(most "$1")
  shift 2
  echo "--- $*" >> "$OUT/$log"
  if [ "$seconds" = 0 ]; then
    echo "gpu_first: $log: skipped: no time was left" | tee -a "$OUT/$log"
    return
  fi
  timeout --kill-after 5 "$seconds" "$@" >> "$OUT/$log" 2>&1
  local status=$?
  echo "status $status" >> "$OUT/$log"
  echo "gpu_first: $log: status $status"
  return "$status"
}

build_or_restore() {
  if [ -d .built ]; then
    (cd .built && tar cf - .) | tar xf - && return
  fi
  check build "$BUILD_SECONDS"
}

devices() {
  if [ "$DEVICE" = threads ]; then
    FEW=--few MATRIX="--ranks 2 --dtypes f32,bf16"
    export PYCOLL_DEVICE_LIBRARY=$BUILD/_device_threads.so
  else
    FEW='' MATRIX=''
    export PYCOLL_DEVICE_LIBRARY=$PWD/pycoll/_cuda.so
  fi
}

# Processes that share the GPU by MPS, with a daemon of this command's own.
with_mps() {
  if [ "$DEVICE" != cuda ] || ! command -v nvidia-cuda-mps-control > /dev/null; then
    echo "gpu_first: MPS: skipped: nvidia-cuda-mps-control is not here" | tee -a "$OUT/mps.log"
    return
  fi
  local folder
  folder=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$folder CUDA_MPS_LOG_DIRECTORY=$folder
  try 20 mps.log nvidia-cuda-mps-control -d
  try 30 mps.log "$PYTHON" benchmarks/device_processes.py
  local ranks
  for ranks in 2 8; do
    try 25 mps.log "$BUILD/benchmarks/all_reduce_perf" -r "$ranks" -g 1 -b 8 -e 64M -f 8
  done
  try 40 mps.log "$PYTHON" benchmarks/device_peers.py --ranks 2 nccl cuda f32 8 65536 16777216
  echo quit | timeout 10 nvidia-cuda-mps-control >> "$OUT/mps.log" 2>&1
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

case "${1:-}" in
  1)
    { nvidia-smi; nvcc --version; g++ --version; cmake --version; "$PYTHON" -m pip list
      which nvidia-cuda-mps-control compute-sanitizer ncu nvdisasm; nproc; free -g; uname -r
    } > "$OUT/probe.txt" 2>&1
    check build "$BUILD_SECONDS" || exit
    mkdir -p "$OUT/built"
    { find pycoll -name "*.so"
      for program in _device_threads.so tests/cpp/gpu_matrix benchmarks/gpu_latency \
        benchmarks/all_reduce_perf; do
        [ -f "$BUILD/$program" ] && echo "build/gpu/$program"
      done
    } | tar cf - -T - | tar xf - -C "$OUT/built"
    devices
    if [ "$DEVICE" = cuda ]; then
      try 30 conversions.log "$PYTHON" -c "import ctypes
library = ctypes.CDLL('pycoll/_cuda.so')
wrong = ctypes.c_uint64(9)
print('status', library.pycoll_check_conversions(ctypes.byref(wrong)), 'wrong', wrong.value)"
    fi
    # shellcheck disable=SC2086  # FEW and MATRIX may be no word at all
    try 40 matrix.log "$BUILD/tests/cpp/gpu_matrix" --few --seconds 30 $MATRIX
    # shellcheck disable=SC2086
    try 50 latencies.log "$BUILD/benchmarks/gpu_latency" $FEW --seconds 40 \
      --json "$OUT/latencies.jsonl"
    try 60 threads.log "$PYTHON" benchmarks/device_kernels.py 2 3 8
    for setting in A=1 PYCOLL_CUDA_VMM=0 PYCOLL_DEVICE_LINKS=cpu; do
      try 30 processes.log env "$setting" "$PYTHON" benchmarks/device_processes.py
    done
    ;;
  2)
    build_or_restore || exit
    devices
    check test 420
    ;;
  3)
    build_or_restore || exit
    devices
    [ -f .nccl/libnccl.so.2 ] && export LD_PRELOAD=$PWD/.nccl/libnccl.so.2
    # Most of the time, but for what follows.
    check bench $((SECONDS_MOST - SECONDS - 150))
    for ranks in 2 4 8; do
      for registered in 0 1; do
        try 15 perf.log "$BUILD/benchmarks/all_reduce_perf" -t "$ranks" -g 1 -R "$registered" \
          -b 8 -e "$([ "$DEVICE" = cuda ] && echo 256M || echo 64K)" -f 4
      done
    done
    with_mps
    ;;
  *)
    sed -n '2,/^set/p' "$0" | sed 's/^# \{0,1\}//;/^set/d' >&2
    exit 2
    ;;
esac
