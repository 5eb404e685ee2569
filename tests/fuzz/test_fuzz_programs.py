"""Random programs of every operation on ranks that are threads or processes equal NumPy."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import pytest
from driving import MINUTES, drive, drive_for_minutes, num_examples
from hypothesis import strategies as st
from joining import joins_late
from programs import Collective, Program, as_text, numbers, programs
from runner import run_program

from pycoll import run_ranks

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case:
    n: int
    threads: bool
    programs: tuple[Program, ...]  # one after another in one world
    late: int = 0  # the rank, modulo n, that joins or begins later than the others
    late_ms: int = 0


def cases() -> st.SearchStrategy[Case]:
    some = st.lists(programs(at_most=12), min_size=1, max_size=4).map(tuple)
    late_ms = st.sampled_from([0, 0, 0, 0, 1, 30])
    return st.builds(Case, st.integers(1, 5), st.booleans(), some, numbers, late_ms)


def check(case: Case) -> None:
    def work(comm) -> None:
        if case.threads and comm.rank == case.late % comm.size:
            time.sleep(case.late_ms / 1e3)
        for program in case.programs:
            run_program(comm, program)

    try:
        with joins_late(case.late % case.n, case.late_ms / 1e3):
            run_ranks(work, case.n, threads=case.threads, timeout_s=20)
    except BaseException:
        kind = "threads" if case.threads else "processes"
        text = "\n".join(as_text(program) for program in case.programs)
        late = f", rank {case.late % case.n} {case.late_ms} ms late" if case.late_ms else ""
        print(f"\nfuzz: failed on {case.n} {kind}{late}:\n{text}", file=sys.stderr)
        raise


@pytest.mark.timeout(300)
def test_fuzz_random_programs_equal_numpy() -> None:
    drive(check, cases(), num_examples(20))


@pytest.mark.soak
@pytest.mark.timeout(int(60 * MINUTES) + 600)
def test_fuzz_random_programs_for_minutes_equal_numpy() -> None:
    assert drive_for_minutes(check, cases(), share=0.7) > 0


def test_fuzz_wrong_result_is_found(monkeypatch) -> None:
    """One wrong element makes the comparison fail."""

    def spoiled(comm) -> None:
        class Spoiled:
            rank, size = comm.rank, comm.size
            empty, barrier = comm.empty, comm.barrier

            @staticmethod
            def all_reduce(x, **options):
                result = comm.all_reduce(x, **options)
                if comm.rank == 1:
                    result[-1] += 1
                return result

        op = Collective(
            "all_reduce", 400, "f32", "sum", 0, None, "plain", "own", False, False, False, 0, 1
        )
        run_program(Spoiled(), (op,))

    with pytest.raises(AssertionError, match=r"1 of 100 elements differ, the first at \(.*99"):
        run_ranks(spoiled, 2, threads=True, timeout_s=10)
