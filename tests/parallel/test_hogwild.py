"""HOGWILD: the compiled steps against NumPy, locks that lose nothing, and sparsity."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycoll import UsageError
from pycoll import parallel as pc

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

RATINGS, USERS, ITEMS, DIM = 500, 20, 30, 4


def ratings() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    users = random.integers(USERS, size=RATINGS).astype(np.int32)
    items = random.integers(ITEMS, size=RATINGS).astype(np.int32)
    return users, items, random.uniform(1, 5, RATINGS).astype(np.float32)


def factors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(4)
    return {
        "users": 0.1 * torch.randn(USERS, DIM + 1, generator=made),
        "items": 0.1 * torch.randn(ITEMS, DIM + 1, generator=made),
    }


def by_numpy(rate: float, l2: float) -> tuple[np.ndarray, np.ndarray, float]:
    p, q = (x.double().numpy() for x in factors().values())
    total = 0.0
    for u, i, r in zip(*ratings(), strict=True):
        error = r - (3.0 + p[u, DIM] + q[i, DIM] + p[u, :DIM] @ q[i, :DIM])
        total += error**2
        left, right = p[u].copy(), q[i].copy()
        p[u, :DIM] += rate * (error * right[:DIM] - l2 * left[:DIM])
        q[i, :DIM] += rate * (error * left[:DIM] - l2 * right[:DIM])
        p[u, DIM] += rate * (error - l2 * left[DIM])
        q[i, DIM] += rate * (error - l2 * right[DIM])
    return p, q, total


def test_factors_of_one_worker_are_those_of_the_formula_with_every_lock():
    p, q, total = by_numpy(0.05, 0.1)
    found = []
    for lock in (None, "atomic", "mutex"):
        run = pc.hogwild(
            lambda w: w.factorize(*ratings(), mean=3.0, rate=0.05, l2=0.1), factors(), 1, lock
        )
        assert np.abs(run.shared["users"].numpy() - p).max() < 1e-5
        assert np.abs(run.shared["items"].numpy() - q).max() < 1e-5
        assert run.results[0] == pytest.approx(total, rel=1e-5)
        found.append(run.shared)
    assert all(torch.equal(found[0][name], other[name]) for other in found for name in other)


def test_logistic_steps_are_those_of_the_formula():
    starts = np.array([0, 2, 2, 3], np.int64)
    features, values = np.array([0, 2, 1], np.int32), np.array([1, -2, 0.5], np.float32)
    labels, order = np.array([1, 0, 1], np.float32), np.array([2, 0, 1, 0], np.int64)
    expected, total = np.array([0.1, 0.2, 0.3]), 0.0
    for e in order:
        mine = slice(starts[e], starts[e + 1])
        logit = expected[features[mine]] @ values[mine]
        total += np.log1p(np.exp(-logit if labels[e] else logit))
        expected[features[mine]] += 0.5 * (labels[e] - 1 / (1 + np.exp(-logit))) * values[mine]
    run = pc.hogwild(
        lambda w: w.step_logistic(starts, features, values, labels, order, rate=0.5),
        {"weights": torch.tensor([0.1, 0.2, 0.3])},
        1,
    )
    assert run.shared["weights"].numpy() == pytest.approx(expected, rel=1e-5)
    assert run.results[0] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("lock", ["atomic", "mutex"])
def test_no_step_of_three_workers_is_lost_with_a_lock(lock):
    """A weight far below 0 grows by 1 with each step, whatever the order."""
    steps = 30_000

    def grow(worker):
        one = np.zeros(1, np.int32), np.ones(1, np.float32), np.ones(1, np.float32)
        order = np.zeros(steps, np.int64)
        return worker.step_logistic(np.array([0, 1]), *one, order, rate=1.0)

    run = pc.hogwild(grow, {"weights": torch.tensor([-200_000.0])}, 3, lock)
    assert run.shared["weights"].item() == 3 * steps - 200_000


def test_workers_without_a_lock_learn():
    """Their order of steps differs, so errors agree to a quarter only."""

    def learn(worker):
        squares = []
        for epoch in range(20):
            order = worker.order(RATINGS, epoch)
            mine = [x[order] for x in ratings()]
            squares.append(worker.factorize(*mine, mean=3.0, rate=0.05, l2=0.01))
            worker.comm.barrier()
        return squares

    errors = [np.sum(pc.hogwild(learn, factors(), n).results, 0)[-1] for n in (1, 2)]
    assert errors[1] == pytest.approx(errors[0], rel=0.25)
    assert errors[1] < 0.6 * by_numpy(0.05, 0.01)[2]


def test_groups_of_examples_belong_to_one_worker_each():
    users = np.repeat(np.arange(12), [1, 9, 2, 2, 0, 3, 1, 30, 2, 2, 5, 3])
    orders = pc.hogwild(
        lambda w: [w.order(len(users), seed, groups=users) for seed in (0, 1)],
        {"weights": torch.zeros(1)},
        3,
    ).results
    of_workers = [set(users[first]) for first, _ in orders]
    assert sorted(np.concatenate([first for first, _ in orders])) == list(range(len(users)))
    assert sum(map(len, of_workers)) == len(set(users))  # no user belongs to two workers
    for first, second in orders:
        assert sorted(first) == sorted(second)
    assert any(first.tolist() != second.tolist() for first, second in orders)


@pytest.mark.pure
def test_sparsity_is_that_of_the_definition():
    random = np.random.default_rng(5)
    edges = [np.sort(random.choice(12, random.integers(1, 4), replace=False)) for _ in range(15)]
    starts = np.concatenate([[0], np.cumsum([len(e) for e in edges])])
    found = pc.sparsity(starts, np.concatenate(edges))
    sets = [set(e.tolist()) for e in edges]
    assert found.omega == max(map(len, sets))
    assert found.delta == max(sum(v in e for e in sets) for v in range(12)) / 15
    assert found.rho == max(sum(bool(a & b) for b in sets) for a in sets) / 15
    assert str(found) == f"Omega {found.omega}, Delta {found.delta:.4g}, rho {found.rho:.4g}"


@pytest.mark.parametrize(
    "change, text",
    [
        ({"lock": "spin"}, "lock='spin', expected None, 'atomic' or 'mutex'"),
        ({"workers": 0}, "0 workers and 2 arrays, expected one or more"),
        ({"users": np.full(RATINGS, USERS, np.int32)}, "there is no user 20, expected 0 to 19"),
        ({"items": np.full(RATINGS, -1, np.int32)}, "there is no item -1, expected 0 to 29"),
        ({"users": np.zeros(3, np.int32)}, "expected users of 500 elements of i32, got 3 of i32"),
        ({"users": np.zeros(RATINGS)}, "expected users of 500 elements of i32, got 500 of f64"),
    ],
)
def test_wrong_arguments_are_refused(change, text):
    change = dict(change)
    users, items, of = ratings()
    users, items = change.pop("users", users), change.pop("items", items)
    with pytest.raises(UsageError, match=text):
        pc.hogwild(lambda w: w.factorize(users, items, of, mean=3.0, rate=0.1), factors(), **change)
