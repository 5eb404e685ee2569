"""What a communicator tells about itself: explain(), the ledger; and algorithms of one's own."""

from __future__ import annotations

import numpy as np
import pytest
from comm_cases import PROTOCOLS, both, builtin_algorithms, inputs, reduced

import pycoll
from pycoll import UsageError, run_ranks, schedule

pytestmark = pytest.mark.ranks

# Divides into equal chunks for every n up to 8, so that the formulas hold to the byte.
COUNT = 840 * 16


@both
@pytest.mark.parametrize("n", range(2, 9))
def test_ledger_equals_the_formulas_exactly(n, threads):
    def measure(comm: pycoll.Communicator) -> dict:
        sent = {}

        x = np.ones(COUNT, np.float32)
        for protocol in PROTOCOLS:
            for name in builtin_algorithms("all_reduce"):
                before = comm.ledger["sent_bytes"]
                comm.all_reduce(x, "max", algorithm=f"{name}/{protocol}")
                sent[f"{name}/{protocol}"] = comm.ledger["sent_bytes"] - before
            for name in builtin_algorithms("broadcast"):
                for root in range(n):
                    before = comm.ledger["sent_bytes"]
                    comm.broadcast(x, root, algorithm=f"{name}/{protocol}")
                    sent[f"{name}/{protocol} from {root}"] = comm.ledger["sent_bytes"] - before
        return sent

    outcomes = run_ranks(measure, n, threads=threads)
    nbytes = 4 * COUNT

    for rank in range(n):
        for name in builtin_algorithms("all_reduce"):
            fraction = schedule.info("all_reduce", name).sent_fraction
            for protocol in PROTOCOLS:
                sent = outcomes[rank][f"{name}/{protocol}"]
                assert sent == round(fraction(n, rank) * nbytes), (name, protocol, rank)
        for name in builtin_algorithms("broadcast"):
            fraction = schedule.info("broadcast", name).sent_fraction
            for protocol in PROTOCOLS:
                for root in range(n):
                    sent = outcomes[rank][f"{name}/{protocol} from {root}"]
                    assert sent == round(fraction(n, rank, root) * nbytes), (name, rank, root)
        for protocol in PROTOCOLS:  # said here once more, by hand
            least = 2 * (n - 1) * nbytes // n
            for name in ("ring", "halving_doubling", "two_shot"):
                assert outcomes[rank][f"{name}/{protocol}"] == least
            assert outcomes[rank][f"all_to_all/{protocol}"] == (n - 1) * nbytes
            star = (n - 1) * nbytes if rank == 0 else nbytes
            assert outcomes[rank][f"star/{protocol}"] == star


@both
def test_explain_names_the_choice_its_proof_and_its_times(threads):
    def work(comm: pycoll.Communicator) -> str:
        first = comm.explain("all_reduce", 4096, "f32")
        assert "measured: not yet" in first
        for _ in range(40):
            comm.all_reduce(np.ones(1024, np.float32))
        for nbytes in (0, 1, 1 << 20, 1 << 30):
            assert f"of {nbytes} bytes" in comm.explain("all_reduce", nbytes)
        assert "broadcast of 8 bytes" in comm.explain("broadcast", 8, root=comm.size - 1)
        return comm.explain("all_reduce", 4096)

    texts = run_ranks(work, 3, threads=threads)
    for text in texts:
        assert text.startswith("all_reduce of 4096 bytes on 3 ranks: ")
        assert f"over {'local' if threads else 'shm'}" in text
        assert "proved: safe with" in text
        assert "measured: " in text
        assert " us" in text
        for name in ("ring", "one_shot", "two_shot", "halving_doubling", "tree"):
            assert name in text
    assert len({text.splitlines()[0] for text in texts}) == 1  # all ranks choose alike


@pytest.fixture
def registered():
    """Registers algorithms under names that nobody else uses, and takes them out again."""
    names = []

    def register(name: str, generate, **options) -> None:
        schedule.register("all_reduce", name, **options)(generate)
        names.append(name)

    yield register
    for name in names:
        del schedule._registered["all_reduce", name]


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


@both
def test_algorithm_registered_in_python_runs(threads, registered):
    registered("mine", last_rank_reduces)

    def work(comm: pycoll.Communicator) -> None:
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

    for n in (2, 3, 4):
        run_ranks(work, n, threads=threads)


@both
def test_algorithm_registered_in_python_that_is_wrong_is_refused_on_all_ranks(threads, registered):
    registered("wrong", loses_a_rank)

    def work(comm: pycoll.Communicator) -> None:
        for algorithm in ("wrong", "wrong/ll", "wrong/simple"):
            with pytest.raises(UsageError, match="wrong.*rank 2 has not contributed"):
                comm.all_reduce(np.ones(10), algorithm=algorithm)
        x = np.ones(10)
        comm.all_reduce(x)  # nothing was started, so nothing is broken
        assert (x == 3).all()

    run_ranks(work, 3, threads=threads, timeout_s=10)
