"""Ranks as actors of Ray: Ray places, starts and restarts them, pycoll connects them.

import pycoll.ray
"""

from __future__ import annotations

try:
    import ray  # noqa: F401
except ImportError:
    raise ImportError(
        "pycoll.ray needs Ray, which is not installed: `pip install 'pycoll[ray]'`"
    ) from None

from pycoll.ray.job import Job
from pycoll.ray.placement import Role
from pycoll.ray.world import World, start

__all__ = ["Job", "Role", "World", "start"]
