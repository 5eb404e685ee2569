"""The choice of algorithm and protocol: by the call, PYCOLL_ALGO, the table or simulation."""

from __future__ import annotations

import os
import re
import time

import numpy as np
import pytest
from comm_cases import PROTOCOLS, builtin_algorithms
from worlds import Comm, on_ranks

import pycoll
from pycoll import UsageError, run_ranks, schedule

pytestmark = pytest.mark.ranks


def choice_in(explanation: str) -> str:
    """`ring/simple`, from the first line."""
    return explanation.splitlines()[0].rpartition(": ")[2].partition(" over ")[0]


def choices(monkeypatch, rules: str, asked: list[tuple[str, int]], n: int = 2) -> list[str]:
    monkeypatch.setenv("PYCOLL_ALGO", rules)

    def ask(comm: Comm) -> list[str]:
        return [choice_in(comm.explain(collective, nbytes)) for collective, nbytes in asked]

    first, *others = run_ranks(ask, n, threads=True)
    assert all(other == first for other in others)
    return first


def test_rule_names_any_algorithm_and_protocol(monkeypatch):
    for collective in ("all_reduce", "broadcast"):
        for i, name in enumerate(builtin_algorithms(collective)):
            rule = f"{name}/{PROTOCOLS[i % len(PROTOCOLS)]}"
            got = choices(monkeypatch, f"{collective}:{rule}", [(collective, 64)], n=3)
            assert got == [rule]


def test_rule_without_a_collective_continues_the_one_before(monkeypatch):
    rules = "broadcast:star/ll;all_reduce:one_shot/ll:0-64k; ring/simple : 64K - max ;"
    asked = [("all_reduce", nbytes) for nbytes in (65535, 65536, 1 << 40)] + [("broadcast", 9)]
    expected = ["one_shot/ll", "ring/simple", "ring/simple", "star/ll"]
    assert choices(monkeypatch, rules, asked) == expected


def test_first_rule_whose_range_holds_the_size_decides(monkeypatch):
    """A range ends at its byte, also within a size class, whose messages share a plan otherwise."""
    for last, nbytes in [("100", 100), ("3k", 3072), ("2M", 2 << 20)]:
        rules = f"all_reduce:tree/ll:8-{last};star/simple:0-max;ring/simple:0-max"
        sizes = (7, 8, nbytes - 1, nbytes, nbytes - 1, nbytes + 1)
        expected = [("tree/ll" if 8 <= size < nbytes else "star/simple") for size in sizes]
        assert choices(monkeypatch, rules, [("all_reduce", size) for size in sizes]) == expected


def test_rule_may_leave_the_protocol_or_the_algorithm_or_other_sizes_open(monkeypatch):
    asked = [("all_reduce", 8), ("all_reduce", 8 << 20)]
    open_protocol = choices(monkeypatch, "all_reduce:tree", asked)
    assert [choice.split("/")[0] for choice in open_protocol] == ["tree", "tree"]
    open_algorithm = choices(monkeypatch, "all_reduce:auto/simple", asked)
    assert [choice.split("/")[1] for choice in open_algorithm] == ["simple", "simple"]
    asked += [("all_reduce", 4096), ("broadcast", 64)]
    untouched = choices(monkeypatch, "", asked)
    for rules in ("all_reduce:auto", "all_reduce:star/simple:9-4096;scan:auto:5-6"):
        assert choices(monkeypatch, rules, asked) == untouched


@on_ranks(threads=[3], env={"PYCOLL_ALGO": "all_reduce:star/simple"})
def test_algorithm_of_the_call_beats_the_rule(comm):
    """The other ranks send as much with both, but star's root sends n - 1 copies."""
    for algorithm, copies in [(None, 2 if comm.rank == 0 else 1), ("one_shot/simple", 2)]:
        before = comm.ledger["sent_bytes"]
        comm.all_reduce(np.ones(4), algorithm=algorithm)
        assert comm.ledger["sent_bytes"] - before == copies * 32


