"""Trainers on pycoll's own collectives: data, tensor and pipeline parallel, and all at once.

from pycoll import parallel as pc
"""

from __future__ import annotations

from pycoll.parallel.mesh import Mesh, mesh

__all__ = ["Mesh", "mesh"]
