"""Pipeline parallelism: schedules as data, validated, simulated, drawn, and run by one runtime.

Schedules, their validation, simulation and pictures work without torch; the other modules import
torch at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pycoll.parallel.pipeline.schedules import (
    dual_pipe,
    gpipe,
    naive,
    one_forward_one_backward,
    pipedream,
    pipedream_2bw,
    pipedream_vertical_sync,
    zero_bubble,
)
from pycoll.parallel.pipeline.schedules.actions import Action, Costs, Kind, Schedule
from pycoll.parallel.pipeline.schedules.registry import (
    Generator,
    build,
    generator,
    names,
    register,
)
from pycoll.parallel.pipeline.schedules.simulate_pipeline import Simulation, simulate
from pycoll.parallel.pipeline.schedules.validate import validate
from pycoll.parallel.pipeline.split import split

for _module in (
    *(naive, gpipe, one_forward_one_backward, zero_bubble, dual_pipe),
    *(pipedream, pipedream_vertical_sync, pipedream_2bw),
):
    for _row in _module.ROWS:
        register(_row)

if TYPE_CHECKING:
    from pycoll.parallel.pipeline.cutting import Cut, cut
    from pycoll.parallel.pipeline.result import StepResult
    from pycoll.parallel.pipeline.runtime import PipelineRuntime
    from pycoll.parallel.pipeline.stages import ModuleStages

_NEED_TORCH = {
    "Cut": "cutting",
    "ModuleStages": "stages",
    "PipelineRuntime": "runtime",
    "StepResult": "result",
    "cut": "cutting",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)


__all__ = [
    "Action",
    "Costs",
    "Cut",
    "Generator",
    "Kind",
    "ModuleStages",
    "PipelineRuntime",
    "Schedule",
    "Simulation",
    "StepResult",
    "build",
    "cut",
    "generator",
    "names",
    "register",
    "simulate",
    "split",
    "validate",
]
