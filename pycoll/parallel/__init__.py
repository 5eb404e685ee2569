"""Trainers on pycoll's own collectives: data, tensor and pipeline parallel, and all at once.

from pycoll import parallel as pc
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pycoll.parallel.mesh import Mesh, mesh

if TYPE_CHECKING:
    from pycoll.parallel.apply import parallelize
    from pycoll.parallel.batches import Batch, shard
    from pycoll.parallel.checkpoint import load, save
    from pycoll.parallel.divide_and_conquer import map_reduce
    from pycoll.parallel.experts import Experts
    from pycoll.parallel.footprint import RankMemory, memory
    from pycoll.parallel.init import keyed_init
    from pycoll.parallel.metrics import log, metrics
    from pycoll.parallel.optimizers import Optimizer, optimizer, trainer_of
    from pycoll.parallel.tensor.plan import Column, Conv, Inside, Region, Row, Vocab
    from pycoll.parallel.tensor.vocab import cross_entropy
    from pycoll.parallel.timeline import trace
    from pycoll.parallel.trainer import StepResult, Trainer
    from pycoll.parallel.whole import whole_gradients, whole_weights

# Where each name is: imported when it is first asked for, so that schedules need no torch.
_HOME = {
    **dict.fromkeys(("Batch", "shard"), "batches"),
    "cross_entropy": "tensor.vocab",
    "Experts": "experts",
    "keyed_init": "init",
    **dict.fromkeys(("Optimizer", "optimizer", "trainer_of"), "optimizers"),
    **dict.fromkeys(("load", "save"), "checkpoint"),
    **dict.fromkeys(("log", "metrics"), "metrics"),
    "map_reduce": "divide_and_conquer",
    **dict.fromkeys(("RankMemory", "memory"), "footprint"),
    "parallelize": "apply",
    **dict.fromkeys(("Column", "Conv", "Inside", "Region", "Row", "Vocab"), "tensor.plan"),
    "trace": "timeline",
    **dict.fromkeys(("StepResult", "Trainer"), "trainer"),
    **dict.fromkeys(("whole_gradients", "whole_weights"), "whole"),
}

__all__ = [
    "Batch",
    "Column",
    "Conv",
    "Experts",
    "Inside",
    "Mesh",
    "Optimizer",
    "RankMemory",
    "Region",
    "Row",
    "StepResult",
    "Trainer",
    "Vocab",
    "cross_entropy",
    "keyed_init",
    "load",
    "log",
    "map_reduce",
    "memory",
    "mesh",
    "metrics",
    "optimizer",
    "parallelize",
    "save",
    "shard",
    "trace",
    "trainer_of",
    "whole_gradients",
    "whole_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pycoll.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pycoll.parallel.{_HOME[name]}"), name)
    globals()[name] = value  # over the submodule of the same name, which the import has set
    return value
