"""The benchmarks of replicas and of HOGWILD, with tiny sizes."""

from __future__ import annotations

import dataclasses
import re

import diloco
import gossip_hosts
import hogwild
import pytest
import replicas
from typer.testing import CliRunner

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.torch, pytest.mark.timeout(120)]


def test_replicas_are_compared_in_a_table_and_a_picture(tmp_path, monkeypatch):
    """Three seconds: two ways, each with a straggler and without."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    few = dataclasses.replace(replicas.digits(), most_steps=20, target=0.1)
    monkeypatch.setattr(replicas, "TASKS", {"digits": lambda: few})
    monkeypatch.setattr(replicas, "COMPUTE_S", 0.001)
    results = [
        replicas.measure("digits", mode, straggler)
        for mode in ("allreduce", "ps:mode=async")
        for straggler in (False, True)
    ]
    assert [len(r.steps) for r in results] == [replicas.RANKS] * 4
    assert all(r.accuracy_s == pytest.approx(r.epoch_s * r.epochs) for r in results)
    parameters = 64 * 64 + 64 + 64 * 10 + 10
    ring = 2 * (replicas.RANKS - 1) * 4 * parameters  # bytes of all ranks in a step
    assert results[0].nbytes == pytest.approx(ring, rel=0.02)
    assert results[0].staleness is None and results[2].staleness > 0
    text = replicas.table(results)
    assert len(text.splitlines()) == 4 and "| digits | `ps:mode=async` |" in text
    replicas.plot(results, tmp_path / "replicas.svg")
    assert "time to accuracy" in (tmp_path / "replicas.svg").read_text()


def test_hogwild_compares_locks(tmp_path):
    """Two seconds."""
    pytest.importorskip("sklearn")
    app = hogwild.typer.Typer()
    app.command()(hogwild.main)
    done = CliRunner().invoke(
        app, ["--epochs", "1", "--rounds", "1", "--json", str(tmp_path / "found.json")]
    )
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\| .* \| \d \| (none|atomic|mutex) \| \d\.\d+ \|", done.output, re.M)
    assert rows == ["none", "none", "atomic", "mutex"] * 2
    assert "rho 1" in done.output and (tmp_path / "found.json").exists()


@pytest.mark.pure
def test_epochs_of_one_worker_to_a_loss_are_read_off_its_curve():
    assert hogwild.same_epochs(0.7, [0.9, 0.8, 0.6]) == pytest.approx(2.5)
    assert hogwild.same_epochs(0.5, [0.9, 0.8, 0.6]) == 3


def test_bytes_of_local_steps_are_those_predicted():
    """Three seconds: a GPT on two ranks, four steps, an exchange every two."""
    task = replicas.gpt()
    count = sum(p.numel() for p in task.make().parameters())
    for mode in ("allreduce", "local:steps=2", "local:steps=2,compress=int8"):
        found = pycoll.run_ranks(diloco.trained, 2, task, mode, 4, 1e-3, timeout_s=60)
        expected = diloco.predicted(mode, 2, count, 4, 2)
        few = 0.01 if mode == "allreduce" else 0  # sums of losses and samples
        assert found[0][1] == pytest.approx(expected, rel=few)
        assert found[0][0] == found[1][0] > 0


@pytest.mark.hosts
@pytest.mark.slow  # makes hosts, and builds the program that delays their packets
def test_gossip_and_all_reduce_are_compared_on_slow_links():
    pytest.importorskip("sklearn")
    if why := gossip_hosts.why_not():
        pytest.skip(why)
    with gossip_hosts.throttled(2, 0.001) as network:
        results = gossip_hosts.measure(network, 8, 3, 1)
    assert [r.mode for r in results] == list(gossip_hosts.MODES) and results[0].factor == 1
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    assert all(r.parameters == parameters and r.step_s > 0 for r in results)
    assert results[1].nbytes >= 4 * parameters
    assert len(gossip_hosts.table(results).splitlines()) == 5
