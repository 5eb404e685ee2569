"""Random single faults: each is refused, or shown to be none by running it on numbers."""

import os
import random
from collections import Counter

import pytest
from cases import each_case
from program_oracle import WrongResult, check_programs

from pycoll import _core, schedule

pytestmark = pytest.mark.pure

SEED = int(os.environ.get("PYCOLL_TEST_SEED", "20240817"))
ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]
SIZES = (2, 3, 4, 6)
LOWERING = ("fuse", "multicast", "join_blocks", "join_chunks")
# So many faults in moves, and as many in programs, for each algorithm and size: 4256 in all.
MANY = [14, pytest.param(240, marks=pytest.mark.soak)]


def mutate_moves(moves, n, num_chunks, rng):
    """One random fault in a list of (round, kind, first, count, src, dst)."""
    moves = list(moves)
    at = rng.randrange(len(moves))
    round_idx, kind, first, count, src, dst = moves[at]
    fault = rng.choice(
        ["src", "dst", "first", "count", "kind", "round", "drop", "duplicate", "swap"]
    )
    if fault == "src":
        src = rng.choice([r for r in range(n) if r != src])
    elif fault == "dst":
        dst = rng.choice([r for r in range(n) if r != dst])
    elif fault == "first":
        first += rng.choice([-2, -1, 1, 2])
    elif fault == "count":
        count += rng.choice([-1, 1])
    elif fault == "kind":
        kind = "copy" if kind == "reduce" else "reduce"
    elif fault == "round":
        round_idx += rng.choice([-2, -1, 1, 2])
    elif fault == "duplicate":
        moves.append((round_idx + rng.randrange(3), kind, first, count, src, dst))
    elif fault == "swap":
        src, dst = dst, src
    moves[at] = (round_idx, kind, first, count, src, dst)
    if fault == "drop":
        del moves[at]
    return fault, moves


def mutate_programs(programs, n, num_chunks, rng):
    """One random fault in one step of one rank's program."""
    rank = rng.choice([program.rank for program in programs if program.steps])
    steps = programs[rank].steps
    at = rng.randrange(len(steps))
    step = steps[at]
    bit = 1 << rng.randrange(len(programs[rank].peers))
    fault = rng.choice(
        ["flag", "src_peer", "dst_peer", "chunk", "count", "drop", "duplicate", "swap"]
    )
    if fault == "flag":
        steps[at] = step.replace(flags=step.flags ^ (1 << rng.randrange(5)))
    elif fault == "src_peer":
        steps[at] = step.replace(src_mask=step.src_mask ^ bit)
    elif fault == "dst_peer":
        steps[at] = step.replace(dst_mask=step.dst_mask ^ bit)
    elif fault == "chunk":
        steps[at] = step.replace(first_chunk=step.first_chunk + rng.choice([-1, 1]))
    elif fault == "count":
        steps[at] = step.replace(num_chunks=step.num_chunks + rng.choice([-1, 1]))
    elif fault == "drop":
        del steps[at]
    elif fault == "duplicate":
        steps.insert(rng.randrange(len(steps) + 1), step)
    else:
        other = rng.randrange(len(steps))
        steps[at], steps[other] = steps[other], step
    mutated = list(programs)
    mutated[rank] = programs[rank].with_steps(steps)
    return fault, mutated


def judge(core, programs, slots, rng, where):
    """Whether the proof accepts the programs; if so they must be right."""
    if not _core.verify_programs(core, programs, slots).ok:
        return False
    try:
        for _ in range(3):
            check_programs(core, programs, slots, rng)
    except WrongResult as wrong:
        text = _core.explain_programs(core, programs)
        pytest.fail(f"{where}: the proof accepts what goes wrong: {wrong}\n{text}")
    return True


@pytest.mark.parametrize("num_each", MANY)
@each_case("collective, name", ALGORITHMS)
def test_mutated_moves_are_refused_or_right(collective, name, num_each):
    accepted, refused = Counter(), Counter()
    for n in SIZES:
        seed = f"{SEED} {collective} {name} {n}"
        rng = random.Random(seed)
        core = schedule.build(collective, name, n).core
        for i in range(num_each):
            fault, moves = mutate_moves(core.moves, n, core.num_chunks, rng)
            slots = rng.choice([1, 2, 3, 8])
            try:
                mutant = _core.schedule_from_moves(
                    collective, name, n, core.num_chunks, 0, moves, core.multicast
                )
                programs = mutant.programs(*(rng.random() < 0.8 for _ in range(3)))
            except schedule.UsageError:
                refused[fault] += 1
                continue
            ok = judge(mutant, programs, slots, rng, f"seed {seed}, moves {i}, {fault}")
            (accepted if ok else refused)[fault] += 1
    print(f"{collective} {name}: accepted {dict(accepted)}, refused {dict(refused)}")
    assert refused.total() > 0.7 * (accepted + refused).total()


@pytest.mark.parametrize("num_each", MANY)
@each_case("collective, name", ALGORITHMS)
def test_mutated_programs_are_refused_or_right(collective, name, num_each):
    accepted, refused = Counter(), Counter()
    for n in SIZES:
        seed = f"{SEED} {collective} {name} {n}"
        rng = random.Random(seed)
        s = schedule.build(collective, name, n)
        for i in range(num_each):
            options = {key: rng.random() < 0.8 for key in LOWERING}
            slots = s.min_slots(**options) + rng.randrange(3)
            fault, programs = mutate_programs(s.programs(**options), n, s.num_chunks, rng)
            ok = judge(s.core, programs, slots, rng, f"seed {seed}, programs {i}, {fault}")
            (accepted if ok else refused)[fault] += 1
    print(f"{collective} {name}: accepted {dict(accepted)}, refused {dict(refused)}")
    assert refused.total() > 0.7 * (accepted + refused).total()


@each_case(
    "break_it",
    [
        lambda step: step.replace(flags=step.flags ^ 4),  # final
        lambda step: step.replace(flags=step.flags ^ 1),  # read local
        lambda step: step.replace(src_mask=step.src_mask & (step.src_mask - 1)),
    ],
)
def test_oracle_itself_sees_faults(break_it):
    s = schedule.build("all_reduce", "star", 4)
    programs = s.programs()
    steps = programs[0].steps
    steps[0] = break_it(steps[0])
    programs[0] = programs[0].with_steps(steps)
    with pytest.raises(WrongResult):
        check_programs(s, programs, 2, random.Random(1))
