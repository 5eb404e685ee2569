"""Colours, and the one place that touches matplotlib's set-up: figures without global state."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from pycoll.errors import UsageError

INK, MUTED, GRID, SHADE, PAPER = "#222222", "#5f6368", "#c9ccd1", "#f5f6f8", "#ffffff"
MARGIN = 0.30  # inches
CELL_HEIGHT = 0.24

# Paul Tol's "muted" scheme (https://personal.sron.nl/~pault/), told apart with any colour vision.
_MUTED_SCHEME = (
    "#332288", "#44aa99", "#cc6677", "#117733", "#88ccee", "#882255", "#999933", "#aa4499",
)  # fmt: skip
_MAX_PIXELS = 20_000


def matplotlib_module() -> Any:
    """Imports matplotlib, or raises an error with the command to install it."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "pictures need matplotlib, which is not installed: `pip install 'pycoll[draw]'`, "
            'or draw as text with format="text"'
        ) from error
    return matplotlib


def chunk_colors(num_chunks: int) -> list[str]:
    """One colour per chunk: told apart up to 8, in a perceptually even order beyond."""
    if num_chunks <= len(_MUTED_SCHEME):
        return list(_MUTED_SCHEME[:num_chunks])
    matplotlib = matplotlib_module()
    even = matplotlib.colormaps["viridis"]
    return [matplotlib.colors.to_hex(even(0.92 * c / (num_chunks - 1))) for c in range(num_chunks)]


def tint(color: str) -> str:
    """The colour mixed with five parts of white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(part + 5 * 255) // 6:02x}" for part in parts)


def ink_on(fill: str) -> str:
    """Dark or light ink, whichever has the greater WCAG contrast on that colour."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
        )

    background = luminance(fill) + 0.05
    return INK if background / (luminance(INK) + 0.05) > 1.05 / background else PAPER


def render(fig: Any, format: str) -> bytes:
    """The figure as SVG or PNG; the same figure always gives the same bytes of SVG.

    Args:
        fig: a matplotlib Figure.
        format: `svg` or `png`.

    Returns:
        The file's content.
    """
    matplotlib = matplotlib_module()
    out = io.BytesIO()
    options: dict[str, Any] = {}
    if format == "svg":
        options["metadata"] = {"Date": None, "Creator": "pycoll"}
    else:
        options["dpi"] = min(150.0, _MAX_PIXELS / max(fig.get_size_inches()))
    # Text stays text: small files, and words that can be searched for.
    style = {"svg.hashsalt": "pycoll", "svg.fonttype": "none"}
    with matplotlib.rc_context(style | {"font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}):
        fig.savefig(out, format=format, **options)
    content = out.getvalue()
    return _compact(content.decode()).encode() if format == "svg" else content


def _compact(svg: str) -> str:
    """The same picture with an element a line, and lines in tenths of a point."""

    def path(found: re.Match[str]) -> str:
        return " " + re.sub(r"(\d\.\d)\d+", r"\1", " ".join(found[0].split())).replace(' "', '"')

    svg = re.sub(r"(?s)<metadata>.*?</metadata>\s*", "", svg)
    svg = re.sub(r' d="[^"]*"', path, svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    return re.sub(r"\n\s+", "\n", svg)


def image_format(path: str | Path | None, format: str | None, known: tuple[str, ...]) -> str:
    """Returns the requested format, by name or by the file's ending."""
    chosen = format or (Path(path).suffix.lstrip(".").lower() if path is not None else "text")
    chosen = {"txt": "text"}.get(chosen, chosen)
    if chosen not in known:
        raise UsageError(
            f"cannot draw as {chosen!r}: expected one of {', '.join(known)}, "
            "given as format= or as the ending of the path"
        )
    return chosen


def deliver_figure(fig: Any, format: str, path: str | Path | None) -> str | bytes | None:
    """Delivers a matplotlib Figure as SVG or PNG: see `deliver`."""
    content = render(fig, format)
    return deliver(content.decode() if format == "svg" else content, path)


def deliver(content: str | bytes, path: str | Path | None) -> str | bytes | None:
    """Writes a picture to a file; without a path, returns it."""
    if path is None:
        return content
    if isinstance(content, str):
        Path(path).write_text(content, encoding="utf-8")
    else:
        Path(path).write_bytes(content)
    return None


def ticks(span: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers from 0 to `span`, at most `most`; integers if `whole` is set."""
    from matplotlib.ticker import MaxNLocator

    places = MaxNLocator(nbins=most, integer=whole).tick_values(0, span)
    return [tick for tick in places if 0 <= tick <= span * 1.0001]
