"""What nvcc makes of the kernels: they compile, and the sums keep to their registers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from builds import ROOT, build, configure, run

pytestmark = [pytest.mark.timeout(300)]

ARCHITECTURES = ("80", "90a", "100a")
# As csrc/kernels/cuda.cmake has them.
FLAGS = ("-std=c++20", "--expt-relaxed-constexpr", "-fmad=false", "-O3", f"-I{ROOT / 'csrc'}")
SUMS = """
#include "kernels/cuda/cuda_kernels.cuh"
namespace pycoll {
#define SUM(protocol, dtype)                                                       \\
  template __global__ void run_kernel<DeviceProtocol::protocol, DType::dtype>(     \\
      const __grid_constant__ DeviceLaunch, const DeviceLaunch*);
SUM(kSimple, kF32)
SUM(kSimple, kBF16)
SUM(kLL, kF32)
SUM(kLL, kBF16)
}  // namespace pycoll
"""


def nvcc() -> str:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).is_file():
        pytest.skip("nvcc is not installed: nothing is known of the kernels here")
    return found


def compile_kernels(source: str, folder: Path, *architectures: str) -> str:
    """Compiles to machine code, and returns what ptxas reports."""
    file = folder / "kernels.cu"
    file.write_text(source)
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    done = subprocess.run(
        [nvcc(), *FLAGS, *targets, "-Xptxas", "-v", "-Xcompiler", "-Wall,-Wextra"]
        + ["--threads", "2", "-c", str(file), "-o", str(folder / "kernels.o")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_sum_kernels_do_not_spill(tmp_path):
    report = compile_kernels(SUMS, tmp_path, *ARCHITECTURES)
    assert "warning" not in report, report
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", report)]
    print(f"registers: {registers}")
    assert len(frames) == len(registers) == 4 * len(ARCHITECTURES), report
    assert all(frame == ("0", "0", "0") for frame in frames), report
    # A block has 512 threads, and a multiprocessor 65,536 registers.
    assert max(registers) <= 128


def test_sum_kernel_is_all_there(tmp_path):
    """What nvcc cannot compile for a device it may leave out without a word."""
    source = tmp_path / "kernel.cu"
    others = "SUM(kSimple, kBF16)\nSUM(kLL, kF32)\nSUM(kLL, kBF16)\n"
    assert others in SUMS
    source.write_text(SUMS.replace(others, ""))
    subprocess.run(
        [nvcc(), *FLAGS, "-gencode=arch=compute_80,code=compute_80", "-ptx", str(source)]
        + ["-o", str(tmp_path / "kernel.ptx")],
        check=True,
        timeout=280,
    )
    ptx = (tmp_path / "kernel.ptx").read_text()
    expected = {
        r"\bld\.(global\.)?v2\.[ub]64": 8,  # two sources, four packs in flight
        r"\bst\.(global\.)?v2\.[ub]64": 4,
        r"\badd(\.rn)?\.f32": 16,
        r"\bpopc\.b64": 2,  # operands of a step
        r"\bld\.acquire\.sys": 1,
        r"\bst\.release\.sys": 1,
        r"globaltimer": 1,
        r"\bbar\.sync|\bbarrier\.sync": 2,
    }
    found = {pattern: len(re.findall(pattern, ptx)) for pattern in expected}
    assert all(found[pattern] >= least for pattern, least in expected.items()), found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_library_for_gpus_builds_for_all_architectures():
    """As `make cuda` does; on two cores of their own in under three minutes."""
    nvcc()
    folder = ROOT / "build" / "check-cuda"
    configure(folder, "-DPYCOLL_CUDA=ON", f"-DPYCOLL_OUTPUT_DIR={folder}")
    library = folder / "_cuda.so"
    library.unlink(missing_ok=True)
    start = time.monotonic()
    said = build(folder, "pycoll_cuda", timeout_s=800)
    assert "warning" not in said, said[-4000:]
    print(f"{library.stat().st_size >> 20} MiB in {time.monotonic() - start:.0f} s")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_launch_bench_builds_and_says_that_there_is_no_gpu():
    """For one of the architectures; without a GPU it ends with status 2."""
    nvcc()
    folder = ROOT / "build" / "check-launch"
    configure(folder, "-DPYCOLL_CUDA=ON", "-DPYCOLL_CUDA_ARCHITECTURES=90a-real",
              "-DCMAKE_CXX_FLAGS_RELEASE=-O1")  # fmt: skip
    said = build(folder, "launch_bench", timeout_s=800)
    assert "warning" not in said, said[-4000:]
    done = run(folder / "launch_bench", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no GPU here" in done.stdout, done.stdout
