"""Latency, time per byte and time of reducing, fitted to measured times of collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pycoll.errors import UsageError

Row = tuple[str, int, float]  # collective, payload in bytes, seconds

# Ring algorithms: messages, bytes sent, and bytes reduced, each as a multiple for n ranks.
_TERMS = {
    "all_reduce": (2, 2, 1),
    "reduce_scatter": (1, 1, 1),
    "all_gather": (1, 1, 0),
}
COLLECTIVES = tuple(_TERMS)


@dataclass(frozen=True, slots=True)
class Fit:
    """t = messages alpha + sent bytes beta + reduced bytes gamma.

    Attributes:
        alpha_s: Seconds of a message of no bytes.
        beta_s_per_byte: Seconds per byte that a rank sends.
        gamma_s_per_byte: Seconds per byte that a rank reduces.
        r_squared: Share of the variation of log t that the fit explains.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    r_squared: float

    def seconds(self, collective: str, nbytes: int, num_ranks: int) -> float:
        """Time that the fit gives for a collective."""
        messages, sent, reduced = _of(collective, nbytes, num_ranks)
        return (
            messages * self.alpha_s + sent * self.beta_s_per_byte + reduced * self.gamma_s_per_byte
        )


def fit_links(rows: Iterable[Row], num_ranks: int) -> Fit:
    """Fits alpha, beta and gamma to times of ring collectives.

    Args:
        rows: Collective, payload in bytes and seconds of each measurement, of two collectives and
            two sizes or more.
        num_ranks: Number of ranks, 2 or more.

    Returns:
        The fit by least squares of relative errors, with no term below 0.

    Raises:
        UsageError: There are fewer than three rows, a collective that has no formula, or rows that
            do not tell the three costs apart.

    Source: Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994.
    """
    measured = list(rows)
    if len(measured) < 3 or num_ranks < 2:
        raise UsageError(
            f"fit: {len(measured)} measurements on {num_ranks} ranks, expected 3 or more on 2 or "
            "more"
        )
    terms = np.array([_of(name, nbytes, num_ranks) for name, nbytes, _ in measured], float)
    times = np.array([seconds for _, _, seconds in measured])
    if np.linalg.matrix_rank(terms / np.linalg.norm(terms, axis=0).clip(1e-300)) < 3:
        raise UsageError(
            f"fit: {len(measured)} measurements of {', '.join(sorted({m[0] for m in measured}))} "
            "do not tell alpha, beta and gamma apart: expected two sizes and two collectives or "
            "more, such as all_reduce and all_gather"
        )
    solution = _non_negative(terms / times[:, None])
    logs, fitted = np.log(times), np.log(np.maximum(terms @ solution, 1e-300))
    spread = float(((logs - logs.mean()) ** 2).sum())
    lost = float(((logs - fitted) ** 2).sum())
    alpha, beta, gamma = map(float, solution)
    return Fit(alpha, beta, gamma, 1 - lost / spread if spread else 1.0)


def _of(collective: str, nbytes: int, n: int) -> tuple[float, float, float]:
    if collective not in _TERMS:
        raise UsageError(f"fit: no formula for {collective!r}, expected one of {', '.join(_TERMS)}")
    messages, sent, reduced = _TERMS[collective]
    part = (n - 1) / n * nbytes
    return messages * (n - 1), sent * part, reduced * part


def _non_negative(scaled: np.ndarray) -> np.ndarray:
    """Least squares to ones, with the columns left out whose factor would be below 0."""
    used = list(range(scaled.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(scaled)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            solution = np.zeros(scaled.shape[1])
            solution[used] = np.maximum(found, 0)
            return solution
        used.pop(int(found.argmin()))


__all__ = ["COLLECTIVES", "Fit", "fit_links"]
