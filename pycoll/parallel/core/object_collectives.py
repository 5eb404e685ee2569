"""Collectives of small objects, exchanged as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pycoll.communicator import Communicator


def gather_objects(mine: Any, comm: Communicator) -> list[Any]:
    """Gathers every rank's object, in rank order. Collective.

    Args:
        mine: Any JSON-serializable value.
        comm: The ranks.

    Cost: two all_gathers.
    """
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    sizes = comm.all_gather(np.array([text.size])).reshape(-1).tolist()
    texts = comm.all_gather(text.copy(), counts=sizes).tobytes()
    ends = np.cumsum(sizes).tolist()
    return [json.loads(texts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


__all__ = ["gather_objects"]
