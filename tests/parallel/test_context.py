"""Context parallel: sequences that are cut, and attention that goes around a ring."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tiny_gpt import GPT, PLAN, Block  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from pycoll import UsageError, run_ranks  # noqa: E402
from pycoll import parallel as pc  # noqa: E402
from pycoll.parallel.context.ring import Ring, attend  # noqa: E402
from pycoll.parallel.context.sequence import Sequence  # noqa: E402
from pycoll.parallel.dropout.dropout import Positions  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

LENGTH, DIM, ITEM = 24, 16, 4


def no_mask():
    return None


def mask_of_keys():
    mask = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    mask[0, :, :, :9] = False
    mask[1] = False  # a sample that sees nothing
    return mask


def mask_of_all():
    return torch.randn(2, 4, LENGTH, LENGTH, dtype=torch.float64)


ATTENTION = {
    "plain": ({}, no_mask, (2, 4), (2, 4), 8),
    "causal": ({"is_causal": True}, no_mask, (2, 4), (2, 4), 8),
    "grouped": ({"is_causal": True, "enable_gqa": True, "scale": 0.3}, no_mask, (2, 4), (2, 2), 8),
    "mask of keys": ({}, mask_of_keys, (2, 4), (2, 4), 8),
    "mask of all, other width of values": ({}, mask_of_all, (2, 4), (2, 4), 5),
    "without heads": ({"is_causal": True}, no_mask, (2,), (2,), 8),
}


def whole_and_around(comm, options, mask_of, q_shape, k_shape, width):
    """The largest difference between attention of one process and that over a ring."""
    torch.set_num_threads(1)
    mesh = pc.mesh(dp=1, cp=-1, comm=comm)
    torch.manual_seed(0)
    sizes = [(*q_shape, LENGTH, 8), (*k_shape, LENGTH, 8), (*k_shape, LENGTH, width)]
    whole = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    mask = mask_of()
    expected = functional.scaled_dot_product_attention(*whole, attn_mask=mask, **options)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), whole)
    sequence = Sequence(mesh.line("cp"), Positions())

    def share(x, dim=-2):
        return torch.cat([x.narrow(dim, a, b - a) for a, b in sequence.ranges(LENGTH)], dim)

    mine = [share(x.detach()).requires_grad_() for x in whole]
    if mask is not None and mask.shape[-2] > 1:
        mask = share(mask)
    ranges = [sequence.ranges(LENGTH, rank) for rank in range(comm.size)]
    scale = options.get("scale") or 8**-0.5
    made = attend(*mine, mask, None, Ring(mesh.line("cp"), ranges, "is_causal" in options, scale))
    found = torch.autograd.grad((made * share(weight)).sum(), mine)
    pairs = [(expected, made), *zip(gradients, found, strict=True)]
    return max(float((share(a.detach()) - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "case"),
    [(n, case) for n in (1, 2, 3, 4) for case in ATTENTION],
)
def test_attention_over_a_ring_is_that_of_one_process(n, case):
    assert max(run_ranks(whole_and_around, n, *ATTENTION[case])) <= 1e-12


@pytest.mark.slow
def test_ranks_have_as_much_to_compute_under_a_causal_mask():
    def work(comm):
        mesh = pc.mesh(dp=1, cp=-1, comm=comm)
        sequence = Sequence(mesh.line("cp"), Positions())
        ring = Ring(mesh.line("cp"), [sequence.ranges(LENGTH, r) for r in range(3)], True, 1.0)
        tiles = [tile for source in range(3) for *_, tile in ring.tiles(source, None, None)]
        return len(tiles), sum(tile.causal for tile in tiles)

    assert run_ranks(work, 3) == [(7, 2)] * 3


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM, 4, 0.0, 32, fused=True) for _ in range(depth))

    def forward(self, x_BTD):
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_keys_and_values_travel_once_forward_and_with_their_gradients_backward(n):
    depth, batch = 3, 2

    def work(comm):
        mesh = pc.mesh(dp=1, cp=-1, comm=comm)
        model = pc.parallelize(Blocks(depth), mesh, pp="blocks")
        x = torch.randn(batch, LENGTH, DIM)
        loss = lambda out, y: (out.square().sum(), y.numel())  # noqa: E731
        model.evaluate(x, x, loss=loss)
        forward = mesh.ledger.of("cp", "send").nbytes
        model.step(x, x, loss=loss)
        return forward, mesh.ledger.of("cp", "send").nbytes - 2 * forward

    share = batch * LENGTH * DIM * ITEM // n
    for forward, backward in run_ranks(work, n):
        assert forward == depth * 2 * (n - 1) * share
        assert backward == depth * 4 * (n - 1) * share


class Rotated(nn.Module):
    """Blocks that get companions of the sequence: an angle for each place, and a mask."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.norm, self.drop = nn.BatchNorm1d(DIM), nn.Dropout(0.2)

        def forward(self, x, rotation, mask=None):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            cos, sin = (part.unsqueeze(1) for part in rotation)
            q, k = (a * cos + a.roll(1, -1) * sin for a in (q, k))
            mixed = functional.scaled_dot_product_attention(
                q, k, v, mask, dropout_p=0.3 * self.training
            )
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            # Tokens in a row, too: they are dropped by sample and place.
            return x + functional.dropout(self.drop(x).flatten(0, 1), 0.1).view_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first = nn.Linear(3, DIM), nn.BatchNorm1d(DIM)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.drop, self.leave = nn.Dropout(0.1), nn.Linear(DIM, 3)

    def forward(self, x, lengths):
        length = x.shape[1]
        angle = torch.arange(length).view(1, -1, 1) / torch.arange(1, DIM // 2 + 1)
        mask = torch.arange(length) < lengths.view(-1, 1, 1, 1)
        x = self.drop(self.first(self.enter(x).transpose(1, 2)).transpose(1, 2))
        for block in self.blocks:
            x = block(x, (angle.cos(), angle.sin()), mask=mask)
        return self.leave(self.drop(x))  # once before the blocks, once after them


def train_rotated(comm, sizes: dict, **options):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mesh = pc.mesh(**sizes, comm=comm)
    with pc.keyed_init(mesh, seed=2):
        model = Rotated()
    model = pc.parallelize(model, mesh, pp="blocks", **options)
    optimizer = pc.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), clip=0.5)
    random = torch.Generator().manual_seed(5)
    losses = []
    for step in range(3):
        x = torch.randn(3, LENGTH, 3, generator=random)
        data = [((x, torch.tensor([LENGTH, 9 + step, 20])), x)]
        for x_part, y_part in pc.shard(data, mesh):
            out = model.step(x_part, y_part, loss=lambda out, y: (out - y).square().mean())
            losses.append(out.loss)
            optimizer.step()
    return losses, pc.whole_weights(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "sizes", "options"),
    [
        (2, {"dp": 1, "cp": 2}, {}),
        (3, {"dp": 1, "cp": 3}, {"zero": 3}),
        (4, {"dp": 2, "cp": 2}, {"recompute": True}),
        (4, {"dp": 1, "cp": 2, "pp": 2}, {}),
    ],
    ids=str,
)
def test_companions_masks_dropout_and_batch_normalisation_equal_one_process(n, sizes, options):
    losses, weights = run_ranks(train_rotated, 1, {})[0]
    for got in run_ranks(train_rotated, n, sizes, **options):
        assert losses == pytest.approx(got[0], abs=1e-10)
        for name, weight in weights.items():
            assert (weight - got[1][name]).abs().max() <= 1e-10, name


