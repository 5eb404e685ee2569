"""What nvcc makes of the kernels: they compile, and the sums keep to their registers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from builds import ROOT, build, configure, run

REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)
# In the mangled name of a kernel: the protocols simple and ll, the dtypes f32 and bf16.
SUM = re.compile(r"run_kernel.*DeviceProtocolE[01]E.*DTypeE[03]E")


def need_nvcc() -> None:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).is_file():
        pytest.skip("nvcc is not installed: nothing is known of the kernels here")


def build_library(folder: Path, *options: str) -> str:
    """Builds the library for GPUs. Returns what the compilers said: no warning."""
    start = time.monotonic()
    configure(folder, "-DPYCOLL_CUDA=ON", f"-DPYCOLL_OUTPUT_DIR={folder}", *options)
    said = build(folder, "pycoll_cuda", timeout_s=1500)
    assert "warning" not in said, said[-4000:]
    size = (folder / "_cuda.so").stat().st_size
    print(f"{size >> 20} MiB in {time.monotonic() - start:.0f} s")
    return said


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for one architecture: its folder, with the PTX, and what ptxas reports."""
    need_nvcc()
    folder = tmp_path_factory.mktemp("cuda")
    flags = f"-Xptxas -v --keep --keep-dir {folder}"
    architecture = "-DPYCOLL_CUDA_ARCHITECTURES=90a-real"
    return folder, build_library(folder, architecture, f"-DCMAKE_CUDA_FLAGS={flags}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sum_kernels_do_not_spill(library):
    sums = [found for found in REPORT.findall(library[1]) if SUM.search(found[0])]
    print(f"{len(sums)} kernels, registers: {[int(found[-1]) for found in sums]}")
    assert len(sums) == 4, library[1][-4000:]
    for name, architecture, *frame, registers in sums:
        assert (architecture, frame) == ("90a", ["0", "0", "0"]), name
        # A block has 512 threads, and a multiprocessor 65,536 registers.
        assert int(registers) <= 128, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sum_kernel_is_all_there(library):
    """What nvcc cannot compile for a device it may leave out without a word."""
    text = (library[0] / "cuda_kernels_simple.ptx").read_text()
    ptx = next(part for part in text.split(".entry")[1:] if SUM.search(part.split("(")[0]))
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


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_library_for_gpus_builds_for_all_architectures(tmp_path):
    """As `make cuda` does; on two cores of their own in under three minutes."""
    need_nvcc()
    build_library(tmp_path)
    assert (tmp_path / "_cuda.so").stat().st_size < 12 << 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_checkout_built_with_the_library_finds_it(tmp_path):
    """As `make cuda` in a new clone, for one of the architectures; it compiles the core, too."""
    need_nvcc()
    clone = tmp_path / "clone"
    for command in (
        ["git", "clone", "-q", ROOT, clone],
        [sys.executable, clone / "setup.py", "--quiet", "build_ext", "--inplace"],
    ):
        done = run(*command, cwd=clone if clone.exists() else tmp_path, timeout_s=1500,
                   PYCOLL_CUDA="on", PYCOLL_CUDA_ARCHITECTURES="90a-real",
                   PYCOLL_BUILD_DIR=clone / "build/cmake")  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
    info = run(sys.executable, "-m", "pycoll", "info", cwd=clone, PYTHONPATH=clone)
    assert f"{clone}/pycoll/_cuda.so" in info.stdout, info.stdout
    assert "no CUDA part" not in info.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_launch_bench_builds_and_says_that_there_is_no_gpu(tmp_path):
    """For one of the architectures; without a GPU it ends with status 2."""
    need_nvcc()
    configure(tmp_path, "-DPYCOLL_CUDA=ON", "-DPYCOLL_CUDA_ARCHITECTURES=90a-real",
              "-DCMAKE_CXX_FLAGS_RELEASE=-O1")  # fmt: skip
    said = build(tmp_path, "launch_bench", timeout_s=800)
    assert "warning" not in said, said[-4000:]
    done = run(tmp_path / "launch_bench", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no GPU here" in done.stdout, done.stdout
