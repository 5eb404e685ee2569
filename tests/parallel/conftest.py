"""Ranks fork off this process: what they all need is imported once, here."""

from __future__ import annotations

import contextlib

import pytest

pytest.register_assert_rewrite("worlds")

with contextlib.suppress(ImportError):
    # torch's optimizers import it when they are first made: seconds.
    import torch._dynamo  # noqa: F401
