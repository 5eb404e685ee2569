"""The programs of benchmarks/ are no package: their folder goes onto the path."""

from __future__ import annotations

import sys
from pathlib import Path

import builds
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def binaries() -> Path:
    """The C++ programs, in the folder of the package's own build."""
    folder = builds.plain()
    builds.build(folder, "benchmarks", "-DPYCOLL_BENCHMARKS=ON")
    return folder / "benchmarks"
