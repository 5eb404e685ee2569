"""How sparse the updates of examples are: the numbers on which HOGWILD's speed depends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Statistics of the variables that each example's update touches.

    Attributes:
        omega: Most variables that an example touches.
        delta: Largest share of the examples that touch one variable.
        rho: Largest share of the examples that share a variable with one example.

    Source: Niu et al. 2011, "Hogwild!", section 2.
    """

    omega: int
    delta: float
    rho: float

    def __str__(self) -> str:
        return f"Omega {self.omega}, Delta {self.delta:.4g}, rho {self.rho:.4g}"


def sparsity(starts: np.ndarray, variables: np.ndarray) -> Sparsity:
    """Computes the statistics.

    Args:
        starts: Example e touches the variables at [starts[e], starts[e + 1]), [examples + 1] int64.
        variables: Numbers of variables, each at most once for an example; int.

    Returns:
        The statistics, exactly.

    Cost: a sort of the variables; for rho, the neighbors of the examples with most of them, until
        no other one can have more.
    """
    num_examples = len(starts) - 1
    sizes = np.diff(starts)
    if not len(variables):
        return Sparsity(0, 0.0, 0.0)
    degrees = np.bincount(variables)
    examples = np.repeat(np.arange(num_examples), sizes)
    by_variable = examples[np.argsort(variables, kind="stable")]
    firsts = np.concatenate([[0], np.cumsum(degrees)])
    full = np.flatnonzero(sizes)
    bounds = np.zeros(num_examples, np.int64)  # neighbors, where those of two variables differ
    bounds[full] = np.add.reduceat(degrees[variables], starts[:-1][full])
    most, seen = 0, set()
    for example in np.argsort(-bounds, kind="stable"):
        if bounds[example] <= most:
            break
        touched = variables[starts[example] : starts[example + 1]]
        if touched.tobytes() in seen:
            continue
        seen.add(touched.tobytes())
        near = [by_variable[firsts[v] : firsts[v + 1]] for v in touched]
        most = max(most, len(np.unique(np.concatenate(near))))
        if most == num_examples:
            break
    return Sparsity(int(sizes.max()), int(degrees.max()) / num_examples, most / num_examples)


__all__ = ["Sparsity", "sparsity"]