@on_ranks(3, env={"PYCOLL_ALGO": "all_reduce:tree/ll:0-100;ring/simple:100-5k;star:5k-max"})
def test_rules_give_right_results(comm):
    for count in (0, 1, 12, 13, 100, 639, 640, 641, 5000):
        x = np.full(count, comm.rank + 1.0)
        comm.all_reduce(x)
        assert (x == 6).all()
        comm.barrier()
    # The first range ends at 100 bytes.
    ruled, other = (comm.explain("all_reduce", size).splitlines()[1] for size in (64, 1 << 20))
    assert "by the rule 'all_reduce:tree/ll:0-100' of PYCOLL_ALGO" in ruled
    assert "by the rule" in other and "star:5k-max" in other
    assert comm.explain("broadcast", 64).splitlines()[1] == "  chosen by simulation"


WRONG = {
    "ring": ("must name its collective", "^~~~", 0),
    ";all_reduce:ring": ("a rule is empty", "^", 0),
    "all_reduce:ring;;ring": ("a rule is empty", "^", 16),
    "al_reduce:ring": ("no collective has this name; expected one of all_reduce,", "^~", 0),
    "barrier:ring": ("write a rule for all_reduce", "^~~~~~~", 0),
    "all_reduce:": ("expected an algorithm, or auto", "^", 11),
    "all_reduce:/ll": ("expected an algorithm, or auto", "^", 11),
    "all_reduce:ring/lll": (
        "no protocol has this name; expected one of simple, ll, direct, ll128, poison, copy",
        "^~~",
        16,
    ),
    "all_reduce:ring/": ("no protocol has this name", "^", 16),
    "all_reduce:ring/ll/ll": ("expected ALGORITHM or ALGORITHM/PROTOCOL", "^~", 19),
    "all_reduce:ring:64k": ("expected a range such as 0-64k", "^~~", 16),
    "all_reduce:ring:64k-": ("expected a size in bytes", "^", 20),
    "all_reduce:ring:-64k": ("expected a range such as 0-64k", "^~~~", 16),
    "all_reduce:ring:1-2-3": ("expected a range", "^~~~~", 16),
    "all_reduce:ring:1.5k-2k": ("expected a size in bytes", "^~~~", 16),
    "all_reduce:ring:max-5": ("expected a range such as 0-64k", "^~~~~", 16),
    "all_reduce:ring:0-64t": ("expected a size in bytes", "^~~", 18),
    "all_reduce:ring:5-5": ("holds no size", "^~~", 16),
    "all_reduce:ring:64k-1k": ("holds no size", "^~~~~~", 16),
    "all_reduce:ring:0-9999999999g": ("too large", "^~~~~~~~~~~", 18),
    "all_reduce:ring:0-99999999999999999999": ("too large", "^~~~", 18),
    "all_reduce:ring:0-4k tree": ("expected a size in bytes", "^~~~~~~", 18),
    "all_reduce:ring:tree:0-4k": ("expected a range such as 0-64k here, or ';'", "^~~~", 16),
    "all_reduce ring": ("must name its collective", "^~~", 0),
    "x" * 5000: ("too long", "^~", 0),
}


def test_wrong_rules_are_refused_at_init_and_the_piece_is_shown(monkeypatch):
    for rules, (why, marks, column) in WRONG.items():
        monkeypatch.setenv("PYCOLL_ALGO", rules)
        with pytest.raises(UsageError) as error:
            run_ranks(lambda comm: None, 2, threads=True)
        first, shown, marked = str(error.value).splitlines()
        assert first.startswith("PYCOLL_ALGO: ")
        if len(rules) < 5000:
            assert why in first, rules
            assert shown == "  " + rules
        assert marked.startswith("  " + " " * column + marks), rules


def test_wrong_rules_of_rank_0_are_refused_on_every_rank(monkeypatch):
    """The environment of rank 0 counts, and no other rank's."""
    errors = _with_rules_of_each_rank(
        monkeypatch, ["all_reduce:ring/rong", "all_reduce:ring", None], lambda comm: None
    )
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, UsageError)
        assert "rong" in str(error)


