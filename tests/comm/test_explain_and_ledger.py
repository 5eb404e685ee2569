"""explain() and the ledger of a communicator; and algorithms that are registered in Python."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from comm_cases import PROTOCOLS, builtin_algorithms, inputs
from worlds import Comm, on_ranks, run

from pycoll import UsageError, schedule
from pycoll.bench.arithmetic import reduced

pytestmark = pytest.mark.ranks

# Divides into equal chunks for every n up to 8, so that the formulas hold to the byte.
COUNT = 840 * 16


def measure(comm: Comm) -> dict[tuple, int]:
    """Bytes that this rank sends, by collective, algorithm, protocol and root."""
    sent = {}
    x = np.ones(COUNT, np.float32)
    for protocol in PROTOCOLS:
        for name in builtin_algorithms("all_reduce"):
            before = comm.ledger["sent_bytes"]
            comm.all_reduce(x, "max", algorithm=f"{name}/{protocol}")
            sent["all_reduce", name, protocol] = comm.ledger["sent_bytes"] - before
        for name in builtin_algorithms("broadcast"):
            for root in range(comm.size):
                before = comm.ledger["sent_bytes"]
                comm.broadcast(x, root, algorithm=f"{name}/{protocol}")
                sent["broadcast", name, protocol, root] = comm.ledger["sent_bytes"] - before
    return sent


def test_ledger_equals_the_formulas_exactly():
    nbytes = 4 * COUNT
    for n in range(2, 9):
        outcomes = run(measure, n, kind="processes" if n in (2, 3, 5) else "threads")
        for rank, outcome in enumerate(outcomes):
            for case, sent in outcome.items():
                collective, name, _, *root = case
                fraction = schedule.info(collective, name).sent_fraction
                assert sent == round(fraction(n, rank, *root) * nbytes), (n, rank, case)
            for protocol in PROTOCOLS:  # once more, by hand
                least = 2 * (n - 1) * nbytes // n
                for name in ("ring", "halving_doubling", "two_shot"):
                    assert outcome["all_reduce", name, protocol] == least
                assert outcome["all_reduce", "all_to_all", protocol] == (n - 1) * nbytes
                star = (n - 1) * nbytes if rank == 0 else nbytes
                assert outcome["all_reduce", "star", protocol] == star


def explain(comm: Comm) -> str:
    assert "measured: not yet" in comm.explain("all_reduce", 4096, "f32")
    for _ in range(40):
        comm.all_reduce(np.ones(1024, np.float32))
    for nbytes in (0, 1, 1 << 20, 1 << 30):
        assert f"of {nbytes} bytes" in comm.explain("all_reduce", nbytes)
    assert "broadcast of 8 bytes" in comm.explain("broadcast", 8, root=comm.size - 1)
    return comm.explain("all_reduce", 4096)


def test_explain_names_the_choice_its_proof_and_its_times():
    for kind, transport in {"processes": "shm", "threads": "local"}.items():
        texts = run(explain, 3, kind=kind)
        for text in texts:
            assert text.startswith("all_reduce of 4096 bytes on 3 ranks: ")
            for part in (f"over {transport}", "proved: safe with", "measured: ", " us"):
                assert part in text
            for name in ("ring", "one_shot", "two_shot", "halving_doubling", "tree"):
                assert name in text
        assert len({text.splitlines()[0] for text in texts}) == 1  # the same choice on all ranks


def last_rank_reduces(n: int, root: int):
    for rank in range(n - 1):
        yield schedule.reduce(0, 0, src=rank, dst=n - 1)
    for rank in range(n - 1):
        yield schedule.copy(1, 0, src=n - 1, dst=rank)


def loses_a_rank(n: int, root: int):
    for rank in range(1, n - 1):
        yield schedule.reduce(0, 0, src=rank, dst=0)
    for rank in range(1, n):
        yield schedule.copy(1, 0, src=0, dst=rank)


@pytest.fixture
def mine_and_wrong() -> Iterator[None]:
    """Two algorithms that are registered in Python."""
    schedule.register("all_reduce", "mine")(last_rank_reduces)
    schedule.register("all_reduce", "wrong")(loses_a_rank)
    yield
    for name in ("mine", "wrong"):
        del schedule._registered["all_reduce", name]


@on_ranks(2, 3, 4, own=True)
def test_algorithm_registered_in_python_runs(comm, mine_and_wrong):
    for count in (0, 1, 5, 100_003):
        values = inputs(comm.size, count, np.int64)
        for algorithm in ("mine", "mine/ll", "mine/simple"):
            x = values[comm.rank].copy()
            before = comm.ledger["sent_bytes"]
            comm.all_reduce(x, algorithm=algorithm)
            assert (x == reduced(values, "sum")).all()
            copies = comm.size - 1 if comm.rank == comm.size - 1 else 1
            assert comm.ledger["sent_bytes"] - before == copies * 8 * count
            comm.all_reduce(x, "max", algorithm=algorithm, async_op=True).wait()


@on_ranks(3, own=True)
def test_wrong_algorithm_registered_in_python_is_refused_on_all_ranks(comm, mine_and_wrong):
    for algorithm in ("wrong", "wrong/ll", "wrong/simple"):
        with pytest.raises(UsageError, match="wrong.*rank 2 has not contributed"):
            comm.all_reduce(np.ones(10), algorithm=algorithm)
    x = np.ones(10)
    comm.all_reduce(x)  # nothing was started, so nothing is broken
    assert (x == 3).all()
