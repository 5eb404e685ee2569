"""Builds `pycoll._core` with CMake, the shim for torch where there is one, and the library for GPUs
where it is asked for or of use.
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
    """Configures once, builds incrementally, and says what it built."""

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
            # Named, because a build folder may outlive the isolated environment it was made in.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('PYCOLL_BUILD_TYPE', 'Release')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPYCOLL_OUTPUT_DIR={destination}",
            # Eight files at a time: a first build takes half of the time, a later one longer.
            f"-DCMAKE_UNITY_BUILD={os.environ.get('PYCOLL_UNITY', 'on')}",
            f"-DPYCOLL_MPI_INCLUDE={';'.join(mpi_folders())}",
            f"-DPYCOLL_MPICC={os.environ.get('PYCOLL_MPICC', '')}",
        ]
        subprocess.run(configure, check=True, stdout=None if self.verbose else subprocess.DEVNULL)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", str(build), "-j", jobs, "-t", "_core"], check=True)
        print((build / "built.txt").read_text(), end="", flush=True)
        add_cuda(build, jobs)
        package = ROOT / "pycoll" if self.is_in_place else destination
        add_torch_backend(package / "torch")


def mpi_folders() -> list[str]:
    """Where mpi_abi.h may be: what PYCOLL_MPI_INCLUDE says, and where the wheel mpich puts it."""
    named = os.environ.get("PYCOLL_MPI_INCLUDE", "")
    prefixes = [Path(sys.prefix)]
    if ninja := shutil.which("ninja"):  # of the environment that a build may have to itself
        prefixes.append(Path(ninja).parents[1])
    return [*filter(None, named.split(":")), *(str(one / "include") for one in prefixes)]


def add_cuda(build: Path, jobs: str) -> None:
    """`pycoll/_cuda.so`, by PYCOLL_CUDA.

    on: for PYCOLL_CUDA_ARCHITECTURES, or this fails. auto: for the GPUs of this machine, where
    there are any and nvcc is found; the rest of pycoll is good without it. off: not at all.
    """
    mode = os.environ.get("PYCOLL_CUDA", "auto")
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"PYCOLL_CUDA={mode}: expected auto, on or off")
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if mode == "off" or (mode == "auto" and not Path(nvcc).is_file()):
        return
    architectures = os.environ.get("PYCOLL_CUDA_ARCHITECTURES", "")
    if mode == "auto" and not architectures:
        architectures = architectures_here()
        if not architectures:
            print("pycoll: nvcc, but no GPU here: PYCOLL_CUDA=on builds the library for GPUs")
            return
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
        print(f"pycoll: no library for GPUs: {error}", file=sys.stderr)


def architectures_here() -> str:
    """The GPUs of this machine, as CMake names them; empty: none."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = {line.strip().replace(".", "") for line in done.stdout.splitlines() if line.strip()}
    # What is named after one generation alone has all of its instructions.
    names = (f"{one}a-real" if int(one) >= 90 else f"{one}-real" for one in found if one.isdigit())
    return ";".join(sorted(names))


def add_torch_backend(package: Path) -> None:
    """Into the package: the shim for the torch of this environment, and what a later one needs."""
    path = ROOT / "pycoll" / "torch_build.py"
    spec = importlib.util.spec_from_file_location("pycoll_torch_build", path)
    shim = importlib.util.module_from_spec(spec)
    # dataclasses look their module up.
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
        print("pycoll: no torch here; `import pycoll.torch` will build the backend when there is")
        return
    name = shim.file_name(torch, sources)
    for old in package.glob("_shim.*.so"):
        if old.name != name:
            old.unlink()
    if not (package / name).is_file():
        try:
            shim.build(torch, sources, package)
        except RuntimeError as error:  # the rest of pycoll is good without it
            print(error, file=sys.stderr)


setup(ext_modules=[Extension("pycoll._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
