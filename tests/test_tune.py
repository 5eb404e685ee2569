"""The measurement behind the table, and the command that makes and checks it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys

import pytest
from tuning_tables import DATE, cache, choice, invoke

import pycoll
from pycoll import _core, run_ranks, tuning
from pycoll.cli import tune

__all__ = ["cache"]  # a fixture


@pytest.mark.ranks
def test_measure_gives_the_same_times_of_every_choice_on_all_ranks():
    def work(comm: pycoll.Communicator) -> tuple:
        effort = tuning.Effort(rounds=6, batch_s=1e-5)
        found = [
            tuning.measure(comm, name, 256, effort, arrays)
            for name, arrays in (("all_reduce", "plain"), ("all_gather", "mapped"))
        ]
        return [(m.collective, m.nbytes, m.rounds_s) for m in found]

    first, second = run_ranks(work, 2)
    assert first == second
    for collective, nbytes, rounds_s in first:
        assert set(rounds_s) == set(_core.choices(collective, nbytes))
        assert all(len(times) in (2, 5, 6) and min(times) > 0 for times in rounds_s.values())


@pytest.mark.pure
def test_lower_quartile_and_ratio_pass_over_disturbed_rounds():
    measured = tuning.Measured(
        "all_reduce", "plain", 4, {"a/ll": [9, 1, 8, 7, 1.5], "b/ll": [2, 2, 2, 2, 2]}
    )
    assert measured.times_s() == {"a/ll": 1.5, "b/ll": 2}
    assert measured.behind("a/ll") == 1
    assert measured.behind("b/ll") == pytest.approx(4 / 3)


@pytest.mark.pure
def test_visits_have_equal_weight_and_pairs_pass_over_slow_spells():
    first = tuning.Measured("all_reduce", "plain", 4, {"a/ll": [1.0], "b/ll": [4.0], "c/ll": [2.0]})
    both = tuning.Measured("all_reduce", "plain", 4, {"a/ll": [9.0], "b/ll": [4.0]}).after(first)
    assert both.times_s() == {"a/ll": pytest.approx(3), "b/ll": pytest.approx(4)}
    assert both.best() == "a/ll"
    paired = tuning.Measured(
        "all_reduce", "plain", 4, {tuning.AUTO: [2.2, 22.0, 2.2], "a/ll": [2.0, 20.0, 1.0]}
    )
    assert paired.best() == "a/ll"
    assert paired.paired(tuning.AUTO, "a/ll") == pytest.approx(1.1)


@pytest.mark.ranks
def test_check_measures_again_what_seemed_slow_and_only_that(monkeypatch):
    """The second measurement decides, and both are shown."""
    asked = []

    def measure(comm, collective, nbytes, effort, arrays, choices):
        asked.append((nbytes, list(choices), effort.rounds))
        slow = 3.0 if nbytes != 64 and len(choices) > 2 else 1.0
        rounds_s = {choice: [1e-6] * 3 for choice in choices}
        return tuning.Measured(
            collective, arrays, nbytes, {**rounds_s, tuning.AUTO: [slow * 1e-6] * 3}
        )

    monkeypatch.setattr(tuning, "measure", measure)
    comm = run_ranks(lambda comm: comm, 1, threads=True)[0]
    monkeypatch.setattr(tuning, "spread_ranks", lambda comm: None)
    cases = [("all_reduce", "plain", nbytes) for nbytes in (4, 64, 256)]
    sizes = tune._check(comm, cases, tuning.Effort(rounds=5), "", False)
    assert [nbytes for nbytes, _, _ in asked] == [4, 64, 256, 4, 256]
    assert all(len(choices) == 2 and rounds == 10 for _, choices, rounds in asked[3:])
    assert [size.first_ratio for size in sizes] == [pytest.approx(3), 1, pytest.approx(3)]
    assert [size.ratio for size in sizes] == [1, 1, 1]


@pytest.mark.pure
def test_fit_finds_the_costs_that_the_times_were_made_with():
    true = {
        "simple": (3e-7, 5e-11, 2e-11),
        "ll": (1e-7, 3e-10, 1e-11),
        "direct": (2e-7, 2e-11, 3e-11),
    }
    sizes = []
    for nbytes in (4, 1024, 16384, 65536, 1 << 20):
        times = {}
        for name in ("one_shot", "ring", "tree", "star"):
            for protocol, costs in true.items():
                if (name, protocol) == ("tree", "direct"):
                    continue  # passes partial sums on
                predictor = _core.Predictor(
                    [("all_reduce", name, nbytes)], protocol, "mapped", 2, 2
                )
                times[f"{name}/{protocol}"] = predictor.times(*costs)
        sizes.append(tuning.Measured("all_reduce", "mapped", nbytes, times))
    for row in tuning.fit_costs(sizes, 2, 2, DATE):
        fitted = (row.alpha_s, row.beta_s_per_byte, row.gamma_s_per_byte)
        for measured in sizes:
            for candidate, (time_s,) in measured.rounds_s.items():
                name, protocol = candidate.split("/")
                if protocol == row.protocol:
                    predictor = _core.Predictor(
                        [("all_reduce", name, measured.nbytes)], protocol, "mapped", 2, 2
                    )
                    assert predictor.times(*fitted) == [pytest.approx(time_s, rel=0.1)]


def test_other_processes_arrays_are_read_only_in_predictions_too():
    """Rank 1 reads the whole broadcast; in mapped arrays, rank 0 writes half of it."""
    times = {}
    for arrays in ("plain", "mapped"):
        message = ("broadcast", "scatter_all_gather", 1 << 24)
        predictor = _core.Predictor([message], "direct", arrays, 2, 2)
        (times[arrays],) = predictor.times(0, 1e-10, 0)
    assert times["plain"] == pytest.approx((1 + 0.25 / 2) * 1e-10 * (1 << 24), rel=1e-3)
    assert times["mapped"] == pytest.approx((1 + 0.25) / 2 * 1e-10 * (1 << 24), rel=1e-3)


# The command.


@pytest.mark.ranks
def test_tune_writes_a_table_that_is_used(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "_SWEEPS", 1)  # visits have a test of their own
    picture = tmp_path / "chosen.svg"
    result = invoke(
        "tune", "-n", "2", "-c", "all_reduce", "--min", "256", "--max", "4K", "--rounds", "3",
        "--json", "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {(row["collective"], row["arrays"], row["nbytes"]) for row in rows} == {
        ("all_reduce", arrays, nbytes)
        for arrays in tuning.ARRAYS
        for nbytes in (256, 1024, 4096)
        if arrays == "plain" or nbytes >= 1024  # below, the kind of arrays makes no difference
    }
    table, note = tuning.load()
    assert note == str(tuning.path())
    assert {(c.arrays, c.protocol) for c in table.costs} == {
        (arrays, protocol) for arrays in tuning.ARRAYS for protocol in ("simple", "ll", "direct")
    } - {("plain", "direct")}  # such small arrays are copied
    for row in rows:
        assert any(choice.endswith("/direct") for choice in row["times_s"]) == (
            row["nbytes"] >= 1024
        )
        chosen = choice(
            nbytes=row["nbytes"],
            collective=row["collective"],
            threads=False,
            mapped=row["arrays"] == "mapped",
        )
        assert chosen == row["chosen"]
        on_copies = row["arrays"] == "plain" and chosen.endswith("/direct")
        if on_copies:  # by the algorithm that is best for mapped arrays
            assert min(row["times_s"], key=row["times_s"].get).endswith("/direct")
        elif row["arrays"] == "plain" or chosen.endswith("/direct"):
            assert row["ratio"] == 1  # the fastest measured is what is chosen
    assert picture.read_text().startswith("<?xml")
    assert stat.S_IMODE(tuning.path().stat().st_mode) & 0o600


@pytest.mark.slow
@pytest.mark.ranks
def test_tune_check_only_writes_nothing_tells_by_its_status_and_shows_progress(cache):
    command = [sys.executable, "-m", "pycoll", "tune", "-c", "scan", "--max", "4K"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--check-only"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode in (0, 1), done.stderr
    for arrays in tuning.ARRAYS:
        assert f"scan, 2 ranks, {arrays} arrays: worst choice" in done.stdout
    assert "s: scan, plain arrays, 4 B (1 of " in done.stderr
    assert not cache.exists()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-n", "1"], "expected -n 2 or more"),
        (["-c", "barrier"], "expected --collectives of all_reduce"),
        (["-c", "nope"], "expected --collectives of all_reduce"),
        (["--max", "much"], "is not a size"),
        (["--arrays", "some"], "expected --arrays plain, mapped or both"),
        (["--plot", "x.bmp"], "svg"),
    ],
)
def test_tune_asked_wrongly_says_what_it_expects(arguments, why):
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    assert why in result.output
