"""The report of a parameter server as a picture: staleness, waiting by worker, bytes by kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pycoll.draw.style import INK, chunk_colors, image_format, matplotlib_module, render

if TYPE_CHECKING:
    from pycoll.parallel.ps.report import Report


def draw_report(report: Report, path: str | Path) -> None:
    """Writes the picture of a report to a file, .svg or .png."""
    target = Path(path)
    kind = image_format(target, None, ("svg", "png"))
    matplotlib_module()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.0), layout="constrained")
    of_staleness, of_waits, of_bytes = figure.subplots(1, 3)
    colors = chunk_colors(3)
    of_staleness.bar(list(report.staleness), list(report.staleness.values()), color=colors[0])
    of_staleness.set_title(f"staleness, mean {report.mean_staleness:.2f}", color=INK)
    of_staleness.set_xlabel("updates of other workers")
    of_staleness.set_ylabel("updates of shards")
    workers = sorted({*report.clocks, *report.waited_s})
    waits = [report.waited_s.get(worker, 0.0) for worker in workers]
    of_waits.bar([str(worker) for worker in workers], waits, color=colors[1])
    of_waits.set_title("waiting for others, s", color=INK)
    of_waits.set_xlabel("worker")
    kinds = sorted(report.nbytes)
    of_bytes.barh(kinds, [report.nbytes[name][1] / 1e6 for name in kinds], color=colors[2])
    of_bytes.set_title(f"MB of worker {report.worker}, and copies", color=INK)
    for axes in (of_staleness, of_waits, of_bytes):
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    target.write_bytes(render(figure, kind))


__all__ = ["draw_report"]
