"""The layers of docs and design, kept by a test: who may include whom, and how files look."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pycoll

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
MAX_LINES = 600
MIN_LINES = 30  # of a .cc
MAX_FILES = 25  # in a folder of csrc
# Reasons for a shorter .cc, by the beginning of its path.
SHORT = {
    "algorithms/": "an algorithm is a file",
    "reduce/reduce_copy_": "an instruction set is a file, compiled with its flags",
    "base/error.cc": "the one place of the errors' type information",
    "kernels/threads/launch_threads.cc": "the checks of orders link without the compiled kernels",
}

# What each folder is built on. It may include these, and what these are built on.
LAYERS: dict[str, set[str]] = {
    "base": set(),
    "schedule": {"base"},
    "reduce": {"base"},
    "topology": {"schedule"},
    # Simulated clusters: nothing but the Python module has it.
    "sim": {"schedule"},
    "algorithms": {"topology", "schedule"},
    "plan": {"algorithms", "topology", "schedule", "reduce"},
    "bootstrap": {"base"},
    # The table of functions that a device's library gives, and owners of what it gives.
    "device": {"base"},
    "transport": {"bootstrap", "device"},
    # Compiled once for each ABI of MPI (csrc/mpi/mpi.cmake).
    "mpi": {"transport"},
    "executor": {"transport", "plan", "reduce", "schedule"},
    # The programs on a device, in a library of their own.
    "kernels": {"executor"},
    "p2p": {"executor"},
    "comm": {"p2p", "executor", "plan"},
    # What makes a communicator of the ranks that a launcher started.
    "join": {"comm", "mpi"},
    "capi": {"join"},
    "bindings": {"join", "capi", "sim"},
    # Built apart, against torch: of the core it knows the C header alone.
    "torch": set(),
}
TORCH_SEES = "capi/pycoll.h"


def below(folder: str) -> set[str]:
    """The folder and all that it stands on."""
    return {folder}.union(*(below(layer) for layer in LAYERS[folder]))


def layer_of(path: Path) -> str:
    """The folder directly in csrc, which is one library in CMake."""
    return path.relative_to(CSRC).parts[0]


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


CXX_FILES = sources(CSRC, ".h", ".cc", ".cuh", ".cu")
PYTHON_FILES = sources(ROOT / "pycoll", ".py")
name = lambda path: str(path.relative_to(ROOT))  # noqa: E731


def test_every_folder_of_csrc_has_its_place():
    assert {layer_of(path) for path in CXX_FILES} == set(LAYERS)


def test_folders_of_csrc_have_few_files():
    folders = collections.Counter(path.parent for path in CXX_FILES)
    large = {name(folder): count for folder, count in folders.items() if count > MAX_FILES}
    assert not large, f"more than {MAX_FILES} files, so more than one room: {large}"


def test_files_of_csrc_have_names_of_their_own():
    names = collections.Counter(path.name for path in CXX_FILES)
    twice = [file for file, count in names.items() if count > 1]
    assert not twice, f"two files of csrc have the same name: {twice}"


def may_include(path: Path, included: str) -> bool:
    folder = included.split("/")[0]
    if included.startswith("torch/csrc/"):  # torch's own
        return layer_of(path) == "torch"
    if folder not in LAYERS or (layer_of(path) == "torch" and included == TORCH_SEES):
        return True
    return folder in below(layer_of(path)) and (CSRC / included).is_file()


def test_includes_go_down_the_layers_only():
    wrong = [
        f"{name(path)} includes {included}"
        for path in CXX_FILES
        for included in includes(path)
        if not may_include(path, included)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["schedule", "algorithms", "reduce", "plan"])
def test_pure_layers_see_no_threads_clocks_or_input_and_output(folder):
    impure = re.compile(
        r"^(thread|mutex|shared_mutex|condition_variable|future|atomic|stop_token|semaphore|latch|"
        r"barrier|chrono|iostream|fstream|pthread\.h|unistd\.h|fcntl\.h|poll\.h|signal\.h|"
        r"(sys|netinet|arpa|linux)/.*|cuda.*|mpi\.h|base/(socket|fd|clock)\.h)$"
    )
    for path in sources(CSRC / folder, ".h", ".cc"):
        found = [included for included in includes(path) if impure.match(included)]
        assert not found, f"{name(path)} includes {found}"


def test_only_the_shim_knows_torch():
    for path in CXX_FILES:
        if layer_of(path) != "torch":
            known = [i for i in includes(path) if i.startswith(("ATen/", "c10/", "torch/"))]
            assert not known, f"{name(path)} includes {known}"


def test_only_the_bindings_know_python():
    for path in CXX_FILES:
        if layer_of(path) not in ("bindings", "torch"):
            known = [i for i in includes(path) if i.startswith(("pybind11", "Python.h"))]
            assert not known, f"{name(path)} includes {known}"


def test_acquire_and_release_stand_in_few_files():
    """slot.h is where orders are argued; the rest is flags of one process, each listed here."""
    allowed = {
        "transport/ring/slot.h",
        "transport/ring/segment.cc",
        "transport/ring/device_slot.h",
        "executor/wait/wait.cc",
        "executor/device/thread_env.h",
        "comm/async/progress.cc",
        "comm/async/progress.h",
        "torch/bridge/torch_call_site.cc",
    }
    ordered = {
        path.relative_to(CSRC).as_posix()
        for path in CXX_FILES
        if re.search(r"memory_order_\w+", path.read_text())
    }
    assert ordered <= allowed, f"explain the order in slot.h: {ordered - allowed}"


def test_import_of_pycoll_imports_no_torch_and_no_matplotlib():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; import pycoll; "
            "print([m for m in ('torch', 'matplotlib', 'sklearn', 'rich') if m in sys.modules])",
        ],
        cwd=Path(pycoll.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "[]\n"


def test_files_hold_one_concept():
    wrong = []
    for path in CXX_FILES + PYTHON_FILES:
        text = path.read_text()
        num_lines = len(text.splitlines())
        if num_lines >= MAX_LINES:
            wrong.append(f"{name(path)} has {num_lines} lines: it holds two concepts")
        is_short = path.suffix == ".cc" and num_lines < MIN_LINES
        if is_short and not name(path)[len("csrc/") :].startswith(tuple(SHORT)):
            wrong.append(f"{name(path)} has {num_lines} lines: put it where it is used, or say why")
        if not re.fullmatch(r"_{0,2}[a-z][a-z0-9_]*", path.stem):
            wrong.append(f"{name(path)} is not snake_case")
        if path.suffix == ".h" and "#pragma once" not in text:
            wrong.append(f"{name(path)} has no #pragma once")
    assert not wrong, "\n".join(wrong)
