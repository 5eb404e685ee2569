"""Context parallel: sequences cut over ranks, and attention over a ring."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import assert_equal_one_process, assert_refused, fit, in_one_world
from tiny_gpt import GPT, Blocks
from torch import nn
from torch.nn import functional

from pycoll import parallel as pc
from pycoll import run_ranks
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.features.context.ring import Ring, attend
from pycoll.parallel.features.context.sequence import Sequence

LENGTH, DIM = 24, 16


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
def test_attention_over_a_ring_is_that_of_one_process():
    cases = [(n, *case) for n in (1, 2, 3, 4) for case in ATTENTION.values()]
    for (n, *case), off in zip(cases, in_one_world(whole_and_around, cases), strict=True):
        assert max(off) <= 1e-12, (n, case, off)


def test_ranks_have_as_much_to_compute_under_a_causal_mask():
    def work(comm):
        mesh = pc.mesh(dp=1, cp=-1, comm=comm)
        sequence = Sequence(mesh.line("cp"), Positions())
        ring = Ring(mesh.line("cp"), [sequence.ranges(LENGTH, r) for r in range(3)], True, 1.0)
        tiles = [tile for source in range(3) for *_, tile in ring.tiles(source, None, None)]
        return len(tiles), sum(tile.causal for tile in tiles)

    assert run_ranks(work, 3) == [(7, 2)] * 3


def test_keys_and_values_travel_once_forward_and_with_their_gradients_backward():
    depth, batch, width = 3, 2, 4  # bytes of a float32

    def work(comm):
        mesh = pc.mesh(dp=1, cp=-1, comm=comm)
        model = pc.parallelize(Blocks(depth, fused=True), mesh, pp="blocks")
        x = torch.randn(batch, LENGTH, DIM)
        loss = lambda out, y: (out.square().sum(), y.numel())  # noqa: E731
        model.evaluate(x, x, loss=loss)
        forward = mesh.ledger.of("cp", "send").nbytes
        model.step(x, x, loss=loss)
        return forward, mesh.ledger.of("cp", "send").nbytes - 2 * forward

    for n, found in zip((2, 4), in_one_world(work, [(2,), (4,)]), strict=True):
        share = batch * LENGTH * DIM * width // n
        assert found == [(depth * 2 * (n - 1) * share, depth * 4 * (n - 1) * share)] * n


class Rotated(nn.Module):
    """Blocks with more inputs along the sequence: an angle for each place, and a mask."""

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
    random = torch.Generator().manual_seed(5)
    data = []
    for step in range(3):
        x = torch.randn(3, LENGTH, 3, generator=random, dtype=torch.float64)
        data.append(((x, torch.tensor([LENGTH, 9 + step, 20])), x))
    loss = lambda out, y: (out - y).square().mean()  # noqa: E731
    return fit(comm, sizes, Rotated, data, loss=loss, microbatches=1, pp="blocks", **options)


@pytest.mark.slow
def test_companions_masks_dropout_and_batch_normalisation_equal_one_process():
    assert_equal_one_process(
        train_rotated,
        [
            ({"cp": 2}, {}),
            ({"cp": 3}, {"zero": 3}),
            ({"dp": 2, "cp": 2}, {"recompute": True}),
            ({"cp": 2, "pp": 2}, {}),
        ],
    )


class Pooled(GPT):
    def forward(self, tokens_BT):
        return super().forward(tokens_BT).mean(1)


class Masking(Blocks):
    """A block with a mask of its own."""

    class Block(nn.Module):
        def __init__(self, attend) -> None:
            super().__init__()
            self.attend, self.scale = attend, nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.attend((x * self.scale).unsqueeze(1)).squeeze(1)

    def __init__(self, attend) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([self.Block(attend)])


def attend_with(mesh, attend):
    model = pc.parallelize(Masking(attend), mesh, pp="blocks")
    x = torch.zeros(2, 8, 4)
    model.step(x, x, loss=lambda out, y: (out.sum(), 1))


def step(mesh, model, length=8, loss=pc.cross_entropy):
    model = pc.parallelize(model, mesh, pp="blocks")
    tokens = torch.zeros(2, length).long()
    model.step(tokens, tokens if loss is pc.cross_entropy else tokens[:, 0], loss=loss)


def recurrent_block(mesh):
    model = GPT(fused=True)
    model.blocks[2].add_module("memory", nn.LSTM(4, 4))
    pc.parallelize(model, mesh, pp="blocks")


def test_what_cannot_be_cut_is_one_sentence_on_every_rank():
    attention = functional.scaled_dot_product_attention
    of_a_share = torch.ones(4, 4, dtype=torch.bool).tril()
    learns = torch.zeros(8, 8, requires_grad=True)
    assert_refused(
        {
            "a sequence of 6 does not divide into 4 parts, two for each": (
                lambda mesh: step(mesh, GPT(fused=True), length=6)
            ),
            "cp=2 needs the name of the list of blocks: the sequence is cut": (
                lambda mesh: pc.parallelize(GPT(fused=True), mesh)
            ),
            "block 'blocks.0' calls no torch.nn.functional.scaled_dot_product_attention": (
                lambda mesh: step(mesh, GPT())
            ),
            "layer 'blocks.2.memory' (LSTM) works along the sequence": recurrent_block,
            "returns a tensor of shape (2, 29), expected a sequence, 4 long": (
                lambda mesh: step(mesh, Pooled(fused=True))
            ),
            "no target has the 8 tokens of the sequence in dimension 1": (
                lambda mesh: step(mesh, GPT(fused=True), loss=lambda out, y: out.sum())
            ),
            "layer 'blocks.0' has a mask of shape (4, 4) made of a share of the sequence": (
                lambda mesh: attend_with(mesh, lambda x: attention(x, x, x, of_a_share))
            ),
            "layer 'blocks.0' has a trainable mask: take cp=1": (
                lambda mesh: attend_with(mesh, lambda x: attention(x, x, x, learns))
            ),
            "layer 'blocks.0' has 4 queries and 2 keys, expected the 4 places": (
                lambda mesh: attend_with(mesh, lambda x: attention(x, x[..., :2, :], x))
            ),
        },
        cp=2,
    )
