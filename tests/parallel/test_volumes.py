"""Bytes that the trainers send: the formulas of docs/parallel.md, and the table of modes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mesh_cases import in_one_world
from tiny_gpt import PLAN, Blocks

from pycoll import UsageError
from pycoll import parallel as pc
from pycoll.parallel.tools import modes

BATCH, SEQUENCE, DIM = 2, 8, 16
ITEM = 4  # bytes of a float32
MESSAGE = BATCH * SEQUENCE * DIM * ITEM
PLAN_OF_BLOCKS = {pattern: style for pattern, style in PLAN.items() if pattern.startswith("*")}


def one_step(
    comm, sizes: dict, depth: int, plan: dict | None = None, microbatches: int = 1, **options
) -> dict:
    """Calls, bytes of messages and bytes sent of each collective and axis in one step."""
    mesh = pc.mesh(**sizes, comm=comm)
    model = pc.parallelize(Blocks(depth), mesh, tp=plan, pp="blocks", **options)
    optimizer = pc.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    mesh.ledger.clear()
    sent = {axis: mesh.comm(axis).ledger["sent_bytes"] for axis in mesh.sizes}
    x = torch.randn(BATCH, SEQUENCE, DIM)
    model.step(x, x, loss=lambda out, y: (out.sum(), out.numel()), microbatches=microbatches)
    optimizer.step()
    found = {key: (entry.calls, entry.nbytes) for key, entry in mesh.ledger.entries.items()}
    for axis, before in sent.items():
        found[axis] = mesh.comm(axis).ledger["sent_bytes"] - before
    mesh.close()
    found["parameters"] = len(list(model.parameters()))
    found["elements"] = sum(p.numel() for p in model.parameters())
    return found


@pytest.fixture(autouse=True)
def rings(monkeypatch):
    """Algorithms whose bytes are those of the formulas, at every size."""
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:ring;all_gather:ring;reduce_scatter:ring")


def measured(cases: list[tuple], check: Callable) -> None:
    """Calls `check(found, *case)` for each rank of each case `(n, sizes, depth, plan, options)`."""

    def work(comm, sizes, depth, plan, options):
        return one_step(comm, sizes, depth, plan, **options)

    for case, ranks in zip(cases, in_one_world(work, cases), strict=True):
        for found in ranks:
            check(found, *case)


def tail(found: dict) -> int:
    """Bytes of the one small message of a step: losses, counts, which parameters are used."""
    return 8 * (2 + found["parameters"])


def test_megatron_block_all_reduces_twice_forward_and_twice_backward():
    def check(found, n, sizes, depth, *_):
        calls = 4 * depth  # after attention and MLP forward, before them backward
        assert found["tp", "all_reduce"] == (calls, calls * MESSAGE)
        assert found["tp"] == calls * 2 * (n - 1) * MESSAGE // n
        assert ("tp", "all_gather") not in found

    measured([(n, {"tp": n}, depth, PLAN_OF_BLOCKS, {}) for n, depth in ((2, 1), (4, 3))], check)


def test_sequence_parallel_gathers_and_scatters_the_same_bytes():
    def check(found, n, sizes, depth, *_):
        # Each block: 2 and 2 forward, their conjugates backward; one gather at an end of the list.
        scattered, gathered = 4 * depth, 4 * depth + 1
        assert found["tp", "reduce_scatter"] == (scattered, scattered * MESSAGE)
        assert found["tp", "all_gather"] == (gathered, gathered * MESSAGE)
        assert found["tp"] == (scattered + gathered) * (n - 1) * MESSAGE // n

    options = {"sequence_parallel": True}
    measured([(n, {"tp": n}, 3, PLAN_OF_BLOCKS, options) for n in (2, 4)], check)


def test_zero_moves_what_data_parallel_moves_and_zero_3_half_as_much_again():
    def check(found, n, sizes, depth, plan, options):
        model, zero = found["elements"] * ITEM, options["zero"]
        if zero == 0:
            assert found["dp", "all_reduce"] == (2, model + tail(found))
            return
        assert found["dp", "all_reduce"] == (1, tail(found))
        units = depth if zero == 3 else 1
        assert found["dp", "reduce_scatter"] == (units, model)
        gathered = 2 if zero == 3 else 1
        assert found["dp", "all_gather"] == (gathered * units, gathered * model)

    measured([(n, {"dp": n}, 3, None, {"zero": z}) for n in (2, 4) for z in range(4)], check)


def test_data_and_pipeline_move_gradients_of_the_stage_and_activations_of_the_cut():
    def check(found, *_):
        gradients = found["elements"] * ITEM
        assert found["dp", "all_reduce"] == (2, gradients + tail(found))
        places = 8  # of samples in the batch of all replicas
        assert found["dp"] == gradients + tail(found) + places  # 2 (d - 1) / d of it
        assert found["pp", "send"] == (1, MESSAGE)  # forward from stage 0, backward from stage 1

    schedules = [{"microbatches": 2, "schedule": name} for name in ("1f1b", "zb1p")]
    measured([(4, {"dp": 2, "pp": 2}, 4, None, options) for options in schedules], check)


def test_all_at_once_moves_the_sum_of_the_formulas():
    def check(found, n, sizes, depth, plan, options):
        model = found["elements"] * ITEM  # of this rank's shares in the blocks of its stage
        per_stage = depth // 2
        assert found["tp", "all_reduce"] == (2 * 4 * per_stage, 4 * per_stage * MESSAGE)
        assert found["pp", "send"] == (1, MESSAGE)
        if options["zero"] == 0:
            assert found["dp", "all_reduce"] == (2, model + tail(found))
            return
        # With ZeRO 3, gathered once a step, whatever the number of microbatches.
        units = per_stage if options["zero"] == 3 else 1
        assert found["dp", "reduce_scatter"] == found["dp", "all_gather"] == (units, model)

    sizes = {"dp": 2, "tp": 2, "pp": 2}
    options = [{"microbatches": 2, "zero": zero} for zero in (0, 1, 3)]
    measured([(8, sizes, 4, PLAN_OF_BLOCKS, each) for each in options], check)


def test_modes_share_input_bytes_storage_and_work_as_they_must(monkeypatch):
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:ring")
    n = 4
    one, dp, tp, pp, annotated = modes.measure(n)
    assert (one.input_share, dp.input_share, tp.input_share, pp.input_share) == (1, 1 / n, 1, 1)
    assert (one.moved, one.stored, one.balance) == (0, 1, 1)
    # Gradients once around: 2 (n - 1) / n of the model per rank, and the small message of a step.
    assert dp.moved == pytest.approx(2 * (n - 1), rel=0.02)
    assert dp.stored == n and dp.balance == 1
    # Two all-reduces of an activation per block, 2 (n - 1) / n of it per rank; the gradient of the
    # first block's input is not needed.
    assert tp.activations_moved == pytest.approx(2 * (n - 1) * (2 * modes.DEPTH - 1), rel=0.02)
    assert 1 <= tp.stored < 1.05 and tp.balance == 1
    assert (annotated.moved, annotated.stored) == (tp.moved, tp.stored) and annotated.balance == 1
    # An activation and its gradient at each cut.
    assert pp.activations_moved >= 2 * (n - 1)
    assert pp.stored == 1 and pp.balance > 1.2  # 5 blocks on 4 stages
    assert "does not divide into 1 blocks for tp=6 ranks" in annotated.limit
    assert "smaller than dp=2" in dp.limit and "cannot split 5 blocks into 6 stages" in pp.limit


def test_more_ranks_than_blocks_are_an_error():
    with pytest.raises(UsageError, match="expected 2 to 5 ranks, got 6"):
        modes.measure(6)


def test_groups_of_replicas_shard_and_add_up_their_shares():
    """Within a group as ZeRO 3 on 2 ranks; between groups an all_reduce of half of the model."""

    def check(found, n, sizes, depth, plan, options):
        model = found["elements"] * ITEM
        for collective, times in (("all_gather", 2), ("reduce_scatter", 1)):
            assert found["dp shares", collective] == (times * depth, times * model), collective
        assert found["dp copies", "all_reduce"] == (depth, model // 2)

    options = {"zero": 3, "zero_group": 2}
    measured([(4, {"dp": 4}, 2, None, options)], check)
    memory = pc.memory(Blocks(2), {"dp": 4}, pp="blocks", **options)
    of_two = pc.memory(Blocks(2), {"dp": 2}, pp="blocks", zero=3)
    assert [rank.total for rank in memory] == [rank.total for rank in of_two] * 2
