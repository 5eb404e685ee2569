"""Cases that share one world of ranks, and training on meshes compared with one process."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pycoll
from pycoll import AbortedError, PeerDiedError, UsageError, run_ranks
from pycoll import parallel as pc

TOLERANCE = 1e-10
PATIENCE_S = 300.0  # ranks without a case wait as long as the others' cases take
_of_one_process: dict[str, Any] = {}  # by training and setup


def in_one_world(work: Callable, cases: Sequence[tuple]) -> list[list]:
    """Calls `work(comm, *args)` on n ranks for each case `(n, *args)`, all in one world.

    Returns:
        For each case what its ranks returned, in rank order.
    """

    def rank(comm):
        found = {}
        for n in sorted({case[0] for case in cases}):
            place, parts = comm.rank // n, comm.size // n
            part = comm.split(place if place < parts else -1)
            if part is None:
                continue
            of_this_size = [i for i, case in enumerate(cases) if case[0] == n]
            with part:
                for i in of_this_size[place::parts]:
                    try:
                        found[i] = work(part, *cases[i][1:])
                    except (PeerDiedError, AbortedError):
                        raise  # another rank has the cause
                    except Exception as error:
                        raise AssertionError(f"case {cases[i]}: {error!r}") from error
        return found

    outcomes = run_ranks(rank, max(case[0] for case in cases), timeout_s=PATIENCE_S)
    return [[found[i] for found in outcomes if i in found] for i in range(len(cases))]


def fit(
    comm,
    sizes: Mapping[str, int],
    make: Callable,
    data,
    *,
    loss=pc.cross_entropy,
    microbatches=2,
    clip: float | None = 0.5,
    seed=3,
    also: Callable = lambda model: {},
    optimizer: Callable = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    **options,
) -> tuple:
    """Trains a model on a mesh, in float64; returns losses, norms of gradients and weights.

    Args:
        make: Makes the model.
        data: Batches, as `pc.shard` takes them.
        also: Makes tensors of the trained model that are compared beside the weights.
        optimizer: Makes the optimizer of torch.
        options: Of `pc.parallelize`.
    """
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=seed):
        model = make()
    model = pc.parallelize(model, mesh, **options)
    wrapped = pc.optimizer(optimizer(model), clip=clip)
    losses, norms = [], []
    for x, y in pc.shard(data, mesh):
        losses.append(model.step(x, y, loss=loss, microbatches=microbatches).loss)
        norms.append(wrapped.step())
    found = losses, norms, pc.whole_weights(model), also(model)
    mesh.close()
    return found


def differences(expected, got, tolerance=TOLERANCE, where="result") -> Iterator[str]:
    """Yields each difference between nested numbers and tensors, with its place."""
    if isinstance(expected, Mapping):
        if expected.keys() != got.keys():
            yield f"{where} has {sorted(got)}, expected {sorted(expected)}"
            return
        for key, value in expected.items():
            yield from differences(value, got[key], tolerance, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            yield f"{where} has {len(got)} entries, expected {len(expected)}"
            return
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            yield from differences(one, other, tolerance, f"{where}[{i}]")
    elif isinstance(expected, (float, torch.Tensor)):
        one, other = (torch.as_tensor(x, dtype=torch.float64) for x in (expected, got))
        if one.shape != other.shape:
            yield f"{where} has shape {tuple(other.shape)}, expected {tuple(one.shape)}"
        elif one.numel() and not (worst := float((one - other).abs().max())) <= tolerance:
            yield f"{where} is off by {worst:.3g}"
    elif expected != got:
        yield f"{where} is {got}, expected {expected}"


def one_process(train: Callable, **setup):
    """Result of `train(comm, {}, **setup)` on one process, computed once."""
    key = f"{train.__module__}.{train.__qualname__} {setup}"
    if key not in _of_one_process:
        _of_one_process[key] = run_ranks(train, 1, {}, **setup)[0]
    return _of_one_process[key]


def assert_equal_one_process(
    train: Callable, cases: Sequence[tuple], tolerance=TOLERANCE, **setup
) -> None:
    """Trains on each mesh, all in one world, and compares the results with those of one process.

    Args:
        train: Called as `train(comm, sizes, **setup, **options)`.
        cases: The sizes of a mesh, the options that one process does not have, and, optionally,
            a setup of its own, which one process has, too.
    """
    setups = [{**setup, **(case[2] if len(case) > 2 else {})} for case in cases]
    expected = [one_process(train, **setup) for setup in setups]

    def compare(comm, i: int, case: tuple):
        sizes, options, *_ = case
        got = train(comm, sizes, **{**setups[i], **options})
        return list(differences(expected[i], got, tolerance))

    numbered = [(math.prod(case[0].values()), i, case) for i, case in enumerate(cases)]
    wrong = [
        f"{case}, rank {rank}: {text}"
        for case, of_ranks in zip(cases, in_one_world(compare, numbered), strict=True)
        for rank, texts in enumerate(of_ranks)
        for text in texts
    ]
    assert not wrong, "\n".join([f"{len(wrong)} differences from one process", *wrong[:40]])


def assert_refused(mistakes: Mapping[str, Callable], **sizes: int) -> None:
    """Each mistake, called with a mesh of these sizes, raises its one sentence on every rank."""

    def work(comm):
        mesh = pc.mesh(**sizes, comm=comm)
        for message, mistake in mistakes.items():
            with pytest.raises(UsageError) as raised:
                mistake(mesh)
                pytest.fail(f"not refused: {message}")
            assert message in str(raised.value) and "\n" not in str(raised.value)

    run_ranks(work, math.prod(sizes.values()))


def covering(values: Mapping[str, Sequence], allowed: Callable, cost: Callable) -> list[dict]:
    """Chooses few cheap combinations that contain every pair of values of an allowed one."""
    product = (dict(zip(values, of, strict=True)) for of in itertools.product(*values.values()))
    rows = [row for row in product if allowed(row)]
    pairs = [frozenset(itertools.combinations(row.items(), 2)) for row in rows]
    costs = [cost(row) for row in rows]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & left) / costs[i])
        left -= pairs[best]
        chosen.append(rows[best])
    return chosen


def run_script(path: Path, n: int, *args: str, **environment: str) -> list[str]:
    """Runs a script on n forked ranks, which need not import torch; returns what each prints."""

    def rank(comm):
        pycoll.init = lambda **_: comm  # the script joins the job a second time
        os.environ.update(environment)
        sys.argv = [str(path), *args]
        sys.path.insert(0, str(path.parent))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise AssertionError(f"{path.name}: {ended.code}") from ended
        return out.getvalue()

    return run_ranks(rank, n, timeout_s=PATIENCE_S)
