"""A tile of attention: some queries and some keys, as a part of a softmax over more keys.

Forward merges tiles by the logarithms of their sums; backward gives each tile the logarithm of
the whole sum. Source: Dao et al., FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tile:
    """Attention between the queries and the keys of a tile.

    Attributes:
        scale: Factor of the products of queries and keys.
        causal: There are as many keys as queries; a query attends to keys up to its own place.
        mask: Bools, or numbers to add; None: every query attends to every key.
        kept: The weights that dropout keeps; None: all.
        gain: Factor of the kept weights.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    kept: Tensor | None = None
    gain: float = 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Values weighted by this tile's softmax, and the logarithm of each query's sum.

        Args:
            q: Shape [..., queries, width]; `k` and `v` likewise for keys. If they have fewer heads,
                consecutive heads of `q` share one.
            k: Keys.
            v: Values.

        Returns:
            Tensors of shapes [..., queries, width of v] and [..., queries], in float32 or float64.
        """
        k, v = _for_heads(k, q), _for_heads(v, q)
        if self._has_kernel(q, v):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, self.causal, scale=self.scale
            )
            return out.to(lse.dtype), lse
        scores = self._scores(q, k)
        lse = scores.logsumexp(-1)
        return self._dropped(_weights(scores, lse)) @ v.to(scores.dtype), lse

    def backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This tile's contribution to the gradients of its queries, keys and values.

        Args:
            grad: Gradient of `out`.
            q: As in `forward`, like `k` and `v`.
            out: Output of all tiles.
            lse: The logarithm of the sum over all tiles.
            k: Keys.
            v: Values.
        """
        heads = k
        k, v = _for_heads(k, q), _for_heads(v, q)
        if self._has_kernel(q, v):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, self.causal, scale=self.scale
            )
            return found[0], _of_heads(found[1], heads), _of_heads(found[2], heads)
        scores = self._scores(q, k)
        weights = _weights(scores, lse)
        grad, out = grad.to(scores.dtype), out.to(scores.dtype)
        dv = self._dropped(weights).transpose(-1, -2) @ grad
        of_weights = self._dropped(grad @ v.to(scores.dtype).transpose(-1, -2))
        of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * self.scale
        dq = of_scores @ k.to(scores.dtype)
        dk = of_scores.transpose(-1, -2) @ q.to(scores.dtype)
        return dq, _of_heads(dk, heads), _of_heads(dv, heads)

    def _has_kernel(self, q: Tensor, v: Tensor) -> bool:
        plain = self.mask is None and self.kept is None and q.is_cpu
        return plain and q.dim() == 4 and q.shape[-1] == v.shape[-1] and q.numel() > 0

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        dtype = torch.float32 if q.dtype in _LOW else q.dtype
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * self.scale
        if self.causal:
            future = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        if self.mask is None:
            return scores
        if self.mask.dtype == torch.bool:
            return scores.masked_fill(~self.mask, -math.inf)
        return scores + self.mask

    def _dropped(self, weights: Tensor) -> Tensor:
        return weights if self.kept is None else weights * self.kept * self.gain


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax weights; zeros for a query that attends to no key."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeats keys or values for each head of the queries."""
    if x.dim() < 3 or x.shape[-3] == q.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _of_heads(grad: Tensor, x: Tensor) -> Tensor:
    """Sums over the query heads that share a head of `x`."""
    if x.dim() < 3 or grad.shape[-3] == x.shape[-3]:
        return grad
    return grad.unflatten(-3, (x.shape[-3], -1)).sum(-3)


__all__ = ["Tile"]