def sequence_that_does_not_divide(mesh):
    step(mesh, GPT(fused=True), length=6)


def no_list_of_blocks(mesh):
    pc.parallelize(GPT(fused=True), mesh)


def attention_by_hand(mesh):
    step(mesh, GPT())


def recurrent_block(mesh):
    model = GPT(fused=True)
    model.blocks[2].add_module("memory", nn.LSTM(4, 4))
    pc.parallelize(model, mesh, pp="blocks")


class Pooled(GPT):
    def forward(self, tokens_BT):
        return super().forward(tokens_BT).mean(1)


def output_without_a_sequence(mesh):
    step(mesh, Pooled(fused=True))


def target_without_a_sequence(mesh):
    model = pc.parallelize(GPT(fused=True), mesh, pp="blocks")
    model.step(torch.zeros(2, 8).long(), torch.zeros(2).long(), loss=lambda out, y: out.sum())


class Masking(Blocks):
    """A mask of the block's own."""

    class Block(nn.Module):
        def __init__(self, make) -> None:
            super().__init__()
            self.make, self.scale = make, nn.Parameter(torch.ones(()))

        def forward(self, x):
            x = x * self.scale
            return self.make(x.unsqueeze(1)).squeeze(1)

    def __init__(self, make) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([self.Block(make)])


