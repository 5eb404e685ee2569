"""comm.agree: one answer on all surviving ranks, although ranks die meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from unittest import mock

import numpy as np
import pytest
from worlds import end, start

import pycoll
from pycoll.elastic.port_server import cancel, write_message
from pycoll.elastic.value_agreement import ValueAgreement

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

Comm = pycoll.Communicator
KILLED = "killed by SIGKILL"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def agree_on_all(comm: Comm) -> tuple:
    bits = comm.agree(0b1110 << comm.rank | 1 << 20)
    extremes = comm.agree(3 - comm.rank, "min"), comm.agree(comm.rank - 1, "max")
    flags = comm.agree(True), comm.agree(comm.rank != 1)
    wide = comm.agree(-(2**63) + comm.rank, "max")
    comm.barrier()  # the communicator is as usable as before
    return bits, extremes, flags, wide


def test_agree_combines_the_values_of_all_ranks():
    for n in (2, 5):
        bits = 1 << 20 | np.bitwise_and.reduce([0b1110 << rank for rank in range(n)])
        extremes = (4 - n, n - 2)
        expected = (bits, extremes, (True, False), -(2**63) + n - 1)
        assert pycoll.run_ranks(agree_on_all, n) == [expected] * n


def agree_without(comm: Comm, dying: set[int]) -> tuple[int, int]:
    if comm.rank in dying:
        die()
    with pytest.raises(pycoll.PeerDiedError):
        while True:
            comm.barrier()
    return comm.agree(comm.rank, "min"), comm.agree(comm.rank, "max")


def test_agree_on_a_broken_communicator_takes_the_survivors_values():
    for n, dying in [(2, {0}), (3, {1}), (5, {0, 3})]:
        left = [rank for rank in range(n) if rank not in dying]
        outcomes = end(start(agree_without, n, dying))
        for rank in range(n):
            assert outcomes[rank] == (KILLED if rank in dying else (left[0], left[-1]))


class DiesBetween(ValueAgreement):
    """A coordinator that dies after it has reached one rank: with the proposal or the decision."""

    moment = ""

    async def _propose(self, peer, outcome):
        answer = await super()._propose(peer, outcome)
        if self.moment == "proposing":
            die()
        return answer

    async def tell(self, outcome):
        if self.moment == "telling":
            for first in self._server.dismiss(self._topic)[:1]:
                await write_message(first.writer, outcome)
            die()
        await super().tell(outcome)


def agree_while_one_dies(comm: Comm, moments: dict[int, str]) -> list[int]:
    if comm.rank in moments:
        DiesBetween.moment = moments[comm.rank]
        pycoll.elastic.value_agreement.ValueAgreement = DiesBetween
    return [comm.agree(comm.rank, "min") for _ in range(3)]


def agree_while_they_die(worlds: list[tuple[int, dict[int, str]]]) -> None:
    for n, moments in worlds:
        outcomes = end(start(agree_while_one_dies, n, moments))
        survivors = [outcomes[rank] for rank in range(n) if rank not in moments]
        assert all(outcomes[rank] == KILLED for rank in moments), outcomes
        # The first answer is that of a dead coordinator or of a later one, but only one.
        assert all(answers == survivors[0] for answers in survivors), (n, moments, outcomes)
        if moments[0] == "telling":  # a rank may have returned with it
            assert survivors[0][0] == 0, (n, moments, outcomes)
        # By the third call, each of them has died.
        assert survivors[0][2] == len(moments), (n, moments, outcomes)


def test_ranks_agree_although_coordinators_die_in_the_middle():
    agree_while_they_die([(3, {0: "proposing"}), (4, {0: "telling", 1: "telling"})])


@pytest.mark.slow
def test_ranks_agree_whenever_coordinators_die():
    """Many worlds with processes of their own."""
    moments = ("proposing", "telling")
    dying = [{0: each} for each in moments]
    dying += [{0: first, 1: second} for first in moments for second in moments]
    agree_while_they_die([(n, each) for n in (2, 3, 4, 5) for each in dying if len(each) < n])


def agree_late(comm: Comm, late: int) -> list[str]:
    comm.barrier()  # the start of the processes does not count
    if comm.rank == late:
        time.sleep(1.5)  # alive, but it calls after the deadline
    found = []
    for _ in range(2):
        try:
            found.append(str(comm.agree(1, timeout_s=1 if comm.rank != late else 5)))
        except pycoll.TimeoutError as error:
            found.append(str(error))
        time.sleep(0 if comm.rank == late else 1)
    return found


def test_rank_that_ends_after_all_have_come_counts():
    """The coordinator has seen that no rank is missing: the death does not make one late."""

    def work(comm: Comm) -> list[int]:
        pids = comm.all_gather(np.array([os.getpid()])).ravel()

        async def cancel_once_it_has_gone(tasks: list[asyncio.Task[None]]) -> None:
            os.kill(int(pids[2]), signal.SIGKILL)
            end_s = time.monotonic() + 10
            while 2 in port.server.members(topic) and time.monotonic() < end_s:
                await asyncio.sleep(0.001)
            await cancel(tasks)

        if comm.rank != 0:
            return [comm.agree(comm.rank, "max")]
        port, topic = comm._owner_ports[-1], "agree 1"
        with mock.patch("pycoll.elastic.agreement.cancel", cancel_once_it_has_gone):
            return [comm.agree(comm.rank, "max")]

    assert end(start(work, 3)) == [[2], [2], KILLED]


@pytest.mark.slow
def test_all_ranks_time_out_when_one_calls_too_late():
    """Slow: a deadline that ranks in time meet on a busy machine, too."""
    outcomes = end(start(agree_late, 3, 2))
    text = "agree: rank 2 did not call it within 1 s, but still runs: it is computing"
    assert [found[0] for found in outcomes] == [text] * 3
    assert [found[1] for found in outcomes] == ["1"] * 3  # calls still meet


def misuse(comm: Comm, what: str) -> str:
    if what == "split":
        comm = comm.split(0)
    elif what == "closed":
        comm.close()
    arguments = {
        "value": ("1",),
        "float": (1.5,),
        "wide": (2**63,),
        "op": (1, "sum"),
        "op type": (1, 3),
        "ops": (1, ("min", "max")[comm.rank]),
        "timeout": (1, "and", -1.0),
    }
    with pytest.raises(pycoll.UsageError) as raised:
        comm.agree(*arguments.get(what, (1,)))
    return str(raised.value)


def test_misuse_raises_usage_error_on_all_ranks():
    for what, text in {
        "split": "agree: expected a communicator of several processes",
        "closed": "agree: expected a communicator of several processes",
        "threads": "agree: expected a communicator of several processes",
        "value": "value is '1', expected a whole number",
        "float": "value is 1.5",
        "wide": "value is 9223372036854775808",
        "op": "op is 'sum', expected 'and', 'min', 'max'",
        "op type": "op is 3, expected",
        "ops": "agree: rank 0 called it with op 'min', rank 1 with 'max'",
        "timeout": "timeout_s is -1.0",
    }.items():
        for found in pycoll.run_ranks(misuse, 2, what, threads=what == "threads"):
            assert text in found, what


def test_one_rank_agrees_with_itself():
    assert pycoll.run_ranks(lambda comm: comm.agree(5, "min"), 1) == [5]
