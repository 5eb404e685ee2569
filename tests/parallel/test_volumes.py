"""What the trainers send, to the byte: the formulas of docs/parallel.md."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import PLAN, Block  # noqa: E402
from torch import nn  # noqa: E402

from pycoll import parallel as pc  # noqa: E402
from pycoll import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

BATCH, SEQUENCE, DIM = 2, 8, 16
ITEM = 4  # bytes of a float32


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM, 8, 0.0, 4 * DIM) for _ in range(depth))

    def forward(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


def one_step(
    comm, sizes: dict, depth: int, plan: dict | None = None, microbatches: int = 1, **options
) -> dict:
    """Calls, bytes of messages and bytes sent of each collective and axis in one step."""
    torch.set_num_threads(1)
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
    # Losses, counts and the presence of each parameter: one small message a step.
    found["parameters"] = len(list(model.parameters()))
    found["elements"] = sum(p.numel() for p in model.parameters())
    return found


@pytest.fixture
def rings(monkeypatch):
    """Algorithms whose bytes are those of the formulas, at every size."""
    monkeypatch.setenv(
        "PYCOLL_ALGO",
        "all_reduce:ring;all_gather:ring;reduce_scatter:ring",
    )


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("depth", [1, 3])
def test_megatron_block_all_reduces_twice_forward_and_twice_backward(n, depth, rings):
    message = BATCH * SEQUENCE * DIM * ITEM
    for found in run_ranks(one_step, n, {"tp": n}, depth, PLAN_OF_BLOCKS):
        calls = 4 * depth  # after attention and MLP forward, before them backward
        assert found["tp", "all_reduce"] == (calls, calls * message)
        assert found["tp"] == calls * 2 * (n - 1) * message // n
        assert ("tp", "all_gather") not in found


@pytest.mark.parametrize("n", [2, 4])
def test_sequence_parallel_gathers_and_scatters_the_same_bytes(n, rings):
    message = BATCH * SEQUENCE * DIM * ITEM
    for found in run_ranks(one_step, n, {"tp": n}, 3, PLAN_OF_BLOCKS, sequence_parallel=True):
        # Each block: 2 and 2 forward, their conjugates backward; and the ends of the list.
        assert found["tp", "reduce_scatter"] == (4 * 3, 4 * 3 * message)
        assert found["tp", "all_gather"] == (4 * 3 + 1, (4 * 3 + 1) * message)
        assert found["tp"] == (8 * 3 + 1) * (n - 1) * message // n


def tail(found: dict) -> int:
    return 8 * (2 + found["parameters"])


@pytest.mark.parametrize("n", [2, 4])
def test_data_parallel_all_reduces_each_gradient_once(n, rings):
    for found in run_ranks(one_step, n, {}, 2):
        gradients = found["elements"] * ITEM
        assert found["dp", "all_reduce"] == (2, gradients + tail(found))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
def test_zero_1_and_2_move_what_data_parallel_moves(n, zero, rings):
    for found in run_ranks(one_step, n, {}, 2, zero=zero):
        model = found["elements"] * ITEM
        assert found["dp", "reduce_scatter"] == (1, model)
        assert found["dp", "all_gather"] == (1, model)
        assert found["dp", "all_reduce"] == (1, tail(found))


@pytest.mark.parametrize("n", [2, 4])
def test_zero_3_moves_half_as_much_again(n, rings):
    depth = 3
    for found in run_ranks(one_step, n, {}, depth, zero=3):
        model = found["elements"] * ITEM
        assert found["dp", "reduce_scatter"] == (depth, model)
        assert found["dp", "all_gather"] == (2 * depth, 2 * model)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_data_and_pipeline_move_gradients_of_the_stage_and_activations_of_the_cut(schedule, rings):
    depth, message = 4, BATCH * SEQUENCE * DIM * ITEM
    options = {"microbatches": 2, "schedule": schedule}
    for found in run_ranks(one_step, 4, {"dp": 2, "pp": 2}, depth, **options):
        gradients = found["elements"] * ITEM
        assert found["dp", "all_reduce"] == (2, gradients + tail(found))
        places = 8  # of samples in the batch of all replicas
        assert found["dp"] == gradients + tail(found) + places  # 2 (d - 1) / d of it
        assert found["pp", "send"] == (1, message)  # forward from stage 0, backward from stage 1


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_all_at_once_moves_the_sum_of_the_formulas(zero, rings):
    depth, message = 4, BATCH * SEQUENCE * DIM * ITEM
    sizes, options = {"dp": 2, "tp": 2, "pp": 2}, {"microbatches": 2, "zero": zero}
    for found in run_ranks(one_step, 8, sizes, depth, PLAN_OF_BLOCKS, **options):
        model = found["elements"] * ITEM  # of this rank's shares in the blocks of its stage
        per_stage = depth // 2
        assert found["tp", "all_reduce"] == (2 * 4 * per_stage, 4 * per_stage * message)
        assert found["pp", "send"] == (1, message)
        if zero == 0:
            assert found["dp", "all_reduce"] == (2, model + tail(found))
        elif zero == 1:
            assert found["dp", "reduce_scatter"] == found["dp", "all_gather"] == (1, model)
        else:  # put together once a step, whatever the number of microbatches
            assert found["dp", "reduce_scatter"] == (per_stage, model)
            assert found["dp", "all_gather"] == (per_stage, model)


PLAN_OF_BLOCKS = {pattern: style for pattern, style in PLAN.items() if pattern.startswith("*")}
