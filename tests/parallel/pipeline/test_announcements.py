"""Announcements between stages are data: malformed ones raise an error, and none runs code."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

import pycoll
from pycoll.parallel.core import structures
from pycoll.parallel.core.specs import Spec
from pycoll.parallel.core.transfers import Transfers
from pycoll.parallel.pipeline.messages import Arrival, Messages
from pycoll.parallel.pipeline.schedules.actions import Kind, Schedule

PACKAGE = Path(pycoll.__file__).parent
Pair = namedtuple("Pair", ["left", "right"])
SPEC = Spec((2, 3), torch.bfloat16, True)
KEY = (Kind.F, 1, 0)
# Files whose pickles come from this job's own children, through pipes that they inherited.
MAY_UNPICKLE = {"launch/rank_functions.py"}


class Code:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.mkdir, (str(self.path),)


def test_announcement_of_every_kind_of_note_arrives_as_it_was():
    notes = {
        "numbers": (1, -2.5, True, None, float("inf")),
        "names": ["a", {"b": [SPEC], 3: (SPEC, "x")}, {}],
        "pair": Pair(SPEC, Pair(1, ())),
        "dtype": torch.float16,
        "": (),
    }
    sent = Arrival((SPEC, Spec((), torch.int64)), notes)
    got = Arrival.from_json(sent.to_json(), "rank 0")
    assert got.specs == sent.specs
    assert got.notes == notes
    assert got.notes["pair"].left == SPEC and got.notes["pair"].right.right == ()


def test_note_that_is_no_data_is_not_sent_and_says_so_where_it_is_used():
    for value in (object(), {1, 2}, b"bytes", torch.ones(2), Code(PACKAGE)):
        sent = Arrival((), {"note": [value]})
        for _ in range(2):  # as a stage in the middle announces what it got
            sent = Arrival.from_json(sent.to_json(), "rank 0")
        (got,) = sent.notes["note"]
        assert not hasattr(got, "path")
        with pytest.raises(AttributeError, match=f"this {type(value).__name__} is on the rank"):
            got.add(1)
    with pytest.raises(pycoll.UsageError, match="cannot be sent to another rank"):
        structures.encode([object()], lambda value: None)
    with pytest.raises(pycoll.UsageError, match="at most 16777216 are sent"):
        Arrival((), {"note": "x" * structures.MAX_BYTES}).to_json()


def test_malformed_announcements_raise_an_error(tmp_path):
    good = json.loads(Arrival((SPEC,), {}).to_json())
    malformed = [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"tuple": [[], {"dict": []}]}',
        b'{"tuple": [{"tuple": [1]}, {"dict": []}]}',
        b'{"tuple": 5}',
        b'{"dict": [[1]]}',
        b'{"dict": [[{"dict": []}, 1]]}',
        b'{"dtype": "load"}',
        b'{"dtype": 3}',
        b'{"named": ["a b", ["x"], [1]]}',
        b'{"named": ["a", ["x"], [1, 2]]}',
        b'{"named": ["a", ["__class__"], [1]]}',
        b'{"spec": [[1], "float32", true, "cpu"], "tuple": []}',
        b'{"other": 1}',
        b"{}",
        b'{"tuple": [{"tuple": []}, {"dict": [["a", {"unsent": 1}]]}]}',
        pickle.dumps(Code(tmp_path / "code")),
        json.dumps(good).encode()[:-1],
    ]
    shapes = [[-1], [1.5], [True], [1 << 40, 1 << 40], "12", None]
    specs = [[shape, "float32", True, "cpu"] for shape in shapes]
    specs += [[[1], "nn", True, "cpu"], [[1], "float32", True, "meta"], [[1], "float32", True, 0]]
    specs += [[[1], "float32", True, "cpu:1"], [[1], "float32", True, "disk"], [[1]]]
    for spec in specs:
        announcement = {"tuple": [{"tuple": [{"spec": spec}]}, {"dict": []}]}
        malformed.append(json.dumps(announcement).encode())
    for text in malformed:
        with pytest.raises(pycoll.Error, match=r"^rank 3 sent") as raised:
            Arrival.from_json(text, "rank 3")
        assert len(str(raised.value)) < 500
    assert not (tmp_path / "code").exists()


@pytest.mark.ranks
def test_pickle_sent_to_a_stage_is_refused_and_not_run(tmp_path):
    """A rank that sends code in place of an announcement, or an announcement without end."""
    contents = [pickle.dumps(Code(tmp_path / "code")), b"[]", None]

    def work(comm: pycoll.Communicator) -> list[str]:
        messages = Messages(Transfers(comm), Schedule("test", 1, (1, 0), ((), ())))
        tag = messages._tag(KEY, is_header=True)
        found = []
        for content in contents:
            if comm.rank == 1:
                length = 1 << 40 if content is None else len(content)
                comm.send(np.array([length]), 0, tag)
                if content is not None:
                    comm.send(np.frombuffer(content, np.uint8), 0, tag)
                continue
            with pytest.raises(pycoll.Error) as raised:
                messages.announced(KEY)
            found.append(str(raised.value))
        return found

    texts = pycoll.run_ranks(work, 2, threads=True)[0]
    assert "rank 1 sent a structure that cannot be read" in texts[0]
    assert "rank 1 sent list, expected an announcement" in texts[1]
    assert "rank 1 announced a structure of 1099511627776 bytes: expected 0 to" in texts[2]
    assert not (tmp_path / "code").exists()


def test_no_module_unpickles_what_other_ranks_send():
    """Also not through mpi4py, whose methods for objects, such as `comm.bcast`, unpickle."""
    unsafe = re.compile(
        r"\b(pickle\.loads?|Unpickler|marshal|shelve|dill|joblib|eval\(|exec\(|"
        r"comm\.(allgather|alltoall|allreduce|bcast)\()"
    )
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if unsafe.search(path.read_text().replace(".eval()", ""))
    }
    assert found == MAY_UNPICKLE
