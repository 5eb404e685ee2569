"""Stops a training script at its first step, and plans or estimates its model instead.

`pycoll plan` and `pycoll flops` run a script on one rank with REQUEST in its environment.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pycoll import topology
from pycoll.parallel.core.meta_model import on_meta
from pycoll.parallel.core.specs import replace

REQUEST = "PYCOLL_PLAN"  # environment variable: what to print at the first step, as JSON


def plain_copy(model: nn.Module) -> nn.Module | None:
    """A copy without values of a model that `parallelize` will change; None: nothing is planned."""
    if REQUEST not in os.environ:
        return None
    with torch.device("meta"):
        return on_meta(model)


def intercept(model: nn.Module, plain: nn.Module | None, **options: Any) -> None:
    """Makes the first `step` of a model answer the request and end the script.

    Args:
        model: The model that `parallelize` returns.
        plain: What `plain_copy` returned for it.
        options: tp, pp, recompute and precision, as the script gave them.
    """
    if plain is not None:
        model.step = partial(_answer, plain, options)  # type: ignore[assignment]


def _answer(
    model: nn.Module,
    options: dict[str, Any],
    x: Any,
    y: Any,
    *,
    loss: Callable[[Any, Any], Any],
    microbatches: int = 1,
    **others: Any,
) -> None:
    request = json.loads(os.environ[REQUEST])
    x, y = (replace(of, Tensor, lambda t: t.to("meta")) for of in (x, y))
    if request["command"] == "plan":
        kept = {name: options[name] or None for name in ("tp", "pp", "precision")}
        print(_planned(request, model, x, y, loss, kept))
    elif request["cluster"] is None:
        print(_planner("flops").flops(model, x).table(request["depth"]))
    else:
        device = topology.load(request["cluster"]).device
        kinds = {name: options[name] for name in ("recompute", "pp")}
        made = _planner("estimate").estimate(model, x, device, y=y, loss=loss, **kinds)
        print(made.table(request["depth"]))
    Path(request["done"]).write_text("answered")
    raise SystemExit(0)


def _planned(
    request: dict[str, Any],
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Callable[[Any, Any], Any],
    options: dict[str, Any],
) -> str:
    made = _planner("plan").plan(
        model,
        x,
        y=y,
        loss=loss,
        world=request["world"],
        cluster=request["cluster"],
        memory=request["memory"],
        search=request["search"],
        probe=request["probe"],
        **options,
    )
    if request["plot"]:
        made.plot(request["plot"])
    return str(made.table())


def _planner(module: str) -> Any:
    """A module of this folder, by name: it imports `parallelize`, whose module imports this one."""
    return importlib.import_module(f"pycoll.parallel.planner.{module}")


__all__ = ["REQUEST", "intercept", "plain_copy"]
