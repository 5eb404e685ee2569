"""Trainers on pycoll's own collectives: data, tensor and pipeline parallel, and all at once.

from pycoll import parallel as pc
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pycoll.parallel.core.mesh import Mesh, mesh

if TYPE_CHECKING:
    from pycoll.parallel import graph, optim, ps
    from pycoll.parallel.build import parallelize
    from pycoll.parallel.core.batches import Batch, shard
    from pycoll.parallel.core.keyed_init import keyed_init
    from pycoll.parallel.core.loader import Loader, loader
    from pycoll.parallel.core.map_reduce import map_reduce
    from pycoll.parallel.core.metrics import log, metrics
    from pycoll.parallel.core.step_result import StepResult
    from pycoll.parallel.core.writers import JsonLines, TensorBoard
    from pycoll.parallel.features.annotate.annotations import Annotations, annotate
    from pycoll.parallel.features.annotate.sharding import Sharding
    from pycoll.parallel.features.experts import Experts
    from pycoll.parallel.features.place.places import ModulePlaces
    from pycoll.parallel.features.precision import Precision
    from pycoll.parallel.features.recompute import Keep
    from pycoll.parallel.features.tensor.hugging_face import tp_plan
    from pycoll.parallel.features.tensor.plan import (
        Column,
        Conv,
        Inside,
        Packed,
        Region,
        Row,
        Vocab,
    )
    from pycoll.parallel.features.tensor.vocab import cross_entropy
    from pycoll.parallel.planner.auto_place import auto_place
    from pycoll.parallel.planner.calibrate import calibrate
    from pycoll.parallel.planner.estimate import Estimate, estimate
    from pycoll.parallel.planner.flops import Flops, flops
    from pycoll.parallel.planner.layouts import Choices, Layout
    from pycoll.parallel.planner.plan import Plan, plan
    from pycoll.parallel.recovery.job import Job
    from pycoll.parallel.recovery.run import elastic
    from pycoll.parallel.replicas.gossip import Gossip, gossip
    from pycoll.parallel.replicas.local_steps import LocalSteps, diloco
    from pycoll.parallel.shared_arrays.hogwild import SharedWorker, hogwild
    from pycoll.parallel.shared_arrays.sparsity import Sparsity, sparsity
    from pycoll.parallel.tools.auto_annotate import auto_annotate
    from pycoll.parallel.tools.auto_plan import auto_plan
    from pycoll.parallel.tools.footprint import RankMemory, memory
    from pycoll.parallel.tools.training_timeline import trace
    from pycoll.parallel.trainer.checkpoint import load, save, save_in_background
    from pycoll.parallel.trainer.gather_full import whole_gradients, whole_weights
    from pycoll.parallel.trainer.grad_scaler import GradScaler
    from pycoll.parallel.trainer.optimizer_state_dicts import (
        load_optimizer_state_dict,
        optimizer_state_dict,
    )
    from pycoll.parallel.trainer.optimizers import Optimizer, optimizer
    from pycoll.parallel.trainer.owner import trainer_of
    from pycoll.parallel.trainer.pretrained import load_pretrained, save_pretrained
    from pycoll.parallel.trainer.saved_objects import RNG
    from pycoll.parallel.trainer.saving import Saving
    from pycoll.parallel.trainer.state_dicts import load_state_dict, state_dict
    from pycoll.parallel.trainer.trainer import Trainer
    from pycoll.parallel.trainer.weight_average import EMA

# Module of each name; imported when the name is first used, so that schedules need no torch.
_MODULES = {
    **dict.fromkeys(("Batch", "shard"), "core.batches"),
    "EMA": "trainer.weight_average",
    "cross_entropy": "features.tensor.vocab",
    **dict.fromkeys(("Annotations", "annotate"), "features.annotate.annotations"),
    "Sharding": "features.annotate.sharding",
    "Experts": "features.experts",
    "elastic": "recovery.run",
    **dict.fromkeys(("Gossip", "gossip"), "replicas.gossip"),
    **dict.fromkeys(("LocalSteps", "diloco"), "replicas.local_steps"),
    "GradScaler": "trainer.grad_scaler",
    **dict.fromkeys(("SharedWorker", "hogwild"), "shared_arrays.hogwild"),
    **dict.fromkeys(("Sparsity", "sparsity"), "shared_arrays.sparsity"),
    "Job": "recovery.job",
    "keyed_init": "core.keyed_init",
    **dict.fromkeys(("Optimizer", "optimizer"), "trainer.optimizers"),
    "trainer_of": "trainer.owner",
    **dict.fromkeys(("Loader", "loader"), "core.loader"),
    **dict.fromkeys(("load", "save", "save_in_background"), "trainer.checkpoint"),
    **dict.fromkeys(
        ("load_optimizer_state_dict", "optimizer_state_dict"), "trainer.optimizer_state_dicts"
    ),
    **dict.fromkeys(("load_pretrained", "save_pretrained"), "trainer.pretrained"),
    "RNG": "trainer.saved_objects",
    "Saving": "trainer.saving",
    **dict.fromkeys(("log", "metrics"), "core.metrics"),
    "auto_annotate": "tools.auto_annotate",
    "auto_place": "planner.auto_place",
    "auto_plan": "tools.auto_plan",
    "calibrate": "planner.calibrate",
    **dict.fromkeys(("Choices", "Layout"), "planner.layouts"),
    **dict.fromkeys(("Estimate", "estimate"), "planner.estimate"),
    **dict.fromkeys(("Flops", "flops"), "planner.flops"),
    **dict.fromkeys(("Plan", "plan"), "planner.plan"),
    **dict.fromkeys(("JsonLines", "TensorBoard"), "core.writers"),
    "map_reduce": "core.map_reduce",
    **dict.fromkeys(("RankMemory", "memory"), "tools.footprint"),
    "parallelize": "build",
    "Keep": "features.recompute",
    "ModulePlaces": "features.place.places",
    "Precision": "features.precision",
    "tp_plan": "features.tensor.hugging_face",
    **dict.fromkeys(
        ("Column", "Conv", "Inside", "Packed", "Region", "Row", "Vocab"), "features.tensor.plan"
    ),
    "trace": "tools.training_timeline",
    **dict.fromkeys(("load_state_dict", "state_dict"), "trainer.state_dicts"),
    "StepResult": "core.step_result",
    "Trainer": "trainer.trainer",
    **dict.fromkeys(("whole_gradients", "whole_weights"), "trainer.gather_full"),
}

__all__ = [
    "Annotations",
    "Batch",
    "Choices",
    "Column",
    "Conv",
    "EMA",
    "Estimate",
    "Experts",
    "Flops",
    "Gossip",
    "GradScaler",
    "Inside",
    "Job",
    "JsonLines",
    "Keep",
    "Layout",
    "Loader",
    "LocalSteps",
    "Mesh",
    "Optimizer",
    "ModulePlaces",
    "Packed",
    "Plan",
    "Precision",
    "RNG",
    "RankMemory",
    "Region",
    "Row",
    "Saving",
    "Sharding",
    "SharedWorker",
    "Sparsity",
    "StepResult",
    "TensorBoard",
    "Trainer",
    "Vocab",
    "annotate",
    "auto_annotate",
    "auto_place",
    "auto_plan",
    "calibrate",
    "cross_entropy",
    "diloco",
    "elastic",
    "estimate",
    "flops",
    "gossip",
    "graph",
    "hogwild",
    "keyed_init",
    "load",
    "load_optimizer_state_dict",
    "load_pretrained",
    "load_state_dict",
    "loader",
    "log",
    "map_reduce",
    "memory",
    "mesh",
    "metrics",
    "optim",
    "optimizer",
    "optimizer_state_dict",
    "parallelize",
    "plan",
    "ps",
    "save",
    "save_in_background",
    "save_pretrained",
    "shard",
    "sparsity",
    "state_dict",
    "tp_plan",
    "trace",
    "trainer_of",
    "whole_gradients",
    "whole_weights",
]


def __getattr__(name: str) -> Any:
    if name in ("graph", "optim", "ps"):
        return importlib.import_module(f"pycoll.parallel.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'pycoll.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pycoll.parallel.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