@on_ranks(threads=[2], env={"PYCOLL_ALGO": "all_reduce:rong:64-max;broadcast:ring"})
def test_rule_of_an_unknown_algorithm_is_refused_by_the_call_that_needs_it(comm):
    comm.all_reduce(np.ones(2))  # not the rule's size
    for call in (lambda: comm.all_reduce(np.ones(8)), lambda: comm.explain("all_reduce", 64)):
        with pytest.raises(UsageError, match="rule 'all_reduce:rong:64-max' of PYCOLL_ALGO"):
            call()
    with pytest.raises(UsageError, match="broadcast has no algorithm called 'ring'"):
        comm.broadcast(np.ones(2))
    comm.all_reduce(np.ones(2))


def late(n: int, root: int):
    for rank in range(1, n):
        yield schedule.Move(rank, "reduce", (0, 1), rank, 0)
    for rank in range(1, n):
        yield schedule.Move(n + rank, "copy", (0, 1), 0, rank)


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_rule_names_an_algorithm_that_is_registered_later(monkeypatch, threads):
    monkeypatch.setattr(schedule, "_registered", dict(schedule._registered))
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:late:64-max;reduce:auto")

    def work(comm: Comm) -> list[str]:
        comm.barrier()
        if comm.rank == 0 or not threads:
            schedule.register("all_reduce", "late", num_chunks=1)(late)
        comm.barrier()
        ran = []
        for count in (4, 8, 100_000):
            x = np.full(count, comm.rank + 1.0)
            comm.all_reduce(x)
            assert (x == 3).all()
            ran.append(comm.flight_record()[-1]["algorithm"].split("/")[0])
        part = comm.split(0)
        part.all_reduce(np.ones(8))
        ran.append(part.flight_record()[-1]["algorithm"].split("/")[0])
        assert "by the rule 'all_reduce:late:64-max'" in part.explain("all_reduce", 64)
        return ran

    for first, *others in run_ranks(work, 2, threads=threads):
        assert first != "late"
        assert others == ["late"] * 3


# The protocol direct.


@pytest.mark.parametrize(("n", "threads"), [(2, False), (3, False), (3, True)])
def test_rule_of_direct_runs_where_arrays_allow_it_and_falls_back_elsewhere(
    monkeypatch, threads, n
):
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:two_shot/direct:1k-max")

    def work(comm: Comm) -> list[str]:
        ran = []
        count = (64 << 10) * comm.size  # too large for copies
        shared = comm.empty(count, np.float32)
        for x in (np.ones(count, np.float32), shared, np.ones(2, np.float32)):
            x[:] = comm.rank + 1
            # Some arrays are mapped and some are not: only slots carry these.
            out = comm.empty(x.size, np.float32) if x is not shared else shared
            comm.all_reduce(x, out=out)
            assert (out == sum(range(1, comm.size + 1))).all()
            ran.append(comm.flight_record()[-1]["algorithm"])
        return ran

    for mixed, mapped, small in run_ranks(work, n, threads=threads):
        assert mapped == "two_shot/direct"
        assert mixed == "two_shot/direct" if threads else mixed.startswith("two_shot/")
        assert threads or not mixed.endswith("/direct")
        assert not small.endswith("/direct")


def test_rule_of_direct_that_cannot_do_without_slots_keeps_its_algorithm(monkeypatch):
    """A ring passes partial sums on: with more than two ranks they have no place but slots."""
    asked = [("all_reduce", 1 << 16), ("all_reduce", 1 << 20)]
    got = choices(monkeypatch, "all_reduce:ring/direct:16k-max", asked, n=2)
    assert got == ["ring/direct"] * 2
    got = choices(monkeypatch, "all_reduce:ring/direct:16k-max", asked, n=4)
    assert got == ["ring/simple"] * 2
    open_algorithm = choices(monkeypatch, "all_reduce:auto/direct", asked, n=4)
    assert [choice.split("/")[1] for choice in open_algorithm] == ["direct"] * 2


