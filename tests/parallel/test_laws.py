"""Laws of scaling: on numbers, and on jobs whose parts sleep."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pycoll import UsageError, run_ranks
from pycoll.cli.scale import report
from pycoll.parallel.tools import scaling_laws

SERIAL_S, SHARED_S = 0.2, 0.8  # a fifth of the time is not shared out


@pytest.mark.pure
def test_fits_find_what_the_laws_were_given():
    for parallel in (0.0, 0.5, 0.8, 1.0):
        times = {n: 3.0 / scaling_laws.amdahl(parallel, n) for n in (1, 2, 4, 8)}
        fit = scaling_laws.fit_amdahl(times)
        assert fit.parallel == pytest.approx(parallel, abs=1e-9)
        assert fit.speed_up == pytest.approx(fit.law)
        alone = {n: 3.0 * scaling_laws.gustafson(parallel, n) for n in times}
        fit = scaling_laws.fit_gustafson(dict.fromkeys(times, 3.0), alone)
        assert fit.parallel == pytest.approx(parallel, abs=1e-9)
        assert fit.efficiency == dict.fromkeys(times, 1.0)


@pytest.mark.pure
def test_bert_on_1472_devices_needs_a_serial_part_of_four_in_ten_thousand():
    """A month on one, 47 minutes on 1472: what Amdahl's law then leaves for the serial part."""
    speed_up = 43200 / 47
    serial = (1472 / speed_up - 1) / (1472 - 1)
    assert serial == pytest.approx(4.1e-4, rel=0.02)
    assert scaling_laws.amdahl(1 - serial, 1472) == pytest.approx(speed_up, rel=1e-9)


@pytest.mark.pure
def test_report_of_scaling_knows_strong_from_weak():
    strong = report({1: (1.0, 64), 2: (0.6, 64), 4: (0.4, 64)})
    assert strong["kind"] == "strong" and strong["parallel"] == pytest.approx(0.8)
    assert [row["efficiency"] for row in strong["rows"]] == pytest.approx([1, 1 / 1.2, 1 / 1.6])
    weak = report({1: (1.0, 64), 2: (1.25, 128)})
    assert weak["kind"] == "weak" and weak["rows"][1]["speed_up"] == pytest.approx(1.6)
    assert weak["rows"][1]["efficiency"] == pytest.approx(0.8)
    with pytest.raises(UsageError, match="they neither stay nor grow"):
        report({1: (1.0, 64), 2: (1.0, 100)})


@pytest.mark.pure
def test_times_without_one_rank_are_an_error():
    with pytest.raises(UsageError, match="expected times of one rank"):
        scaling_laws.fit_amdahl({2: 1.0, 4: 0.5})


@pytest.mark.slow  # it sleeps for half a minute
@pytest.mark.timing
@pytest.mark.ranks
def test_sleeping_jobs_are_as_the_laws_say():
    def job(comm, size: float) -> float:
        """Rank 0 does the serial part; sleep burns no core, so 8 ranks need not 8 of them."""
        comm.barrier()
        start = time.monotonic()
        if comm.rank == 0:
            time.sleep(SERIAL_S)
        comm.barrier()
        time.sleep(SHARED_S * size / comm.size)
        comm.barrier()
        return time.monotonic() - start

    def fastest(n: int, size: float) -> float:
        return min(max(run_ranks(job, n, size)) for _ in range(2))

    parallel = SHARED_S / (SERIAL_S + SHARED_S)
    strong = scaling_laws.fit_amdahl({n: fastest(n, 1.0) for n in (1, 2, 4, 8)})
    assert strong.parallel == pytest.approx(parallel, abs=0.02)
    for n, speed_up in strong.speed_up.items():
        assert speed_up == pytest.approx(strong.law[n], rel=0.05)
    weak = scaling_laws.fit_gustafson(
        {n: fastest(n, float(n)) for n in (1, 2, 4)},
        {n: fastest(1, float(n)) for n in (1, 2, 4)},
    )
    assert weak.parallel == pytest.approx(parallel, abs=0.03)
    assert np.allclose(list(weak.speed_up.values()), list(weak.law.values()), rtol=0.05)