def attend_with(mesh, make):
    model = pc.parallelize(Masking(make), mesh, pp="blocks")
    x = torch.zeros(2, 8, 4)
    model.step(x, x, loss=lambda out, y: (out.sum(), 1))


def mask_of_a_share(mesh):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    attend_with(mesh, lambda x: functional.scaled_dot_product_attention(x, x, x, mask))


def mask_that_learns(mesh):
    bias = torch.zeros(8, 8, requires_grad=True)
    attend_with(mesh, lambda x: functional.scaled_dot_product_attention(x, x, x, bias))


def keys_of_another_length(mesh):
    attend_with(mesh, lambda x: functional.scaled_dot_product_attention(x, x[..., :2, :], x))


def step(mesh, model, length=8):
    model = pc.parallelize(model, mesh, pp="blocks")
    tokens = torch.zeros(2, length).long()
    model.step(tokens, tokens, loss=pc.cross_entropy)


MISTAKES = {
    sequence_that_does_not_divide: "a sequence of 6 does not divide into 4 parts, two for each",
    no_list_of_blocks: "cp=2 needs the name of the list of blocks: the sequence is cut",
    attention_by_hand: "block 'blocks.0' calls no torch.nn.functional.scaled_dot_product_attention",
    recurrent_block: "layer 'blocks.2.memory' (LSTM) works along the sequence",
    output_without_a_sequence: "returns a tensor of shape (2, 29), expected a sequence, 4 long",
    target_without_a_sequence: "no target has the 8 tokens of the sequence in dimension 1",
    mask_of_a_share: "layer 'blocks.0' has a mask of shape (4, 4) made of a share of the sequence",
    mask_that_learns: "layer 'blocks.0' has a trainable mask: take cp=1",
    keys_of_another_length: "layer 'blocks.0' has 4 queries and 2 keys, expected the 4 places",
}


def test_what_cannot_be_cut_is_one_sentence_on_every_rank():
    def work(comm):
        torch.set_num_threads(1)
        mesh = pc.mesh(dp=1, cp=2, comm=comm)
        said = {}
        for mistake in MISTAKES:
            with pytest.raises(UsageError) as raised:
                mistake(mesh)
            said[mistake.__name__] = str(raised.value)
        return said

    for said in run_ranks(work, 2):
        for mistake, message in MISTAKES.items():
            assert message in said[mistake.__name__]
            assert "\n" not in said[mistake.__name__]


def test_plan_of_tensors_goes_with_cut_sequences():
    def work(comm, sizes):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        mesh = pc.mesh(**sizes, comm=comm)
        with pc.keyed_init(mesh, seed=3):
            model = GPT(depth=1, fused=True)
        model = pc.parallelize(model, mesh, tp=PLAN, pp="blocks", sequence_parallel=True)
        tokens = torch.arange(32).view(4, 8) % 29
        return model.step(tokens, tokens, loss=pc.cross_entropy, microbatches=2).loss

    (one,) = run_ranks(work, 1, {})
    assert run_ranks(work, 4, {"cp": 2, "tp": 2}) == pytest.approx([one] * 4, abs=1e-12)
