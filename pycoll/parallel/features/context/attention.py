"""Attention that a model calls as a function: keyed dropout, and sequences over a ring.

Source of the ring: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pycoll.errors import UsageError
from pycoll.parallel.core.functions import Functions
from pycoll.parallel.core.placement import Part, Ranges
from pycoll.parallel.core.positions import Positions
from pycoll.parallel.features.context.ring import Ring, attend
from pycoll.parallel.features.context.sequence import Sequence
from pycoll.parallel.features.dropout.dropout import keeps


class Attention:
    """Replaces `scaled_dot_product_attention` and torch's multi-head attention."""

    def __init__(
        self,
        functions: Functions,
        positions: Positions,
        sequence: Sequence,
        heads: Callable[[int], tuple[int, Ranges] | None],
    ) -> None:
        """Registers itself with the replaced functions.

        Args:
            functions: The replaced functions of the model.
            positions: The current position in the batch.
            sequence: The sequence of which a rank may have a share.
            heads: Maps a local number of heads to the total and the local range; returns None
                if all heads are local.
        """
        self._functions, self._positions = functions, positions
        self._sequence, self._heads = sequence, heads
        functions.taken[functional.scaled_dot_product_attention] = self._attention
        functions.taken[functional.multi_head_attention_forward] = self._multi_head

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes attention without torch's kernel if it drops: a kernel's mask is not keyed."""
        if self._sequence.length:
            return self._around(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if not dropout_p:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            future = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch._safe_softmax(scores, -1)
        if dropout_p >= 1:
            return weights * 0.0 @ value
        kept = self._keeps(tuple(weights.shape), dropout_p, {}, weights.device)
        return weights * kept.to(weights.dtype) / (1.0 - dropout_p) @ value

    def _around(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Attends to the whole sequence, of which this rank has a share."""
        sequence = self._sequence
        length, here = sequence.length, sequence.length // sequence.group.size
        where = f"cp: attention in layer {self._functions.name!r}"
        if query.shape[-2] != here or key.shape[-2] != here:
            raise UsageError(
                f"{where} has {query.shape[-2]} queries and {key.shape[-2]} keys, expected the "
                f"{here} places of the sequence on this rank: a sequence can attend only to itself"
            )
        if mask is not None:
            if mask.requires_grad:
                raise UsageError(f"{where} has a trainable mask: take cp=1")
            if mask.shape[-1] not in (1, length) or mask.shape[-2] not in (1, here, length):
                raise UsageError(
                    f"{where} has a mask of shape {tuple(mask.shape)} made of a share of the "
                    f"sequence, expected all {length} keys: make it before the blocks, with a "
                    "dimension of 1 in place of dimension 1, or use is_causal=True"
                )
            if mask.shape[-2] == length:
                mask = torch.cat([mask[..., a:b, :] for a, b in sequence.ranges(length)], -2)
        kept = None
        if dropout_p:
            rows = {query.dim() - 2: sequence.ranges(length)}
            shape = (*query.shape[:-2], length, length)
            kept = self._keeps(shape, dropout_p, rows, query.device)
        sequence.attended += 1
        ring = Ring(
            sequence.group,
            [sequence.ranges(length, rank) for rank in range(sequence.group.size)],
            is_causal,
            query.shape[-1] ** -0.5 if scale is None else scale,
            dropout_p,
        )
        return attend(query, key, value, mask, kept, ring)

    def _keeps(
        self, shape: tuple[int, ...], p: float, ranges: dict[int, Ranges], device: torch.device
    ) -> Tensor:
        """Mask of kept weights, shape [..., queries, keys]; the rows may be a share."""
        part = Part(shape, ranges)
        if len(shape) == 4 and (found := self._heads(shape[1])) is not None:
            part = Part((shape[0], found[0], *shape[2:]), {1: found[1], **ranges})
        return keeps(part, p, self._functions.stream(), self._positions, device)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces attention in torch's own module: its internal calls bypass any mode."""
        names = ("dropout", "scaled_dot_product_attention")
        before = {name: getattr(functional, name) for name in names}
        functional.dropout = self._functions.taken[before[names[0]]]
        functional.scaled_dot_product_attention = partial(self._of_heads, before[names[1]])
        try:
            return functional.multi_head_attention_forward(*args, **kwargs)
        finally:
            for name, function in before.items():
                setattr(functional, name, function)

    def _of_heads(
        self, plain: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0,
        causal: bool = False,
    ) -> Tensor:  # fmt: skip
        taken = self._attention if p or self._sequence.length else plain
        return taken(q, k, v, mask, p, causal)  # type: ignore[no-any-return]


__all__ = ["Attention"]
