"""An elastic training whose ranks are on several hosts, for tests and for injected faults."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from faults import Board
from namespaces import TOKEN, Network, Outcome, free_port
from points import Points
from torch import nn

import pycoll
from pycoll import parallel as pc

TIMEOUT_S = 20.0
VIRTUAL_REPLICAS = 4

Comm = pycoll.Communicator
Weights = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """What its ranks do.

    Attributes:
        steps: Commits of the whole training.
        step_s: Least duration of a step.
        zero: Level of ZeRO.
        full: After `waits_at` commits, rank 0 waits for new ranks until there are so many.
        waits_at: See `full`; 0: it does not wait.
        dies_at: The commit after which ranks are killed, between backward and the optimizer.
        victims: These ranks.
    """

    steps: int
    step_s: float = 0.0
    zero: int = 1
    full: int = 0
    waits_at: int = 0
    dies_at: int = 0
    victims: tuple[int, ...] = ()


def train(comm: Comm | None, training: Training, address: str, board: Board) -> Weights:
    """The weights after all steps; `comm` is None for a new rank."""
    former = -1 if comm is None else comm.rank
    torch.set_num_threads(1)

    def build(mesh: pc.Mesh) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model = pc.parallelize(model, mesh, zero=training.zero)
        optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        return {"model": model, "optimizer": optimizer, "loader": pc.loader(Points(), 12, mesh)}

    def wait_for_new_ranks(job: pc.Job) -> None:
        world, end_s = job.mesh.world, time.monotonic() + TIMEOUT_S / 2
        while world.rank == 0 and job.num_waiting < training.full - world.size:
            assert time.monotonic() < end_s, "no new ranks came"
            time.sleep(0.01)

    def loop(job: pc.Job) -> Weights:
        while job.commits < training.steps:
            for x, y in job.loader:
                job.model.step(x, y, loss=nn.functional.cross_entropy)
                if job.commits == training.dies_at > 0 and former in training.victims:
                    os.kill(os.getpid(), signal.SIGKILL)
                job.optimizer.step()
                time.sleep(training.step_s)
                if job.commits == training.waits_at > 0:
                    wait_for_new_ranks(job)
                job.commit()
                board.words[3] = job.commits
                if job.commits == training.steps:
                    break
        return {name: x.tolist() for name, x in pc.whole_weights(job.model).items()}

    return pc.elastic(  # type: ignore[no-any-return]
        build,
        loop,
        comm=comm,
        join=comm is None,
        address=address,
        virtual_replicas=VIRTUAL_REPLICAS,
        timeout_s=TIMEOUT_S,
    )


class Trained:
    """A training on hosts of a network."""

    def __init__(
        self, network: Network, training: Training, hosts: list[int], silence_s: float
    ) -> None:
        self._network, self._training, self._board = network, training, Board()
        port = free_port()
        self._address = ",".join(f"{network.address(host)}:{port}" for host in range(network.n))
        self._silence = {"PYCOLL_SILENCE_S": str(silence_s)}

        def rank() -> Weights:
            with pycoll.init(timeout_s=TIMEOUT_S) as comm:
                return train(comm, training, self._address, self._board)

        self.ranks = network.start_world(rank, hosts, **self._silence)

    def wait_for_commit(self, number: int) -> None:
        """Waits until the ranks have made so many commits."""
        end_s = time.monotonic() + TIMEOUT_S
        while self._board.words[3] < number and time.monotonic() < end_s:
            time.sleep(0.001)

    def add(self, host: int) -> None:
        """Starts a new rank."""

        def rank() -> Weights:
            return train(None, self._training, self._address, self._board)

        env = self._silence | {"PYCOLL_TOKEN": TOKEN}
        self.ranks.append(self._network.start(host, rank, **env))

    def outcomes(self) -> list[Outcome]:
        """What all ranks returned, the new ones last."""
        return self._network.outcomes(self.ranks, 3 * TIMEOUT_S)


def undisturbed(network: Network, training: Training) -> Weights:
    """The weights that one process gets."""
    calm = Training(training.steps, zero=training.zero)
    (outcome,) = Trained(network, calm, [0], 5.0).outcomes()
    weights: Weights = outcome.get()
    return weights


def has_bits(outcome: Outcome, weights: Weights) -> bool:
    """Whether a rank has these weights, to the bit."""
    return not outcome.error and all(
        np.array(outcome.value[name]).tobytes() == np.array(weights[name]).tobytes()
        for name in weights
    )
