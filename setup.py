"""Builds `pycoll._core` with CMake, the torch shim if torch is installed, and the library for GPUs
if PYCOLL_CUDA or the machine calls for it.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configures once, builds incrementally, and prints the results."""

    def run(self) -> None:
        self.is_in_place = bool(self.inplace) or self.editable_mode  # run() clears `inplace`
        super().run()

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        destination = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(os.environ.get("PYCOLL_BUILD_DIR", Path(self.build_temp) / "cmake")).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            # Set explicitly: a build folder may outlive the isolated environment that made it.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('PYCOLL_BUILD_TYPE', 'Release')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYCOLL_OUTPUT_DIR={destination}",
            # Unity build: a first build takes half of the time, a later one longer.
            f"-DCMAKE_UNITY_BUILD={os.environ.get('PYCOLL_UNITY', 'on')}",
            f"-DPYCOLL_MPI_INCLUDE={';'.join(mpi_folders())}",
            f"-DPYCOLL_MPICC={os.environ.get('PYCOLL_MPICC', '')}",
        ]
        subprocess.run(configure, check=True, stdout=None if self.verbose else subprocess.DEVNULL)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", str(build), "-j", jobs, "-t", "_core"], check=True)
        print((build / "built.txt").read_text(), end="", flush=True)
        package = ROOT / "pycoll" if self.is_in_place else destination
        if add_cuda(build, jobs) and package != destination:
            # setuptools copies its own extension to a checkout; this library is not one.
            shutil.copy2(destination / "_cuda.so", package / "_cuda.so")
        add_torch_backend(package / "torch")


def mpi_folders() -> list[str]:
    """Folders that may contain mpi_abi.h: PYCOLL_MPI_INCLUDE, and the folder of the mpich wheel."""
    named = os.environ.get("PYCOLL_MPI_INCLUDE", "")
    prefixes = [Path(sys.prefix)]
    if ninja := shutil.which("ninja"):  # may be that of an isolated build environment
        prefixes.append(Path(ninja).parents[1])
    return [*filter(None, named.split(":")), *(str(one / "include") for one in prefixes)]


def add_cuda(build: Path, jobs: str) -> bool:
    """Builds `_cuda.so` beside the core, depending on PYCOLL_CUDA. Returns whether it did.

    on: builds it for PYCOLL_CUDA_ARCHITECTURES, or fails. auto: builds it for the GPUs of this
    machine, if there are any and nvcc is found; pycoll works without it. off: does not build it.
    """
    mode = os.environ.get("PYCOLL_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"PYCOLL_CUDA={mode}: expected auto, on or off")
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if mode == "off" or (mode == "auto" and not Path(nvcc).is_file()):
        return False
    architectures = os.environ.get("PYCOLL_CUDA_ARCHITECTURES", "")
    if mode == "auto" and not architectures:
        architectures = architectures_here()
        if not architectures:
            print("pycoll: nvcc found, but no GPU: PYCOLL_CUDA=on builds the library for GPUs")
            return False
    configure = ["cmake", "-DPYCOLL_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", str(build)]
    if architectures:
        configure.insert(2, f"-DPYCOLL_CUDA_ARCHITECTURES={architectures}")
    try:
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(
            ["cmake", "--build", str(build), "-j", jobs, "-t", "pycoll_cuda"], check=True
        )
        print(f"pycoll: built the library for GPUs ({architectures or 'of all architectures'})")
    except subprocess.CalledProcessError as error:
        if mode == "on":
            raise
        print(f"pycoll: could not build the library for GPUs: {error}", file=sys.stderr)
        return False
    return True


def architectures_here() -> str:
    """Architectures of this machine's GPUs, as CMake names them; empty: no GPU."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = {line.strip().replace(".", "") for line in done.stdout.splitlines() if line.strip()}
    # An architecture with the suffix "a" has all instructions of its generation.
    names = (f"{one}a-real" if int(one) >= 90 else f"{one}-real" for one in found if one.isdigit())
    return ";".join(sorted(names))


def add_torch_backend(package: Path) -> None:
    """Adds the shim for the installed torch to the package, and the sources for other versions."""
    path = ROOT / "pycoll" / "torch_build.py"
    spec = importlib.util.spec_from_file_location("pycoll_torch_build", path)
    shim = importlib.util.module_from_spec(spec)
    # dataclasses look up their module by name.
    sys.modules[spec.name] = shim
    spec.loader.exec_module(shim)
    package.mkdir(parents=True, exist_ok=True)
    sources = ROOT / "csrc"
    if package != shim.package_folder():
        for file in shim.source_files(sources):
            to = package / "csrc" / file.relative_to(sources)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)
    torch = shim.Torch.find()
    if torch is None:
        print("pycoll: torch is not installed; `import pycoll.torch` builds the backend later")
        return
    name = shim.file_name(torch, sources)
    for old in package.glob("_shim.*.so"):
        if old.name != name:
            old.unlink()
    if not (package / name).is_file():
        try:
            shim.build(torch, sources, package)
        except RuntimeError as error:  # pycoll works without it
            print(error, file=sys.stderr)


setup(ext_modules=[Extension("pycoll._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
