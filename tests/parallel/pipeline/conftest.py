"""Ranks of small models."""

from __future__ import annotations

import pytest
import torch

from pycoll.parallel.pipeline.sleeping import warm_up


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Warms up once, instead of in every rank. An import would be too early: autograd's engine
    counts devices at its first use, and the tests of torch devices run before these."""
    warm_up()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads slow a small model down; ranks have one each anyway."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
