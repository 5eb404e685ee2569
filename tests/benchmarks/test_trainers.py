"""benchmarks/trainers.py: what it measures, its table, its goals."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from trainer_variants import Size, variants
from trainers import QUICK, missed, table, work, wrong

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.torch, pytest.mark.timeout(120)]


def row(mode: str, library: str, median_s: float, *losses: float) -> dict:
    return {"mode": mode, "library": library, "median_s": median_s, "losses": list(losses)}


ROWS = [
    row("none", "torch", 0.1, 5.0, 4.0),
    row("dp", "DDP, gloo", 0.14, 3.0, 2.0),
    row("dp", "DDP, pycoll", 0.12, 3.0, 2.0),
    row("dp", "pc", 0.115, 3.0, 2.0),
    row("cp", "pc", 0.05, 5.0, 4.0),
]


@pytest.mark.pure
def test_table_has_a_line_for_each_mode():
    lines = table(ROWS).splitlines()
    assert lines[2:] == [
        "| none | one process: 100 ms |  |  |  |  |  |",
        "| dp | DDP | 140 | 120 | 115 | 0.958 | 1.150 |",
        "| cp |  |  |  | 50 |  | 0.500 |",
    ]


@pytest.mark.pure
def test_goals_that_are_not_reached_are_named():
    assert missed(ROWS) == [
        "dp: 0.958 of torch's over pycoll, goal 0.95",
        "dp: 1.150 of no communication, goal 1.12",
    ]
    assert missed([*ROWS[:3], row("dp", "pc", 0.11, 3.0, 2.0)]) == []


@pytest.mark.pure
def test_variants_that_train_otherwise_are_named():
    assert wrong(ROWS) == []
    [text] = wrong([*ROWS[:3], row("dp", "pc", 0.1, 3.0, 2.1)])
    assert text.startswith("dp: pc has the losses [3.0, 2.1], DDP, gloo [3.0, 2.0]")


def test_variants_of_a_mode_are_trained_alike(tmp_path):
    """Three seconds: models of several libraries."""
    modes = list(variants(Size()))
    rows = pycoll.run_ranks(work, 2, str(tmp_path / "store"), QUICK, modes, 1, timeout_s=60)[0]
    assert {r["mode"] for r in rows} == set(modes) and len(rows) == 20
    assert wrong(rows) == []
    assert all(r["losses"][-1] < r["losses"][0] for r in rows)
    assert all(r["median_s"] > 0 for r in rows)