@on_ranks(processes=[3])
def test_named_direct_is_refused_where_it_cannot_run(comm):
    x, out = comm.empty(4096, np.float32), comm.empty(4096, np.float32)
    with pytest.raises(UsageError, match="ring/direct cannot run without slots on 3 ranks"):
        comm.all_reduce(x, algorithm="ring/direct")
    with pytest.raises(UsageError, match="cannot work in place: pass out="):
        comm.all_reduce(x, algorithm="one_shot/direct")
    with pytest.raises(UsageError, match="cannot all access each other's arrays"):
        comm.all_reduce(x, out=np.zeros_like(x), algorithm="one_shot/direct")
    with pytest.raises(UsageError, match="direct needs block sizes known to all ranks"):
        comm.all_to_all(x[:3], send_counts=[1] * 3, algorithm="bruck/direct")
    x[:] = comm.rank
    comm.all_reduce(x, out=out, algorithm="one_shot/direct")
    assert (out == 3).all()


@on_ranks(processes=[2, 3, 4])
def test_direct_on_private_arrays_of_processes_equals_numpy(comm):
    """No rank writes another one's memory, so pushed results are pulled (decision 0043)."""
    n, rank = comm.size, comm.rank
    comm.register_after = 0
    block = 70_003  # elements: several stages, and pieces of unequal size
    whole = np.arange(n * n * block, dtype=np.int64).reshape(n, n, block)  # by rank and block
    mine = whole[rank].copy()
    expected = {
        "all_reduce": (mine, whole.sum(0)),
        "all_gather": (mine[0].copy(), whole[:, 0]),
        "all_to_all": (mine, whole[:, rank]),
        "reduce_scatter": (mine, whole.sum(0)[rank]),
    }
    ran = set()
    for name, (x, result) in expected.items():
        for algorithm in builtin_algorithms(name):
            out = np.zeros_like(result)
            try:
                getattr(comm, name)(x, out=out, algorithm=f"{algorithm}/direct")
            except UsageError as error:
                assert re.search("without slots|cannot all access", str(error)), error
                continue
            np.testing.assert_array_equal(out, result, err_msg=f"{name} {algorithm}")
            assert comm.flight_record()[-1]["algorithm"] == f"{algorithm}/direct"
            ran.add(f"{name} {algorithm}")
    assert {"all_reduce two_shot", "all_reduce one_shot", "all_gather all_pairs"} <= ran, ran
    x = np.full(n * block, rank + 1.0)
    comm.all_reduce(x, algorithm="two_shot/direct")  # in place
    assert (x == n * (n + 1) / 2).all()


@on_ranks(processes=[3], env={"PYCOLL_ALGO": "broadcast:star/direct:1k-max"})
def test_ranks_with_plain_arrays_run_ahead_of_those_that_asked(comm):
    """They do not wait where buffers are exchanged, and may be two operations ahead."""
    plain, shared = np.zeros(1024, np.float32), comm.empty(1024, np.float32)
    for turn in range(300):
        x = plain if comm.rank == 0 and turn % 5 != 0 else shared
        x[:] = turn if comm.rank == 0 else -1
        if comm.rank != 0 and turn % 7 == 0:
            time.sleep(0.0005)
        comm.broadcast(x)
        assert (x == turn).all()


def test_rules_of_rank_0_are_those_of_all_ranks(monkeypatch):
    def work(comm: Comm) -> list[str]:
        x = np.ones(16)
        comm.all_reduce(x)
        assert (x == comm.size).all()
        part = comm.split(comm.rank % 2)
        part.all_reduce(x)
        return [choice_in(each.explain("all_reduce", 128)) for each in (comm, part)]

    rules = ["all_reduce:tree/ll", "all_reduce:ring/simple", None, "all_reduce:ring/rong"]
    got = _with_rules_of_each_rank(monkeypatch, rules, work)
    assert got == [["tree/ll", "tree/ll"]] * 4


def _with_rules_of_each_rank(monkeypatch, rules: list[str | None], work) -> list:
    """Ranks as processes, each with a PYCOLL_ALGO of its own."""
    original = pycoll.init

    def init(**options):
        own = rules[int(os.environ["RANK"])]
        os.environ.pop("PYCOLL_ALGO", None)
        if own is not None:
            os.environ["PYCOLL_ALGO"] = own
        return original(**options)

    monkeypatch.setattr(pycoll, "init", init)
    return run_ranks(work, len(rules), timeout_s=20, return_errors=True)
