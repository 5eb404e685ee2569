"""Finds out whether an optimizer may step pieces of a parameter."""

from __future__ import annotations

import inspect

import torch
from torch import optim

# Optimizers of torch that step each element by itself.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)


def is_elementwise(inner: optim.Optimizer) -> bool:
    """Whether an optimizer gives pieces of a parameter the bits that it gives the whole.

    Those that torch does not bring step a small matrix and its two parts, three times.
    """
    if type(inner) in _ELEMENTWISE:
        return True
    known = inspect.signature(type(inner)).parameters
    settings = {key: value for key, value in inner.defaults.items() if key in known}
    whole = (torch.arange(24, dtype=torch.float64).view(4, 6) - 7) / 5
    runs = [[whole.clone()], [whole.view(-1)[:11].clone(), whole.view(-1)[11:].clone()]]
    try:
        for parameters in runs:
            for parameter in parameters:
                parameter.grad = parameter.cos()
            probe = type(inner)(parameters, **settings)
            for _ in range(3):
                probe.step()
    except Exception:  # whatever it raises, it does not step pieces
        return False
    return torch.equal(runs[0][0].view(-1), torch.cat(runs[1]))


__all__ = ["is_elementwise"]
