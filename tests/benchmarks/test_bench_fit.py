"""`pycoll bench fit`: injected costs are recovered from simulated and from slept times."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from command_line import invoke

import pycoll
from pycoll import UsageError, schedule
from pycoll.bench.case import Case
from pycoll.bench.fit import COLLECTIVES, fit_links
from pycoll.bench.record import Record, Row
from pycoll.bench.timing import Timing

ALPHA, BETA, GAMMA = 12e-6, 1 / 5e9, 1 / 20e9


def record(path: Path, collectives: tuple[str, ...], n: int, seed: int = 5) -> str:
    """A record of ring collectives with times of the event simulator, 1 % of them noise."""
    draw = random.Random(seed)
    rows = []
    for collective in collectives:
        ring = schedule.build(collective, "ring", n)
        for nbytes in (n << 10, n << 13, n << 16, n << 19):
            exact = ring.simulate(nbytes, ALPHA, BETA, GAMMA).time_s
            timing = Timing.of([exact * draw.uniform(0.99, 1.01)], 1)
            case = Case.of_size(collective, "f32", n, nbytes, algorithm="ring")
            rows.append(Row(case, timing, "ring/simple", 0))
            rows.append(Row(case.of_library("gloo"), Timing.of([1.0], 1), "auto", 0))
    written = Record(path, {})
    written.add(*rows)
    return str(path)


@pytest.mark.pure
@pytest.mark.parametrize("n", [2, 4, 7])
def test_injected_costs_of_simulated_rings_are_recovered(tmp_path: Path, n: int):
    files = [record(tmp_path / f"{name}.json", (name,), n, k) for k, name in enumerate(COLLECTIVES)]
    found = json.loads(invoke("bench", "fit", *files, "--json"))
    assert (found["ranks"], found["rows"]) == (n, 12)
    assert found["alpha_s"] == pytest.approx(ALPHA, rel=0.05)
    assert found["beta_s_per_byte"] == pytest.approx(BETA, rel=0.05)
    assert found["gamma_s_per_byte"] == pytest.approx(GAMMA, rel=0.05)
    assert found["r_squared"] > 0.999


@pytest.mark.pure
def test_rows_that_do_not_tell_the_costs_apart_are_refused(tmp_path: Path):
    reduces = record(tmp_path / "reduce.json", ("all_reduce",), 4)
    assert "do not tell alpha, beta and gamma apart" in invoke("bench", "fit", reduces, status=2)
    other = record(tmp_path / "gather.json", ("all_gather",), 2)
    assert "rows of [2, 4] ranks" in invoke("bench", "fit", reduces, other, status=2)
    empty = tmp_path / "empty.json"
    Record(empty, {}).save()
    assert "none of 0 rows is of the algorithm ring" in invoke("bench", "fit", str(empty), status=2)
    assert "is no record" in invoke("bench", "fit", str(tmp_path / "gone.json"), status=2)
    with pytest.raises(UsageError, match="apart"):
        fit_links([("all_reduce", 1024, 1.0), ("all_gather", 1024, 1.0)] * 2, 4)


@pytest.mark.ranks
def test_ranks_are_measured_and_fitted():
    text = invoke("bench", "fit", "--threads", "--sizes", "4K,64K", "--iterations", "3")
    assert text.count("all_gather") == 2 and "R^2" in text
    (alpha,) = (line for line in text.splitlines() if line.startswith("alpha"))
    assert alpha.endswith("for each message")


def slept(comm: pycoll.Communicator, collective: str, nbytes: int, costs: list[float]) -> float:
    """Seconds of a ring of messages whose costs are sleeps.

    A rank waits for its left neighbor's message, as in a ring, by a real message of one byte.
    """
    alpha, beta, gamma = costs
    part, token = nbytes / comm.size, bytearray(1)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    reduces = {"all_reduce": [True, False], "reduce_scatter": [True], "all_gather": [False]}
    comm.barrier()
    start = time.perf_counter()
    for reduce in reduces[collective]:
        for _ in range(comm.size - 1):
            time.sleep(alpha + part * beta)
            sent = comm.send(token, right, async_op=True)
            comm.recv(token, left)
            sent.wait()
            time.sleep(part * gamma if reduce else 0)
    comm.barrier()
    return time.perf_counter() - start


@pytest.mark.ranks
@pytest.mark.timing
def test_injected_costs_of_slept_rings_are_recovered():
    """Times of the wall clock, 4 s: sleeps of so many milliseconds that waking up takes little."""
    costs = [0.02, 40e-9, 20e-9]  # 20 ms; 25 and 50 MB/s

    def measure(comm: pycoll.Communicator) -> list[tuple[str, int, float]]:
        return [
            (collective, nbytes, min(slept(comm, collective, nbytes, costs) for _ in range(2)))
            for collective in COLLECTIVES
            for nbytes in (1 << 18, 1 << 20, 1 << 22)
        ]

    found = fit_links(pycoll.run_ranks(measure, 4, threads=True)[0], 4)
    assert found.alpha_s == pytest.approx(costs[0], rel=0.05)
    assert found.beta_s_per_byte == pytest.approx(costs[1], rel=0.05)
    assert found.gamma_s_per_byte == pytest.approx(costs[2], rel=0.05)
    assert found.r_squared > 0.99
