"""Ring attention: keys and values travel from rank to rank, queries stay.

While a rank computes with one share of keys and values, the next one arrives. In backward, keys
and values travel again, followed by their gradients, to which each rank adds its contribution.
Source: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889; the balance of
causal masks: Brandon et al., Striped Attention, arXiv:2311.09431.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.core.ledger import AxisGroup
from pycoll.parallel.core.placement import Ranges
from pycoll.parallel.features.context.tile import Tile


@dataclass(frozen=True, slots=True)
class Ring:
    """Which rank has which places of a sequence, and which keys a token attends to.

    Attributes:
        group: The ranks.
        ranges: The places of each rank, in parts of equal size.
        causal: Tokens attend to themselves and to earlier tokens only.
        scale: Factor of the products of queries and keys.
        dropout: Probability that a weight is dropped.
    """

    group: AxisGroup
    ranges: list[Ranges]
    causal: bool
    scale: float
    dropout: float = 0.0

    def tiles(
        self, source: int, mask: Tensor | None, kept: Tensor | None
    ) -> Iterator[tuple[slice, slice, Tile]]:
        """Yields the tiles of this rank's queries and the keys of `source`: rows, columns, tile.

        Args:
            source: The rank that owns the keys.
            mask: Mask of shape [..., rows or 1, all keys or 1].
            kept: The weights that dropout keeps, shaped like `mask`.
        """
        gain = 1.0 / (1.0 - self.dropout) if self.dropout < 1 else 0.0
        for rows, (q_start, q_stop) in _placed(self.ranges[self.group.rank]):
            for columns, (k_start, k_stop) in _placed(self.ranges[source]):
                if self.causal and k_start >= q_stop:
                    continue
                keys = slice(k_start, k_stop)
                tile = Tile(
                    self.scale,
                    self.causal and k_start == q_start,
                    _part(mask, rows, keys),
                    _part(kept, rows, keys),
                    gain,
                )
                yield rows, columns, tile


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor | None, ring: Ring
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Collective.

    Args:
        query: Shape [..., places of this rank, width]. If `key` and `value` have fewer heads,
            consecutive heads of `query` share one.
        key: Like `query`.
        value: Like `query`; its width may differ.
        mask: This rank's rows (or 1) by all keys (or 1): bools, or numbers to add.
        kept: The weights that dropout keeps, of the same shape.
        ring: The ranks.

    Returns:
        Tensor like `query`, with the width of `value`.

    Cost: with c ranks, each sends c - 1 shares of keys and of values forward, and twice as many
        backward; with a mask or dropout, one tile of weights at a time.
    """
    return _Attention.apply(query, key, value, mask, kept, ring)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, kept: Any, ring: Ring
    ) -> Tensor:
        group = ring.group
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
        pair = [k.contiguous(), v.contiguous()]
        for step in group.ledger.hops(group.size):
            coming = group.pass_on(pair) if step + 1 < group.size else None
            for rows, columns, tile in ring.tiles((group.rank - step) % group.size, mask, kept):
                found = tile.forward(q[..., rows, :], *(x[..., columns, :] for x in pair))
                _merge(out[..., rows, :], lse[..., rows], *found)
            pair = pair if coming is None else coming.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, kept, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, mask, kept, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        group = ring.group
        dq = torch.zeros_like(q, dtype=lse.dtype)
        pair = [k.contiguous(), v.contiguous()]
        own: list[Tensor] = []  # gradients of this rank's keys and values
        behind = None  # other ranks' gradients, on their way to their owners
        for step in group.ledger.hops(group.size):
            coming = group.pass_on(pair) if step + 1 < group.size else None
            grads = [torch.zeros_like(x, dtype=lse.dtype) for x in pair]
            for rows, columns, tile in ring.tiles((group.rank - step) % group.size, mask, kept):
                of_grad, of_q, of_out = (x[..., rows, :] for x in (grad, q, out))
                keys, values = (x[..., columns, :] for x in pair)
                found = tile.backward(of_grad, of_q, of_out, lse[..., rows], keys, values)
                dq[..., rows, :] += found[0]
                for total, part in zip(grads, found[1:], strict=True):
                    total[..., columns, :] += part
            if step == 0:
                own = grads
            else:
                if behind is not None:
                    _add(grads, behind.wait())
                behind = group.pass_on(grads)
            pair = pair if coming is None else coming.wait()
        if behind is not None:
            _add(own, behind.wait())
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None, None, None


def _add(totals: list[Tensor], parts: list[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges a tile's result into that of the earlier tiles, in place."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - base).exp().unsqueeze(-1)).add_(more * (more_lse - base).exp().unsqueeze(-1))
    lse.copy_(total)


def _placed(ranges: Ranges) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yields each range with the local slice that holds it."""
    at = 0
    for start, stop in ranges:
        yield slice(at, at + stop - start), (start, stop)
        at += stop - start


def _part(x: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    if x is None:
        return None
    of_rows = x if x.shape[-2] == 1 else x[..., rows, :]
    return of_rows if x.shape[-1] == 1 else of_rows[..., columns]


__all__ = ["Ring", "attend"]
