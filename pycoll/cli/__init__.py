"""The command line `pycoll`. Commands import what they need when they run: help comes at once."""

from __future__ import annotations

import typer

from pycoll.cli import (
    bench,
    check,
    doctor,
    info,
    modes,
    pipeline,
    run,
    scale,
    show,
    simulate,
    trace,
    tune,
    verify,
)
from pycoll.cli.common import ErrorsAsLines

__all__ = ["app", "main"]

app = typer.Typer(
    name="pycoll",
    cls=ErrorsAsLines,
    help="Collectives written once as data: proved, simulated, drawn and executed.",
    epilog="Exit status: 0 done, 1 failed or not proved, 2 asked wrongly. "
    "Examples: pycoll COMMAND --help",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(epilog=show.EPILOG)(show.show)
app.command(epilog=verify.EPILOG)(verify.verify)
app.command(epilog=simulate.EPILOG)(simulate.simulate)
app.command(epilog=run.EPILOG, context_settings=run.CONTEXT)(run.run)
app.command(epilog=check.EPILOG, context_settings=check.CONTEXT)(check.check)
app.command(epilog=scale.EPILOG, context_settings=scale.CONTEXT)(scale.scale)
app.command(epilog=modes.EPILOG)(modes.modes)
app.command(epilog=bench.EPILOG)(bench.bench)
app.command(epilog=tune.EPILOG)(tune.tune)
app.command(epilog=info.EPILOG)(info.info)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command(epilog=trace.EPILOG)(trace.trace)
app.command(epilog=pipeline.EPILOG)(pipeline.pipeline)


def main() -> None:
    """The console script."""
    app()
