"""Builds `pycoll._core` with CMake, and the shim for torch where there is one."""

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
        ]
        subprocess.run(configure, check=True, stdout=None if self.verbose else subprocess.DEVNULL)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", str(build), "-j", jobs, "-t", "_core"], check=True)
        print((build / "built.txt").read_text(), end="", flush=True)
        add_torch_backend(destination / "torch")


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
