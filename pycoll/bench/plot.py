"""Time and bus bandwidth against size: SVG, PNG, or a page with picture and table."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from pycoll.bench.record import Row, machine
from pycoll.cli.units import format_nbytes, format_rate, format_seconds
from pycoll.draw.style import image_format, matplotlib_module, render

FORMATS = ("svg", "png", "html")
HEADERS = (
    "series",
    "algorithm",
    "size",
    "median",
    "min",
    "p99",
    "algbw",
    "busbw",
    "calls",
    "#wrong",
)
_COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999933")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }}
th:nth-child(-n+2), td:nth-child(-n+2) {{ text-align: left; }}
.wrong {{ color: #b00020; font-weight: bold; }}
p {{ color: #5f6368; }}
</style></head><body>
<h1>{title}</h1>
{picture}
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
<p>A call's time is that of its slowest rank. {machine}.</p>
</body></html>
"""


def cells(row: Row) -> tuple[str, ...]:
    """A row of a table, under HEADERS."""
    timing = row.timing
    return (
        row.case.series,
        row.chosen,
        format_nbytes(row.case.nbytes),
        *(
            "" if t is None else format_seconds(t)
            for t in (timing.median_s, timing.min_s, timing.p99_s)
        ),
        format_rate(row.algbw),
        format_rate(row.busbw),
        str(timing.num_calls),
        str(row.num_wrong),
    )


def title_of(rows: list[Row]) -> str:
    """`all_reduce (sum), f32, 2 ranks`."""
    case = rows[0].case
    op = f" ({case.op})" if case.row.has_op else ""
    return f"{case.collective}{op}, {case.dtype}, {case.num_ranks} ranks"


def plot(rows: list[Row], path: Path) -> None:
    """Writes a picture or a page; the format follows the file's ending.

    Args:
        rows: The rows of one or more series.
        path: Ends in .svg, .png or .html.

    Raises:
        UsageError: Another ending, or matplotlib is not installed.
    """
    chosen = image_format(path, None, FORMATS)
    picture = render(_figure(rows), "png" if chosen == "png" else "svg")
    path.write_bytes(_page(rows, picture).encode() if chosen == "html" else picture)


def format_panel(panel: Any) -> None:
    """The axis of sizes, as in all pictures of benchmarks."""
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda nbytes, _: format_nbytes(nbytes))
    panel.tick_params(axis="x", labelrotation=30)
    panel.set_xlabel("message")
    panel.grid(which="major", alpha=0.3)


def _figure(rows: list[Row]) -> Any:
    matplotlib_module()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row.case.series, []).append(row)
    for i, (name, points) in enumerate(series.items()):
        sizes = [row.case.nbytes for row in points]
        style = {
            "label": name,
            "color": _COLORS[i % len(_COLORS)],
            "marker": "os^vDPX*"[i % 8],
            "markersize": 4,
        }
        left.plot(sizes, [row.timing.median_s * 1e6 for row in points], **style)
        lows = [(row.timing.min_s or row.timing.median_s) * 1e6 for row in points]
        left.fill_between(
            sizes,
            lows,
            [(row.timing.p99_s or row.timing.median_s) * 1e6 for row in points],
            color=style["color"],
            alpha=0.12,
            lw=0,
        )
        right.plot(sizes, [row.busbw / 1e9 for row in points], **style)
    for panel in (left, right):
        format_panel(panel)
    left.set_yscale("log")
    left.set_ylabel("us: median, shaded from min to p99")
    right.set_ylabel("busbw at the median, GB/s")
    right.set_ylim(bottom=0)
    left.legend()
    figure.suptitle(title_of(rows))
    return figure


def _page(rows: list[Row], picture: bytes) -> str:
    def line(row: Row) -> str:
        texts = cells(row)
        parts = [f"<td>{html.escape(text)}</td>" for text in texts]
        if row.num_wrong:
            parts[-1] = f'<td class="wrong">{texts[-1]}</td>'
        return f"<tr>{''.join(parts)}</tr>"

    from pycoll import __version__

    facts = machine()
    return _PAGE.format(
        title=html.escape(title_of(rows)),
        picture=picture[picture.index(b"<svg") :].decode(),
        head="".join(f"<th>{name}</th>" for name in HEADERS),
        body="\n".join(map(line, rows)),
        machine=html.escape(
            f"{facts['cores']} cores ({facts['cpu']}), Python {facts['python']}, "
            f"pycoll {__version__}"
        ),
    )
