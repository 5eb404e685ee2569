"""Ranks of small models."""

from __future__ import annotations

import pytest
import torch

from pycoll.parallel.pipeline.sleeping import warm_up


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Once, in place of in every rank. Not when this is imported: autograd's engine counts devices
    when it is first used, so tests of torch devices, which come before these, need it unused."""
    warm_up()


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a small model cost more than they bring; ranks have one each anyway."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
