"""Replaces functions of torch while a module of the user's model runs.

A model may call dropout or attention as a function, imported from anywhere: the forward functions
of its modules run within a torch mode that sees every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class Functions(TorchFunctionMode):
    """Replaces functions within modules whose forward functions it has wrapped.

    Attributes:
        taken: Replacements by function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[Any, Callable[..., Any]] = {}
        self._running: list[list[Any]] = []  # modules: their names, and how often each has dropped
        self._on = False

    def wrap(self, name: str, module: nn.Module) -> None:
        """Makes a module's forward function run within this mode, in place."""
        module.forward = partial(self._run, name, module.forward)  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        """Name of the innermost running module."""
        return str(self._running[-1][0])

    def stream(self) -> str:
        """A name for a random stream: the innermost module, and the count of earlier ones."""
        name, number = self._running[-1]
        self._running[-1][1] += 1
        return f"{name}/{number}"

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._within(name):
            return forward(*args, **kwargs)

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._running.append([name, 0])
        was_on, self._on = self._on, True
        try:
            if was_on:
                yield
            else:
                with self:
                    yield
        finally:
            self._on = was_on
            self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        taken = self.taken.get(func, func)
        return taken(*args, **(kwargs or {}))


__all__ = ["Functions"]
