"""Times of messages between and within hosts, as a picture of two tables."""

from __future__ import annotations

from typing import Any

from pycoll.draw.style import INK, MUTED, ink_on, matplotlib_module


def draw_cluster(facts: dict[str, Any], title: str) -> Any:
    """A row and a column for each host, with its ranks; returns a matplotlib Figure.

    Args:
        facts: Of `pycoll info --cluster --json`.
        title: Above the tables.
    """
    matplotlib_module()
    from matplotlib.figure import Figure

    numbers = sorted({rank["host_number"] for rank in facts["ranks"]})
    place = {number: i for i, number in enumerate(numbers)}
    labels = [_label(facts["ranks"], number) for number in numbers]
    side = max(3.2, 0.85 * len(numbers) + 1.6)
    figure = Figure(figsize=(2 * side, side + 0.3), layout="constrained")
    panels = figure.subplots(1, 2)
    names = (("alpha_us", "one way of 8 bytes, us"), ("gbit_per_s", "1 MiB, Gbit/s"))
    for panel, (key, name) in zip(panels, names, strict=True):
        cells: dict[tuple[int, int], float] = {}
        for link in facts["links"]:
            a, b = (place[facts["ranks"][link[end]]["host_number"]] for end in ("from", "to"))
            cells[a, b] = cells[b, a] = link[key]
        _draw(panel, labels, cells, name, lower_is_better=key == "alpha_us")
    figure.suptitle(title, color=INK, fontsize=13, fontweight="bold")
    return figure


def _label(ranks: list[dict[str, Any]], number: int) -> str:
    here = [rank for rank, facts in enumerate(ranks) if facts["host_number"] == number]
    follow_each_other = here == list(range(here[0], here[-1] + 1))
    if len(here) == 1:
        which = f"rank {here[0]}"
    elif follow_each_other:
        which = f"ranks {here[0]}-{here[-1]}"
    else:
        which = f"{len(here)} ranks"
    return f"{ranks[here[0]]['host']}\n{which}"


def _draw(
    panel: Any,
    labels: list[str],
    cells: dict[tuple[int, int], float],
    name: str,
    lower_is_better: bool,
) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, to_hex

    n = len(labels)
    values = list(cells.values()) or [1.0]
    norm = LogNorm(min(values) / 1.01, max(values) * 1.01)
    colors = colormaps["viridis_r" if lower_is_better else "viridis"]
    table = [[cells.get((row, column), float("nan")) for column in range(n)] for row in range(n)]
    panel.imshow(table, cmap=colors, norm=norm)
    for (row, column), value in cells.items():
        panel.text(
            column,
            row,
            f"{value:.3g}",
            ha="center",
            va="center",
            color=ink_on(to_hex(colors(norm(value)))),
            fontsize=10,
        )
    panel.set_title(name, color=INK, fontsize=11)
    panel.set_xticks(range(n), labels)
    panel.set_yticks(range(n), labels)
    panel.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    for spine in panel.spines.values():
        spine.set_visible(False)
