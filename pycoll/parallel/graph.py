"""Graphs over which ranks average their weights: edges, and the weights of the averages.

from pycoll import parallel as pc
print(pc.graph.ring(8).spectral_gap)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pycoll.errors import UsageError

Edge = tuple[int, int]
_TINY = 1e-12  # rounding of weights


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Mixing matrices, one for each round of averaging, used in turn.

    Attributes:
        name: Its kind, such as "ring".
        rounds: Matrices of n x n float64. In a round, rank i's value becomes the sum over j of
            `rounds[k][i, j]` times rank j's value; every column adds up to 1, so the sum over
            all ranks stays.
    """

    name: str
    rounds: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        for matrix in self.rounds:
            if abs(matrix.sum(0) - 1).max() > 1e-9 or (matrix < -_TINY).any():
                raise UsageError(
                    f"graph {self.name}: expected weights of 0 or more whose columns add up to 1, "
                    f"found columns that add up to {np.round(matrix.sum(0), 6).tolist()}"
                )
        parts = _parts(self._used())
        if len(parts) > 1:
            text = " | ".join(", ".join(map(str, part)) for part in parts)
            raise UsageError(
                f"graph {self.name}: ranks {text} never hear of each other, so their weights would "
                "not come together: add edges between these parts"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rounds[0])

    @property
    def is_balanced(self) -> bool:
        """Whether rows add up to 1, too: equal values then stay equal, without push-sum."""
        return all(abs(matrix.sum(1) - 1).max() < 1e-9 for matrix in self.rounds)

    def matrix(self, step: int) -> np.ndarray:
        """The mixing matrix of a step, n x n float64."""
        return self.rounds[step % len(self.rounds)]

    def sources(self, rank: int, step: int) -> dict[int, float]:
        """The ranks whose values `rank` averages in a step, itself left out, with their weights."""
        row = self.matrix(step)[rank]
        return {int(j): float(row[j]) for j in np.flatnonzero(row > _TINY) if j != rank}

    def targets(self, rank: int, step: int) -> dict[int, float]:
        """The ranks that average the value of `rank` in a step, itself left out, with weights."""
        column = self.matrix(step)[:, rank]
        return {int(i): float(column[i]) for i in np.flatnonzero(column > _TINY) if i != rank}

    def neighbors(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` exchanges values with, in any round."""
        found: set[int] = set()
        for step in range(len(self.rounds)):
            found |= self.sources(rank, step).keys() | self.targets(rank, step).keys()
        return tuple(sorted(found))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All (source, target) over which values travel in any round."""
        return tuple((int(j), int(i)) for i, j in np.argwhere(self._used()) if i != j)

    def _used(self) -> np.ndarray:
        """Which values travel in any round: [target, source] bool."""
        return np.any([matrix > _TINY for matrix in self.rounds], axis=0)

    @property
    def contraction(self) -> float:
        """How much a round shrinks the distance of the values from their mean, at most.

        For one matrix W it is the 2-norm of W - 11'/n; for several, the n-th root of that of
        their product. 0: the mean is exact after all rounds; 1: there is no bound.
        """
        product = np.eye(self.size)
        for matrix in self.rounds:
            product = matrix @ product
        apart = float(np.linalg.norm(product - 1 / self.size, 2))
        return 0.0 if apart < 1e-9 else apart ** (1 / len(self.rounds))

    @property
    def spectral_gap(self) -> float:
        """1 - `contraction`: the larger, the faster the ranks agree."""
        return 1.0 - self.contraction

    def draw(self, target: str | Path) -> None:
        """Draws the graph, its weights and its spectral gap to a file, .svg or .png.

        Raises:
            UsageError: matplotlib is missing.
        """
        from pycoll.draw.mixing import draw_mixing

        draw_mixing(self, Path(target))

    def __repr__(self) -> str:
        rounds = f", {len(self.rounds)} rounds" if len(self.rounds) > 1 else ""
        return f"<graph {self.name} of {self.size} ranks{rounds}, gap {self.spectral_gap:.3f}>"


def complete(n: int) -> Graph:
    """Each rank averages with all others: as an all_reduce, of n (n-1) messages."""
    return from_edges(n, [(i, j) for i in range(n) for j in range(i)], name="complete")


def ring(n: int) -> Graph:
    """Each rank averages with the two next to it."""
    return from_edges(n, [(i, (i + 1) % n) for i in range(n) if n > 1], name="ring")


def path(n: int) -> Graph:
    """As a ring that is cut open."""
    return from_edges(n, [(i, i + 1) for i in range(n - 1)], name="path")


def star(n: int) -> Graph:
    """All average with rank 0."""
    return from_edges(n, [(0, i) for i in range(1, n)], name="star")


def torus(rows: int, columns: int) -> Graph:
    """Ranks in a grid whose edges are joined; each averages with its four neighbors."""
    _check_size("rows", rows)
    _check_size("columns", columns)
    place = np.arange(rows * columns).reshape(rows, columns)
    edges = [
        (int(a), int(b))
        for axis in (0, 1)
        for a, b in zip(place.ravel(), np.roll(place, -1, axis).ravel(), strict=True)
        if a != b
    ]
    return from_edges(rows * columns, edges, name=f"torus {rows} x {columns}")


def exponential(n: int) -> Graph:
    """Each rank sends to the ranks 1, 2, 4, ... behind it, and averages all with equal weights.

    Source: Assran et al. 2019, "Stochastic Gradient Push", arXiv:1811.10792.
    """
    _check_size("n", n)
    hops = _hops(n)
    matrix = np.eye(n)
    for hop in hops:
        matrix += np.roll(np.eye(n), hop, 0)
    return Graph("exponential", (matrix / (len(hops) + 1),))


def one_peer_exponential(n: int) -> Graph:
    """In round k each rank averages with the rank 2^k before it: one message a round.

    With n a power of two, the mean is exact after log2 n rounds.

    Source: Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep
        Training", arXiv:2110.13363.
    """
    _check_size("n", n)
    if n == 1:
        return Graph("one-peer exponential", (np.ones((1, 1)),))
    eye = np.eye(n)
    rounds = tuple((eye + np.roll(eye, hop, 0)) / 2 for hop in _hops(n))
    return Graph("one-peer exponential", rounds)


def random_regular(n: int, degree: int, seed: int = 0) -> Graph:
    """A random graph in which each rank has `degree` neighbors.

    Raises:
        UsageError: No such graph exists.

    Cost: it is drawn again until it is simple and connected, at most 10,000 times.
    """
    _check_size("n", n)
    if not 0 < degree < n or n * degree % 2:
        raise UsageError(
            f"random_regular: no graph of {n} ranks has {degree} neighbors each: expected a degree "
            f"from 1 to {n - 1}, and an even number of ranks times degree"
        )
    rng = np.random.default_rng(seed)
    ends = np.repeat(np.arange(n), degree)
    for _ in range(10_000):
        pairs = rng.permutation(ends).reshape(-1, 2)
        found = {(int(min(a, b)), int(max(a, b))) for a, b in pairs if a != b}
        if len(found) == len(pairs) and len(_parts(_adjacency(n, found))) == 1:
            return from_edges(n, sorted(found), name=f"random {degree}-regular")
    raise UsageError(f"random_regular: found no connected graph of {n} ranks of degree {degree}")


def from_edges(
    n: int, edges: Iterable[Edge], *, directed: bool = False, name: str = "edges"
) -> Graph:
    """A graph from a list of edges.

    Args:
        n: Number of ranks.
        edges: Pairs of ranks.
        directed: Values travel from the first rank of a pair to the second alone. A rank then
            gives equal shares to itself and to the ranks that it sends to, for `mode="sgp"`.
            Otherwise weights are Metropolis': 1 / (1 + the larger degree of both ends).
        name: Its name in texts and pictures.

    Raises:
        UsageError: A rank is not one of 0 .. n-1, or the graph is not connected.
    """
    _check_size("n", n)
    matrix = np.zeros((n, n))
    pairs = {(int(a), int(b)) for a, b in edges}
    for a, b in pairs:
        if not (0 <= a < n and 0 <= b < n) or a == b:
            raise UsageError(
                f"graph {name}: edge ({a}, {b}), expected two of the ranks 0 .. {n - 1}"
            )
    if directed:
        sent = np.eye(n)
        for a, b in pairs:
            sent[b, a] = 1
        return Graph(name, (sent / sent.sum(0),))
    joined = _adjacency(n, pairs)
    degrees = joined.sum(1)
    for a, b in np.argwhere(joined):
        matrix[a, b] = 1 / (1 + max(degrees[a], degrees[b]))
    matrix += np.diag(1 - matrix.sum(1))
    return Graph(name, (matrix,))


def _check_size(what: str, n: int) -> None:
    if n < 1:
        raise UsageError(f"graph: {what} is {n}, expected 1 or more")


def _hops(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def _adjacency(n: int, edges: Iterable[Edge]) -> np.ndarray:
    joined = np.zeros((n, n), bool)
    for a, b in edges:
        joined[a, b] = joined[b, a] = True
    return joined


def _parts(reaches: np.ndarray) -> list[list[int]]:
    """Groups of ranks that all reach each other; `reaches[i, j]`: j's value arrives at i."""
    n = len(reaches)
    closure = (reaches > 0) | np.eye(n, dtype=bool)
    for _ in range(max(1, n.bit_length())):
        closure = closure.astype(np.int64) @ closure.astype(np.int64) > 0
    both = closure & closure.T
    found: list[list[int]] = []
    for rank in range(n):
        if not any(rank in part for part in found):
            found.append(np.flatnonzero(both[rank]).tolist())
    return found


__all__ = [
    "Graph",
    "complete",
    "exponential",
    "from_edges",
    "one_peer_exponential",
    "path",
    "random_regular",
    "ring",
    "star",
    "torus",
]
