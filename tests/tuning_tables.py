"""Rows of measured tables, and what communicators make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pycoll import _core, run_ranks
from pycoll.cli import app

DATE = "2026-11-21T14:30:00Z"
CORES = _core.build_info()["cores"]


# The ranks of most tests are threads, which reach each other's arrays: mapped ones to the table.
def size(
    collective="all_reduce", ranks=2, cores=CORES, arrays="mapped", nbytes=4096, date=DATE, **times
):
    named = {name.replace("__", "/"): time_s for name, time_s in times.items()}
    return _core.TunedSize(collective, ranks, cores, arrays, nbytes, date, named)


def cost(
    protocol="simple", ranks=2, cores=CORES, arrays="mapped", alpha=1e-6, beta=1e-10, gamma=1e-11
):
    return _core.TunedCost(ranks, cores, arrays, DATE, protocol, alpha, beta, gamma)


def as_rows(table: _core.TuningTable) -> list:
    costs = [(c.num_ranks, c.arrays, c.protocol, c.alpha_s) for c in table.costs]
    return costs + [
        (s.collective, s.num_ranks, s.num_cores, s.arrays, s.nbytes, s.date, s.times)
        for s in table.sizes
    ]


def explained(
    n: int = 2,
    nbytes: int = 4096,
    collective: str = "all_reduce",
    threads: bool = True,
    mapped: bool = False,
) -> str:
    texts = run_ranks(
        lambda comm: comm.explain(collective, nbytes, mapped=mapped), n, threads=threads
    )
    assert len(set(texts)) == 1
    return texts[0]


def choice(**asked) -> str:
    return explained(**asked).splitlines()[0].rpartition(": ")[2].partition(" over ")[0]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
