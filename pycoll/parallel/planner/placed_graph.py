"""Which rank runs each operator of a graph: operators on different ranks run at the same time.

A step is simulated as tasks: a forward pass and a backward pass of each operator. A rank runs its
tasks in the order of the graph, the backward passes in reverse. Only tasks whose
time a proposal changes are simulated again.

Source: FlexFlow, Jia, Zaharia, Aiken, SysML 2019, sections 5.1 and 5.2.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pycoll.errors import UsageError
from pycoll.parallel.planner.operator_graph import Edge

Places = tuple[int, ...]  # the rank of each operator


@dataclass(frozen=True, slots=True)
class Task:
    """An operator: seconds of its passes, and bytes that its rank keeps for it."""

    name: str
    forward_s: float
    backward_s: float
    kept: int = 0


class Simulated:
    """The times of all tasks of a step, for places that may change.

    Attributes:
        places: The rank of each operator.
        ends: The end of each task in seconds: forward passes in order, then backward passes in
            reverse order.
        simulated: Number of tasks whose end was computed so far.
    """

    def __init__(self, graph: PlacedGraph, places: Places) -> None:
        """Simulates all tasks. Cost: about 2 us for each operator and each tensor."""
        self._graph, self.places = graph, list(places)
        count = len(graph.nodes)
        self._tasks: list[list[int]] = [[] for _ in range(graph.world)]  # of each rank, in order
        for task in range(2 * count):
            self._tasks[places[graph.node_of(task)]].append(task)
        self.ends = [0.0] * (2 * count)
        self.simulated = 0
        for task in range(2 * count):
            self.ends[task] = self._end(task)

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return max(self.ends[tasks[-1]] for tasks in self._tasks if tasks)

    def move(self, places: Places) -> None:
        """Changes the places, and simulates what that changes.

        Cost: as for a new simulation, for the tasks whose time changes only.
        """
        graph = self._graph
        moved = [i for i, rank in enumerate(places) if rank != self.places[i]]
        dirty = set[int]()
        for task in [task for i in moved for task in graph.tasks_of(i)]:
            node = graph.node_of(task)
            before, after = self._tasks[self.places[node]], self._tasks[places[node]]
            dirty.update((task, *graph.users(task), *_behind(before, task), *_behind(after, task)))
            before.remove(task)
            insort(after, task)
        for i in moved:
            self.places[i] = places[i]
        waiting = sorted(dirty)  # a sorted list is a heap
        while waiting:
            task = heapq.heappop(waiting)
            end = self._end(task)
            if end != self.ends[task]:
                self.ends[task] = end
                mine = self._tasks[self.places[graph.node_of(task)]]
                for later in (*graph.users(task), *_behind(mine, task)):
                    if later not in dirty:
                        dirty.add(later)
                        heapq.heappush(waiting, later)

    def _end(self, task: int) -> float:
        """The end of a task by those before it on its rank, and by what it receives."""
        graph, places = self._graph, self.places
        self.simulated += 1
        node = graph.node_of(task)
        mine = self._tasks[places[node]]
        at = bisect_left(mine, task)
        start = self.ends[mine[at - 1]] if at else 0.0
        for other, message_s in graph.needs(task):
            is_remote = places[graph.node_of(other)] != places[node]
            start = max(start, self.ends[other] + (message_s if is_remote else 0.0))
        return start + graph.task_s(task)


@dataclass(slots=True)
class PlacedGraph:
    """Operators in an order in which they can run; a space for "exhaustive" and "mcmc".

    Attributes:
        nodes: The operators.
        edges: The tensors between them; `same` is not used.
        world: Number of ranks.
        latency_s: Seconds of an empty message.
        link_bytes_per_s: Bytes per second of a message; messages do not slow each other down.
        memory: Bytes that a rank may keep; None: no limit.
    """

    nodes: tuple[Task, ...]
    edges: tuple[Edge, ...]
    world: int
    latency_s: float = 0.0
    link_bytes_per_s: float = math.inf
    memory: int | None = None
    _needs: list[list[tuple[int, float]]] = field(init=False)
    _users: list[list[int]] = field(init=False)
    _now: Simulated | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        count = len(self.nodes)
        if self.world < 1 or not count:
            raise UsageError(f"placed graph: {count} operators, {self.world} ranks, expected 1 up")
        self._needs, self._users = [[] for _ in range(2 * count)], [[] for _ in range(2 * count)]
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < count:
                raise UsageError(f"placed graph: {edge}: expected source < target < operators")
            message_s = self.latency_s + edge.nbytes / self.link_bytes_per_s
            (made, gradient), (used, answer) = map(self.tasks_of, (edge.source, edge.target))
            for first, then in ((made, used), (answer, gradient)):
                self._needs[then].append((first, message_s))
                self._users[first].append(then)

    def tasks_of(self, node: int) -> tuple[int, int]:
        """The forward and the backward pass of an operator."""
        return node, 2 * len(self.nodes) - 1 - node

    def node_of(self, task: int) -> int:
        """The operator of a task."""
        return min(task, 2 * len(self.nodes) - 1 - task)

    def task_s(self, task: int) -> float:
        """Seconds of a task."""
        node = self.nodes[self.node_of(task)]
        return node.forward_s if task < len(self.nodes) else node.backward_s

    def needs(self, task: int) -> list[tuple[int, float]]:
        """The tasks that a task waits for, and the seconds of a message from another rank."""
        return self._needs[task]

    def users(self, task: int) -> list[int]:
        """The tasks that wait for a task."""
        return self._users[task]

    def cost(self, places: Places) -> float:
        """Seconds of a step; infinity if the memory of a rank does not suffice.

        Cost: microseconds for each task whose time differs from that in the places before.
        """
        if self.memory is not None:
            kept = [0] * self.world
            for node, rank in zip(self.nodes, places, strict=True):
                kept[rank] += node.kept
            if max(kept) > self.memory:
                return math.inf
        if self._now is None:
            self._now = Simulated(self, places)
        else:
            self._now.move(places)
        return self._now.seconds

    def points(self) -> Iterator[Places]:
        """All places of all operators."""
        return itertools.product(range(self.world), repeat=len(self.nodes))

    def start(self) -> Places:
        """All operators on rank 0; with a limit of memory, each on the rank that keeps least."""
        if self.memory is None:
            return (0,) * len(self.nodes)
        kept, places = [0] * self.world, []
        for node in self.nodes:
            places.append(kept.index(min(kept)))
            kept[places[-1]] += node.kept
        return tuple(places)

    def neighbors(self, places: Places) -> Sequence[Places]:
        """Places that differ in one operator, made when they are asked for."""
        return Moves(places, self.world)


@dataclass(frozen=True, slots=True)
class Moves(Sequence[Places]):
    """The places that differ from some in one operator."""

    places: Places
    world: int

    def __len__(self) -> int:
        return len(self.places) * (self.world - 1)

    def __getitem__(self, number: int) -> Places:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        node, by = divmod(number, self.world - 1)
        rank = (self.places[node] + 1 + by) % self.world
        return (*self.places[:node], rank, *self.places[node + 1 :])


def _behind(tasks: list[int], task: int) -> list[int]:
    """The next task of a rank, if there is one."""
    at = bisect_left(tasks, task + 1)
    return tasks[at : at + 1]


__all__ = ["Moves", "PlacedGraph", "Places", "Simulated", "Task"]
