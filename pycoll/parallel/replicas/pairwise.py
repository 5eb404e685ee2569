"""Asynchronous gossip: a rank averages with one random neighbor, whatever that one is doing."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pycoll import threads
from pycoll.communicator import Communicator
from pycoll.errors import Error, UsageError
from pycoll.parallel.core.devices import settle
from pycoll.parallel.core.transfers import receive
from pycoll.parallel.replicas.weights import TIMES, Neighbors, Weights

_FOREVER_S = 1e6  # a rank may not be asked for as long as its neighbors compute


class Pairwise:
    """x_i, x_j <- (x_i + x_j) / 2 after each own step: no rank waits for one that computes.

    A thread of each rank answers its neighbors from a copy of the weights, which takes over the
    rank's own steps as they are made. The sum over all ranks stays, whatever the timing.

    Source: Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
        arXiv:1710.06952.
    """

    def __init__(self, weights: Weights, neighbors: Neighbors) -> None:
        graph, group = neighbors.graph, neighbors.group
        if any((b, a) not in graph.edges for a, b in graph.edges):
            raise UsageError(
                f"gossip: mode='adpsgd' averages pairs, and graph {graph.name} has one-way edges: "
                "take pc.graph.ring, complete, or another one of two-way edges"
            )
        self._weights, self._neighbors = weights, neighbors
        self._choices = graph.neighbors(group.rank)
        self._random = np.random.default_rng(group.rank)
        # Questions and answers have a communicator each: on each one, one thread waits at a time.
        self._answers = group.comm
        questions = group.comm.split(0)
        assert questions is not None
        self._questions = questions
        self._questions.timeout_s = _FOREVER_S
        # One element more than weights says whether the sender has ended.
        self._copy, self._sent, self._theirs = (weights.new(1) for _ in range(3))
        self._before, self._after = weights.new(), weights.new()
        self._lock = threading.Lock()
        self._is_fresh = True  # the weights are newer than the copy
        self._error: Error | None = None
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._is_started = False

    def step(self, update: Callable[[], object]) -> None:
        """See Mixing."""
        self._check()
        self._weights.read(self._before)
        if self._is_fresh:
            with self._alone():
                self._copy[:-1] = self._before
            self._is_fresh = False
        if not self._is_started:
            threads.start(self._thread, "the thread that answers neighbors")
            self._is_started = True
            # Neighbors may still ask while this rank's script ends.
            atexit.register(self.close)
        update()
        self._weights.read(self._after)
        with self._alone():
            self._copy[:-1] += self._after - self._before
            self._sent.copy_(self._copy)
        if self._choices:
            self._average(int(self._random.choice(self._choices)))
        with self._alone():
            self._weights.write(self._copy)

    def settle(self) -> None:
        """See Mixing."""
        if self._is_started:
            with torch.no_grad(), self._alone():
                self._weights.write(self._copy)

    def forget(self) -> None:
        """See Mixing."""
        with torch.no_grad(), self._alone():
            self._weights.read(self._copy)

    def close(self) -> None:
        """See Mixing."""
        if self._is_started:
            atexit.unregister(self.close)
            self._sent[-1] = 1
            for peer in self._choices:
                self._send(self._sent, peer, self._questions)
            self._thread.join()
            self._is_started = False
            with torch.no_grad():
                self._weights.write(self._copy)  # with the last questions of the neighbors
        self._check()
        self._questions.close()
        self._neighbors.close()

    def abort(self, reason: str) -> None:
        """Stops to answer: neighbors that wait raise an error with the reason."""
        if self._is_started:
            atexit.unregister(self.close)
            self._is_started = False
        for comm in (self._answers, self._questions):
            if not comm.closed:
                comm.abort(reason)

    def _average(self, peer: int) -> None:
        times = self._neighbors.times.message()
        answer = receive(self._answers, self._theirs, peer)
        of_answer = self._answers.recv(times, peer, TIMES, async_op=True)
        question = self._questions.send(self._sent, peer, async_op=True)
        self._neighbors.group.count("send", self._sent)
        of_question = self._neighbors.send_times(peer, self._questions)
        for work in (answer, of_answer, question, of_question):
            work.wait()
        with self._alone():
            self._neighbors.times.merge(times)
            self._copy.add_(self._theirs - self._sent, alpha=0.5)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, the other thread leaves the copy alone, on a device its stream too."""
        with self._lock:
            yield
            settle(self._copy.device)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _answer_all(self) -> None:
        """Answers until all neighbors have ended."""
        try:
            self._answer(set(self._choices))
        except Error as error:
            self._error = error
            self._answers.abort(f"gossip: {error}")

    @torch.no_grad()
    def _answer(self, left: set[int]) -> None:
        theirs, answer = self._weights.new(1), self._weights.new(1)
        while left:
            work = receive(self._questions, theirs, None)
            work.wait()
            assert work.source is not None
            if theirs[-1] == 1:
                left.remove(work.source)
                continue
            times = self._neighbors.times.message()
            self._questions.recv(times, work.source, TIMES, async_op=True).wait()
            with self._alone():
                self._neighbors.times.merge(times)
                answer.copy_(self._copy)
                self._copy.lerp_(theirs, 0.5)
                of_answer = self._neighbors.send_times(work.source, self._answers)
            self._send(answer, work.source, self._answers)
            of_answer.wait()

    def _send(self, vector: Tensor, peer: int, comm: Communicator) -> None:
        self._neighbors.group.count("send", vector)
        comm.send(vector, peer, async_op=True).wait()


__all__ = ["Pairwise"]
