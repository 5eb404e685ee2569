"""The faults of `make faults` still apply: each replaces one line of one file."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import CORE, FAULTS, PACKAGE, NotOnce, locate, with_fault

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.pure


def sources() -> dict[str, str]:
    paths = [path for folder in ("csrc", "pycoll") for path in (ROOT / folder).rglob("*")]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in paths
        if path.suffix in (".cc", ".h", ".py")
    }


def test_every_fault_replaces_one_line_and_names_tests_that_exist():
    files = sources()
    wrong = []
    for fault in FAULTS:
        try:
            path, line_idx = locate(fault, files)
        except NotOnce as error:
            wrong.append(str(error))
            continue
        changed = with_fault(fault, files[path], line_idx)
        if changed == files[path] or changed.count("\n") != files[path].count("\n"):
            wrong.append(f"fault {fault.name}: the line after is the line before")
        missing = [test for test in fault.tests if not (ROOT / test).exists()]
        wrong += [f"fault {fault.name}: {test} does not exist" for test in missing]
    assert not wrong, "\n".join(wrong)


def test_faults_are_as_many_as_decided_and_have_names_of_their_own():
    assert (len(CORE), len(PACKAGE)) == (12, 12)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_line_that_is_not_there_once_is_an_error_with_all_places():
    fault = FAULTS[0]
    moved = {"elsewhere/verify.cc": f"  {fault.before}\n"}
    assert locate(fault, moved) == ("elsewhere/verify.cc", 0)
    renamed = {"csrc/proof.cc": fault.before, "pycoll/verify.py": fault.before}
    assert locate(fault, renamed) == ("csrc/proof.cc", 0)
    with pytest.raises(NotOnce, match="found it nowhere"):
        locate(fault, {})
    twice = moved | {"other/verify.cc": f"\n{fault.before}"}
    with pytest.raises(NotOnce, match="elsewhere/verify.cc:1, other/verify.cc:2"):
        locate(fault, twice)
