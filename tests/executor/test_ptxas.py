"""What nvcc makes of the kernels: they compile, and the sums keep to their registers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from builds import ROOT, build, configure, run

REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)
ARCHITECTURES = ("80", "90a", "100a")
# By number, as in the mangled name of a kernel.
PROTOCOLS = {"0": "simple", "1": "ll", "4": "direct"}
DTYPES = {"0": "f32", "3": "bf16"}
SUM = re.compile(r"run_kernel.*DeviceProtocolE([014])E.*DTypeE([03])E")
# One file with the kernels that are looked at: the library has a dozen times as many.
SOURCE = """#include "kernels/cuda/cuda_kernels.cuh"
namespace pycoll {
#define KERNELS(protocol) \\
  template const void* cuda_kernel<DeviceProtocol::protocol, DType::kF32>(); \\
  template const void* cuda_kernel<DeviceProtocol::protocol, DType::kBF16>();
KERNELS(kSimple) KERNELS(kLL) KERNELS(kDirect)
}
"""
FLAGS = ["--expt-relaxed-constexpr", "-fmad=false"]  # of cuda.cmake


# In SASS: loads and stores of 16 bytes of global memory that stay out of the L1 cache; and generic
# ones, the stack, and loads of what no other processor changes.
WANTED = (r"LDG\.E\.NA\.128", r"STG\.E\.128")
UNWANTED = (r"\bLD\.E\.128", r"\bST\.E\.128", r"\bLDL", r"\bSTL", r"\bLDG\S*\.CONSTANT")
FENCE = r"\bMEMBAR"
# Places, most of them on the way to a failure: a fence for each flag that is set.
MOST_FENCES = {"simple": 14, "ll": 13, "direct": 16}


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


def name_of(mangled: str) -> str | None:
    found = SUM.search(mangled)
    return f"{PROTOCOLS[found[1]]}/{DTYPES[found[2]]}" if found else None


@dataclass(frozen=True)
class Compiled:
    """What nvcc made of SOURCE for one architecture."""

    folder: Path
    said: str  # by ptxas

    def sass(self) -> dict[str, list[str]]:
        """The instructions of each kernel, by its name. Skips where there is no disassembler."""
        disassembler = shutil.which("nvdisasm")
        if disassembler is None:
            reason = "nvdisasm is not on the PATH (pip install nvidia-cuda-nvdisasm has it)"
            print(f"SASS was not looked at: {reason}")
            pytest.skip(reason)
        done = run(disassembler, "-c", self.folder / "kernels.cubin")
        assert done.returncode == 0, done.stdout[-2000:]
        kernels: dict[str, list[str]] = {}
        name = None
        for line in done.stdout.splitlines():
            if line.startswith("\t.section\t"):
                name = name_of(line) if ".text." in line else None
            found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
            if name is not None and found:
                kernels.setdefault(name, []).append(found[1])
        return kernels


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    need_nvcc()
    assert (
        f"$<$<COMPILE_LANGUAGE:CUDA>:{';'.join(FLAGS)}>"
        in (ROOT / "csrc/kernels/cuda/cuda.cmake").read_text()
    )
    folder = tmp_path_factory.mktemp(f"sm_{request.param}")
    (folder / "kernels.cu").write_text(SOURCE)
    done = run(
        *(os.environ.get("CUDACXX", "nvcc"), "-std=c++20", "-O3", "-Xptxas", "-v", *FLAGS),
        *("-cubin", f"-arch=sm_{request.param}", "--keep", f"-I{ROOT / 'csrc'}", "kernels.cu"),
        cwd=folder, timeout_s=580,
    )  # fmt: skip
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout[-4000:]
    return Compiled(folder, done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sum_kernels_do_not_spill(compiled):
    """Sums, and means, which take the same kernels. Compiling takes a quarter of a minute."""
    sums = [found for found in REPORT.findall(compiled.said) if name_of(found[0])]
    print(f"{len(sums)} kernels, registers: {[int(found[-1]) for found in sums]}")
    assert len(sums) == 6, compiled.said[-4000:]
    for name, architecture, *frame, registers in sums:
        assert frame == ["0", "0", "0"], (name_of(name), architecture, frame)
        # A block has 512 threads, and a multiprocessor 65,536 registers.
        assert int(registers) <= 128, name_of(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sum_kernel_is_all_there(compiled):
    """What nvcc cannot compile for a device it may leave out without a word."""
    text = (compiled.folder / "kernels.ptx").read_text()
    parts = {name_of(part.split("(")[0]): part for part in text.split(".entry")[1:]}
    expected = {
        r"\bld\.global\.L1::no_allocate\.v2\.u64": 8,  # two sources, four packs in flight
        r"\bst\.global\.v2\.u64": 4,
        r"\badd(\.rn)?\.f32": 16,
        r"\bmax(\.NaN)?\.f32|\bsetp\.[lg]t": 1,
        r"\bpopc\.b64": 2,  # operands of a step
        r"\bld\.acquire\.sys": 1,
        r"\bst\.release\.sys": 1,
        r"globaltimer": 1,
        r"\bbar\.sync|\bbarrier\.sync": 2,
    }
    found = {pattern: len(re.findall(pattern, parts["simple/f32"])) for pattern in expected}
    assert all(found[pattern] >= least for pattern, least in expected.items()), found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_instructions_access_memory_as_they_should(compiled):
    """Whole packs of global memory, no stack, no cache that is not coherent, and few fences."""
    kernels = compiled.sass()
    assert len(kernels) == 6, sorted(kernels)
    for name, instructions in kernels.items():

        def count(pattern: str, instructions: list[str] = instructions) -> int:
            return sum(bool(re.search(pattern, line)) for line in instructions)

        said = {p: count(p) for p in WANTED + UNWANTED + (FENCE,)}
        print(compiled.folder.name, name, len(instructions), said)
        assert not any(said[pattern] for pattern in UNWANTED), (name, said)
        line = r"\.128\.STRONG\.SYS"
        wanted = [rf"LDG\.E{line}", rf"STG\.E{line}"] if name.startswith("ll") else WANTED
        assert all(count(pattern) for pattern in wanted), (name, said)
        assert said[FENCE] <= MOST_FENCES[name.split("/")[0]], (name, said)


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
def test_programs_for_gpus_build_and_say_that_there_is_no_gpu(tmp_path):
    """For one of the architectures; without a GPU they end with status 2."""
    need_nvcc()
    configure(tmp_path, "-DPYCOLL_CUDA=ON", "-DPYCOLL_CUDA_ARCHITECTURES=90a-real",
              "-DCMAKE_CXX_FLAGS_RELEASE=-O1")  # fmt: skip
    for program in ("benchmarks/gpu_latency", "tests/cpp/gpu_matrix"):
        said = build(tmp_path, Path(program).name, timeout_s=800)
        assert "warning" not in said, said[-4000:]
        done = run(tmp_path / program, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 2 and "no device here" in done.stdout, done.stdout
