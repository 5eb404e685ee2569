"""PYCOLL_CHECK_DATA=1: bytes that change between two ranks are an error, not a result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from damage import damage_once_there

import pycoll
from pycoll import DataError, UsageError, run_ranks

pytestmark = pytest.mark.ranks

Comm = pycoll.Communicator
SENT = np.random.default_rng(7).integers(0, 256, 40_000, np.uint8)


def broadcast(comm: Comm, x: np.ndarray) -> None:
    comm.broadcast(x, algorithm="binomial/simple")


def message(comm: Comm, x: np.ndarray) -> None:
    comm.send(x, 1, tag=3) if comm.rank == 0 else comm.recv(x, 0, tag=3)


def move_damaged(comm: Comm, move: Callable[[Comm, np.ndarray], None]) -> tuple[bool, str, str]:
    """Whether this rank has what was sent, and the errors of this call and the next."""
    x = SENT.copy() if comm.rank == 0 else np.zeros_like(SENT)
    if comm.rank == 1:
        damage_once_there(SENT[:4096].tobytes())
    errors = ["", ""]
    for i, call in enumerate((lambda: move(comm, x), comm.barrier)):
        try:
            call()
        except DataError as error:
            errors[i] = str(error)
    return np.array_equal(x, SENT), *errors


@pytest.mark.parametrize("move", [broadcast, message])
def test_bit_that_changes_between_two_ranks_is_a_wrong_result_without_checks(move):
    """The tests below damage what they should."""
    assert run_ranks(move_damaged, 2, move) == [(True, "", ""), (False, "", "")]


@pytest.mark.parametrize("move", [broadcast, message])
def test_bit_that_changes_between_two_ranks_is_an_error_that_names_both(move, monkeypatch):
    monkeypatch.setenv("PYCOLL_CHECK_DATA", "1")
    (_, own, later), (whole, error, again) = run_ranks(move_damaged, 2, move)
    assert own == "" and not whole
    reader = "rank 1" if move is broadcast else "rank 1's recv(40000 u8, tag 3, from rank 0)"
    for text in (error, again, later):
        assert f"bytes from rank 0 to {reader}" in text
        assert "changed on their way: their checksums differ (PYCOLL_CHECK_DATA=1)" in text


def test_only_simple_is_chosen_also_in_parts(monkeypatch):
    def chosen(comm: Comm) -> list[str]:
        part = comm.split(0)
        return [x.explain("all_reduce", 1 << k).split()[7] for x in (comm, part) for k in (4, 20)]

    monkeypatch.setenv("PYCOLL_CHECK_DATA", "1")
    for threads in (False, True):
        for protocols in run_ranks(chosen, 3, threads=threads):
            assert all(name.endswith("/simple") for name in protocols), protocols


def test_protocol_without_checksums_is_refused(monkeypatch):
    def refused(comm: Comm) -> list[str]:
        texts = []
        for protocol in ("ll", "direct"):
            with pytest.raises(UsageError) as raised:
                comm.all_reduce(np.ones(3), algorithm=f"ring/{protocol}")
            texts.append(str(raised.value))
        assert comm.all_reduce(np.ones(3), algorithm="ring")[0] == comm.size
        return texts

    monkeypatch.setenv("PYCOLL_CHECK_DATA", "1")
    for texts in run_ranks(refused, 2):
        assert all("has no checksums, which PYCOLL_CHECK_DATA=1 asks for" in x for x in texts)


def test_value_that_is_no_flag_is_refused_on_every_rank(monkeypatch):
    monkeypatch.setenv("PYCOLL_CHECK_DATA", "yes")
    with pytest.raises(UsageError, match="PYCOLL_CHECK_DATA=yes: expected 0 or 1"):
        run_ranks(lambda comm: None, 2)
