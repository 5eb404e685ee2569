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
# again. Wheels of Python modules that the machine lacks (pytest, pytest-timeout, pybind11,
# ml_dtypes) are installed from .whl:
#
#   pip download -d .whl --only-binary :all: --python-version 3.12 pytest pytest-timeout pybind11 ml_dtypes
#
# NCCL 2.30 or later, as .nccl/libnccl.so.2, takes the place of torch's. DEVICE=threads does all of
# it on the emulated device, whose figures mean nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?OUT=FOLDER names the folder of the results}"
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
BUILD=$PWD/build/gpu
mkdir -p "$OUT"

if compgen -G ".whl/*.whl" > /dev/null; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target .site .whl/*.whl || exit
fi
export PYTHONPATH=$PWD:$PWD/.site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 PYTORCH_NVML_BASED_CUDA_CHECK=1

check() { "$PYTHON" benchmarks/gpu_check.py --device "$DEVICE" --build-folder "$BUILD" --out "$OUT" "$@"; }

# Programs, one after another, each with a limit of seconds and a log; the next one runs in any case.
try() {
  local seconds=$1 log=$2
  shift 2
  echo "--- $*" >> "$OUT/$log"
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
  check --part build --seconds 280
}

devices() {
  if [ "$DEVICE" = threads ]; then
    export PYCOLL_DEVICE_LIBRARY=$BUILD/_device_threads.so
  else
    export PYCOLL_DEVICE_LIBRARY=$PWD/pycoll/_cuda.so
  fi
}

case "${1:-}" in
  1)
    { nvidia-smi; nvcc --version; g++ --version; cmake --version; "$PYTHON" -m pip list
      which nvidia-cuda-mps-control compute-sanitizer ncu nvdisasm; nproc; free -g; uname -r
    } > "$OUT/probe.txt" 2>&1
    check --part build --seconds 280 || exit
    mkdir -p "$OUT/built"
    find pycoll -name "*.so" -print0 | xargs -0 tar cf - build/gpu/launch_bench \
      build/gpu/_device_threads.so build/gpu/benchmarks/all_reduce_perf 2> /dev/null |
      tar xf - -C "$OUT/built"
    devices
    if [ "$DEVICE" = cuda ]; then
      try 60 conversions.log "$PYTHON" -c "import ctypes
library = ctypes.CDLL('pycoll/_cuda.so')
wrong = ctypes.c_uint64(9)
print('status', library.pycoll_check_conversions(ctypes.byref(wrong)), 'wrong', wrong.value)"
      try 60 launches.log "$BUILD/launch_bench" --json "$OUT/launches.json"
    fi
    try 90 threads.log "$PYTHON" benchmarks/device_kernels.py 2 3 8
    for setting in A=1 PYCOLL_CUDA_VMM=0 PYCOLL_DEVICE_LINKS=cpu; do
      try 40 processes.log env "$setting" "$PYTHON" benchmarks/device_processes.py
    done
    ;;
  2)
    build_or_restore || exit
    devices
    check --part test --seconds 420
    ;;
  3)
    build_or_restore || exit
    devices
    for ranks in 2 4 8; do
      for registered in 0 1; do
        try 25 perf.log "$BUILD/benchmarks/all_reduce_perf" -t "$ranks" -g 1 -R "$registered" \
          -b 8 -e "$([ "$DEVICE" = cuda ] && echo 256M || echo 64K)" -f 4
      done
    done
    [ -f .nccl/libnccl.so.2 ] && export LD_PRELOAD=$PWD/.nccl/libnccl.so.2
    check --part bench --seconds 300
    ;;
  *)
    sed -n '2,/^set/p' "$0" | sed 's/^# \{0,1\}//;/^set/d' >&2
    exit 2
    ;;
esac
