"""Children that tests fork from a process whose torch has started threads."""

from __future__ import annotations

from multiprocessing import get_context

import processes  # noqa: F401 - it is what is tested
import pytest
import torch

pytestmark = [pytest.mark.torch, pytest.mark.ranks]


def product() -> None:
    """Large enough that torch gives each thread of its pool a part."""
    x = torch.ones(400, 400)
    assert (x @ x)[0, 0] == 400


def test_forked_child_computes_though_its_parent_has_a_pool_of_threads():
    product()
    child = get_context("fork").Process(target=product, daemon=True)
    child.start()
    child.join(20)
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0
