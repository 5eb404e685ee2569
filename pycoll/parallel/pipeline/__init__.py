"""Pipeline parallelism: schedules as data, proved, simulated, drawn, and run by one runtime.

Schedules, their proof, simulation and pictures work without torch; the rest imports it when it is
asked for.
"""

from __future__ import annotations

from pycoll.parallel.pipeline import (
    gpipe,
    naive,
    one_forward_one_backward,
    pipedream,
    zero_bubble,
)
from pycoll.parallel.pipeline.actions import Action, Kind, Schedule
from pycoll.parallel.pipeline.registry import Costs, Generator, build, generator, names, register
from pycoll.parallel.pipeline.simulate import Simulation, simulate
from pycoll.parallel.pipeline.validate import validate

for _module in (naive, gpipe, one_forward_one_backward, zero_bubble, pipedream):
    for _row in _module.ROWS:
        register(_row)

__all__ = [
    "Action",
    "Costs",
    "Generator",
    "Kind",
    "Schedule",
    "Simulation",
    "build",
    "generator",
    "names",
    "register",
    "simulate",
    "validate",
]
