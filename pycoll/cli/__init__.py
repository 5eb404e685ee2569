"""The command line `pycoll`. Commands import their modules when they run, so help is fast."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer

from pycoll.cli import (
    bench,
    bench_fit,
    calibrate,
    chaos,
    check,
    doctor,
    info,
    modes,
    pipeline,
    plan,
    run,
    scale,
    show,
    simulate,
    trace,
    tune,
    verify,
)
from pycoll.cli.common import Commands

__all__ = ["app", "main"]

app = typer.Typer(
    name="pycoll",
    cls=Commands,
    help="Collectives written once as data: proved, simulated, drawn and executed.",
    epilog="Exit status: 0 success, 1 failed or not proved, 2 usage error. "
    "Examples: pycoll COMMAND --help",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _flowing(text: str | None) -> str:
    """Joins the lines of each paragraph, so that the terminal wraps them."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _add(
    command: Callable[..., None],
    epilog: str,
    context: dict[str, Any] | None = None,
    name: str | None = None,
) -> None:
    app.command(name, epilog=epilog, context_settings=context, help=_flowing(command.__doc__))(
        command
    )


_add(show.show, show.EPILOG)
_add(verify.verify, verify.EPILOG)
_add(simulate.simulate, simulate.EPILOG)
_add(run.run, run.EPILOG, run.CONTEXT)
_add(chaos.chaos, chaos.EPILOG, run.CONTEXT)
_add(check.check, check.EPILOG, check.CONTEXT)
_add(scale.scale, scale.EPILOG, scale.CONTEXT)
_add(plan.plan, plan.PLAN_EPILOG, plan.CONTEXT)
_add(plan.flops, plan.FLOPS_EPILOG, plan.CONTEXT)
_add(calibrate.calibrate, calibrate.EPILOG)
_add(modes.modes, modes.EPILOG)
_add(bench.bench, bench.EPILOG)
_add(bench_fit.bench_fit, bench_fit.EPILOG, name="bench fit")
_add(tune.tune, tune.EPILOG)
_add(info.info, info.EPILOG)
_add(doctor.doctor, doctor.EPILOG)
_add(trace.trace, trace.EPILOG)
_add(pipeline.pipeline, pipeline.EPILOG)


def main() -> None:
    """Runs the console script."""
    app()
