"""Marks of the modules whose tests have torch's tensors on a device."""

from __future__ import annotations

import pytest

TORCH = [
    pytest.mark.ranks,
    pytest.mark.torch,
    pytest.mark.slow,  # builds an extension of torch, once
    pytest.mark.timeout(500, func_only=True),  # not of what is built
]
TRAINERS = [pytest.mark.usefixtures("two_devices"), *TORCH]
