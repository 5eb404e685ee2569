"""Chooses torch's fused kernel for an optimizer's step on the CPU: one pass over the memory.

torch takes it for CUDA by itself, but on the CPU only if asked.
"""

from __future__ import annotations

from torch import optim

# They have a fused kernel for the CPU.
_FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
# What a rank decides for itself in a group: no state that another mesh or device takes over.
OWN = ("params", "fused", "foreach")


def fuse(inner: optim.Optimizer) -> None:
    """Sets `fused` in the groups whose parameters are on the CPU, unless the caller has decided.

    An optimizer made with `fused=False` or any `foreach` keeps torch's loop over operations, whose
    last bits differ.
    """
    if type(inner) not in _FUSED:
        return
    for group in inner.param_groups:
        asked = group["fused"] is not None or group["foreach"] is not None
        other = group["differentiable"] or group.get("capturable")
        if not asked and not other and all(p.device.type == "cpu" for p in group["params"]):
            group["fused"] = True


__all__ = ["OWN", "fuse"]
