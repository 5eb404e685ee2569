"""Parameter servers on Ray: sync training of one process; a killed worker that comes back.

Slow: Ray needs 10 s to start two nodes, and some seconds for each process, which imports torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="pip install 'pycoll[ray]'")

import ray

import pycoll.ray
from pycoll import parallel as pc

pytestmark = [pytest.mark.torch, pytest.mark.ranks, pytest.mark.slow]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLED_AT, RATE = 10, 5, 0.5


def served(job, options, killed, back):
    pc.ps.start(job.comm, listen=job.addresses()[:2], **options).serve()


def worked(job, options, killed, back):
    """Descends with the other workers; returns the last weights, (3,), and the first step."""
    if job.is_restarted:
        with pc.ps.join(job.addresses()[:2]) as worker:
            Path(back).touch()
            return descended(job, worker, KILLED_AT, -1, back)
    part = pc.ps.start(job.comm, listen=job.addresses()[:2], **options)
    try:
        return descended(job, part.worker, 0, killed, back)
    finally:
        part.close()


def descended(job, worker, begun, killed, back):
    """Steps along the gradient of |w - (0, 1, 2) - actor - step|^2 / 2."""
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    worker.register(model)
    for step in range(begun, STEPS):
        if job.actor == killed and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if killed >= 0 and step == KILLED_AT + 2:  # not the end before it is back
            deadline = time.monotonic() + 60
            while not Path(back).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        worker.pull()
        model.zero_grad()
        target = torch.arange(3.0, dtype=torch.float64) + job.actor + step
        ((model.weight - target) ** 2 / 2).sum().backward()
        worker.push()
        worker.clock()
    worker.pull()
    return model.weight.detach().flatten().tolist(), begun


@pytest.mark.timeout(600)  # six processes that import torch, and one of them twice
def test_servers_and_workers_train_as_one_process_and_a_worker_returns(cluster, tmp_path):
    role = pycoll.ray.Role
    roles = {"server": role(2, num_cpus=0.5), "worker": role(4, num_cpus=0.5)}
    functions = {"server": served, "worker": worked}
    back = str(tmp_path / "back")
    sync = {"servers": 2, "mode": "sync", "optimizer": pc.ps.SGD(RATE)}
    with pycoll.ray.start(roles, strategy="SPREAD", max_restarts=-1) as world:
        found = world.run(functions, sync, -1, back, timeout_s=240)
    weights = np.zeros(3)
    for step in range(STEPS):
        weights -= RATE * np.mean([weights - np.arange(3) - a - step for a in range(2, 6)], 0)
    for of_worker, _ in found[2:]:
        assert np.allclose(of_worker, weights, rtol=0, atol=1e-10)

    with pycoll.ray.start(roles, strategy="SPREAD", max_restarts=-1) as world:
        found = world.run(functions, {**sync, "mode": "async"}, 4, back, timeout_s=240)
    assert [begun for _, begun in found[2:]] == [0, 0, KILLED_AT, 0]
    for of_worker, _ in found[2:]:  # the mean target of the last steps, at some staleness
        assert np.all(np.abs(np.subtract(of_worker, weights)) < 5)


def test_example_reaches_its_target(cluster):
    pytest.importorskip("sklearn")
    options = ["--mode", "async", "--servers", "2", "--address", cluster.address]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "ray_servers.py", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "2 workers, async: accuracy" in done.stdout
