"""What nvcc makes of the kernels: they compile, and the sums keep to their registers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("80", "90a", "100a")
# As csrc/kernels/cuda.cmake has them.
FLAGS = ("-std=c++20", "--expt-relaxed-constexpr", "-fmad=false", "-O3", f"-I{ROOT / 'csrc'}")
SUMS = """
#include "kernels/cuda_kernels.cuh"
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
