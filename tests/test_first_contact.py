"""What a newcomer meets first: an import without the core, variables of the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import start

import pycoll
from pycoll import UsageError, environment

pytestmark = pytest.mark.pure

PACKAGE = Path(pycoll.__file__).parent


def import_in(folder: Path) -> str:
    """The last line that `import pycoll` writes in `folder`."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import pycoll"],  # -S: no other pycoll is installed
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_import_without_the_core_says_how_to_build_it(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "pycoll", ignore=shutil.ignore_patterns("*.so", "__pyc*"))
    line = import_in(tmp_path)
    assert line.startswith("ImportError: pycoll: the C++ core is not built")
    assert "Install pycoll again" in line
    (tmp_path / "setup.py").touch()
    (tmp_path / "pycoll" / "_core.cpython-39-x86_64-linux-gnu.so").touch()
    line = import_in(tmp_path)
    assert f"pip install -e {tmp_path}" in line and "make build" in line
    assert "found _core.cpython-39" in line


def test_variables_that_are_read_are_in_the_table():
    """Names in quotes, in the core and in the package; those of CMake and of the build are not."""
    known = {row.name for row in environment.table()}
    root = PACKAGE.parent
    read = set()
    for path in [*(root / "csrc").rglob("*"), *PACKAGE.rglob("*.py")]:
        if path.suffix in (".cc", ".h", ".cu", ".cuh", ".py"):
            read |= set(re.findall(r"[\"'](PYCOLL_[A-Z_0-9]+)[\"'=]", path.read_text()))
    assert len(known) == len(environment.table()) > 20
    assert read - known <= {"PYCOLL_CAPI_NAME"}, "add them to csrc/base/environment.h"
    assert known <= read, "nothing reads these: remove them from csrc/base/environment.h"


WRONG = {
    "PYCOLL_TLS": "yes",
    "PYCOLL_TRANSPORT": "udp",
    "PYCOLL_PORTS": "30-20",
    "PYCOLL_SILENCE_S": "soon",
    "PYCOLL_REGISTER_AFTER": "1.5",
    "PYCOLL_PEER_MEMORY": "2",
    "PYCOLL_PEER_STORES": "fast",
    "PYCOLL_PEER_LOADS": "1",
    "PYCOLL_ISA": "mmx",
    "PYCOLL_DEVICE_LINKS": "none",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_value_is_an_error_when_a_communicator_is_made(name, monkeypatch):
    monkeypatch.setenv(name, WRONG[name])
    expected = next(row.expected for row in environment.table() if row.name == name)
    with pytest.raises(UsageError, match=f"^{name}={WRONG[name]}: expected {expected}"):
        pycoll.init()


def test_info_env_shows_values_and_refuses_wrong_ones(monkeypatch):
    monkeypatch.setenv("PYCOLL_SILENCE_S", "2.5")
    monkeypatch.setenv("PYCOLL_TIMEOUT", "3")
    run = start("info", "--env")
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "PYCOLL_SILENCE_S=2.5\n" in out
    assert "one of tcp mpi; default: mpi on a fast fabric" in out
    assert "warning: PYCOLL_TIMEOUT is set" in err
    monkeypatch.setenv("PYCOLL_TLS", "yes")
    run = start("info", "--env")
    _, err = run.communicate(timeout=60)
    assert run.returncode != 0 and "PYCOLL_TLS=yes: expected 0 or 1" in err
