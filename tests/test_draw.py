"""Pictures show exactly the moves of the schedule, and the same picture is the same file."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pycoll import UsageError, _core, schedule
from pycoll.cli import app
from pycoll.draw import draw_schedule, draw_simulation
from pycoll.draw.cluster import draw_cluster as draw_cluster_figure
from pycoll.draw.picture import FOREIGN, Picture, make_picture

pytestmark = pytest.mark.pure

ALGORITHMS = [(row.collective, row.name) for row in _core.algorithms()]
RING_3 = """\
ring all_reduce, 3 ranks
4 rounds, 3 chunks, sent per rank: 1.333 x the message, longest program after lowering: 5 steps

                 rank 0    rank 1    rank 2
start             111       111       111
round 0   ====1====+o===2====+o===0====+o===1=====
                  121       112       211
round 1   ====0====+o===1====+o===2====+o===0=====
                  #21       1#2       21#
round 2   ----2---->o---0---->o---1---->o---2-----
                  #2#       ##2       2##
round 3   ----1---->o---2---->o---0---->o---1-----
                  ###       ###       ###

o==+ reduce
o--> copy
a line that leaves on one side enters on the other
a cell per chunk: . nothing yet, 1 1 of 3 contributions, # complete
"""


def build(algorithm: str, n: int, collective: str = "all_reduce") -> schedule.Schedule:
    return schedule.build(collective, algorithm, n)


def moves_shown(picture: Picture) -> Counter:
    """The moves that a picture's flows stand for."""
    return Counter(
        (step.idx, flow.kind, flow.chunks, src, dst)
        for step in picture.rounds
        for flow in step.flows
        for src in flow.srcs
        for dst in flow.dsts
    )


def test_picture_of_every_algorithm_shows_each_move_once_and_ends_complete():
    for collective, algorithm in ALGORITHMS:
        for n in (1, 2, 3, 4, 5, 8, 13):
            built = build(algorithm, n, collective)
            picture, case = make_picture(built), (collective, algorithm, n)
            moves = Counter((m.round, m.kind, tuple(m.chunks), m.src, m.dst) for m in built.moves)
            assert moves_shown(picture) == moves, case
            end = picture.rounds[-1].held if picture.rounds else picture.start
            for held, full, wanted in zip(end, picture.full, picture.wanted, strict=True):
                cells = zip(held, full, wanted, strict=True)
                assert all(h == f for h, f, w in cells if w), case


def test_picture_moves_of_a_round_read_what_was_there_before_it():
    moves = [schedule.reduce(0, 0, src=0, dst=1), schedule.reduce(0, 0, src=1, dst=2)]
    chain = SimpleNamespace(
        collective="all_reduce",
        algorithm="chain",
        n=3,
        num_chunks=1,
        chunks_per_message=1,
        num_steps=1,
        moves=moves,
        goal=lambda rank, chunk: ("reduced", 0),
        starts_with_value=lambda rank, chunk: True,
    )
    (step,) = make_picture(chain).rounds
    assert step.held == ((1,), (2,), (2,))


def test_picture_exscan_counts_what_is_asked_for():
    picture = make_picture(build("chain", 4, "exscan"))
    assert picture.start == ((FOREIGN,),) * 4
    assert [step.held for step in picture.rounds] == [
        ((FOREIGN,), (1,), (1,), (1,)),
        ((FOREIGN,), (1,), (2,), (1,)),
        ((FOREIGN,), (1,), (2,), (3,)),
    ]
    assert picture.full == ((1,), (1,), (2,), (3,))


def test_picture_scan_is_complete_with_the_ranks_below():
    picture = make_picture(build("chain", 3, "scan"))
    assert picture.start == ((1,),) * 3 and picture.full == ((1,), (2,), (3,))


def test_text_underlines_what_is_asked_for():
    lines = draw_schedule(build("ring", 3, "reduce_scatter"), format="ascii").splitlines()
    assert lines[-5].split() == ["^"] * 3 and "^ asked for at the end" in lines[-1]
    end, asked = lines[-6], lines[-5]
    assert [end[i] for i, mark in enumerate(asked) if mark == "^"] == ["#"] * 3
    assert "asked for" not in draw_schedule(build("ring", 3), format="ascii")


@pytest.mark.parametrize("n", [3, 4, 8])
def test_picture_ring_goes_around_once_per_round(n):
    for step in make_picture(build("ring", n)).rounds:
        around = [flow for flow in step.flows if flow.shift]
        assert [(flow.srcs, flow.dsts, flow.shift) for flow in around] == [((n - 1,), (0,), 1)]


def test_picture_exchange_of_pairs_goes_around_nowhere():
    picture = make_picture(build("halving_doubling", 8))
    assert not any(flow.shift for step in picture.rounds for flow in step.flows)


def test_picture_one_shot_bundles_a_flow_per_rank():
    (step,) = make_picture(build("one_shot", 8)).rounds
    assert step.bundled
    assert [flow.srcs for flow in step.flows] == [(rank,) for rank in range(8)]
    assert all(len(flow.dsts) == 7 for flow in step.flows)


def test_picture_caption_says_rounds_bytes_and_steps():
    assert make_picture(build("ring", 8)).caption == (
        "14 rounds, 8 chunks, sent per rank: 1.75 x the message, "
        "longest program after lowering: 15 steps"
    )
    assert "sent per rank: 1 to 7 x the message" in make_picture(build("star", 8)).caption


def test_text_ring_of_three_is_as_kept():
    assert draw_schedule(build("ring", 3), format="ascii") == RING_3


def test_text_of_every_algorithm_hides_no_mark_and_ascii_has_no_other_character():
    for collective, algorithm in ALGORITHMS:
        for n in (2, 5, 8):
            built, case = build(algorithm, n, collective), (collective, algorithm, n)
            flows = [flow for step in make_picture(built).rounds for flow in step.flows]
            body = draw_schedule(built).rpartition("\n\n")[0]
            reduced = sum(len(flow.dsts) for flow in flows if flow.kind == "reduce")
            copied = sum(len(flow.dsts) for flow in flows if flow.kind == "copy")
            assert body.count("●") == sum(len(flow.srcs) for flow in flows), case
            assert body.count("⊕") == reduced, case
            assert body.count("▷") + body.count("◁") == copied, case
            if n == 5:
                assert draw_schedule(built, format="ascii").isascii(), case


def test_svg_drawn_twice_is_the_same_text(tmp_path: Path):
    """One algorithm of each collective: the SVG is drawn from the picture alone."""
    pytest.importorskip("matplotlib")
    for collective, algorithm in dict(ALGORITHMS).items():
        built = build(algorithm, 3, collective)
        first = draw_schedule(built, format="svg")
        built.draw(tmp_path / "picture.svg")
        assert (tmp_path / "picture.svg").read_text() == first, algorithm
        assert xml.etree.ElementTree.fromstring(first).tag.endswith("svg"), algorithm
        assert not re.search(r"\d{4}-\d\d-\d\d", first), algorithm


def test_svg_has_a_mark_for_every_flow(monkeypatch):
    pytest.importorskip("matplotlib")
    from pycoll.draw import figure

    heads = []
    draw_head = figure.draw_head

    def record(canvas, start, end, color, kind, size):
        heads.append((end, color, kind))
        draw_head(canvas, start, end, color, kind, size)

    monkeypatch.setattr(figure, "draw_head", record)
    for algorithm in ("ring", "two_shot", "star"):
        heads.clear()
        built = build(algorithm, 8)
        draw_schedule(built, format="svg")
        flows = [flow for step in make_picture(built).rounds for flow in step.flows]
        expected = Counter({"reduce": 0, "copy": 0})
        for flow in flows:
            expected[flow.kind] += len(flow.dsts)
        assert Counter(kind for _, _, kind in heads) == expected


def test_png_is_written_without_pyplot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "ring.png"
    code = (
        "import sys; from pycoll import schedule;"
        f"schedule.build('all_reduce', 'ring', 4).draw({str(path)!r});"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    root = Path(schedule.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_draw_without_matplotlib_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pycoll\[draw\]"):
        draw_schedule(build("ring", 4), format="svg")
    assert "rank 3" in draw_schedule(build("ring", 4))


def test_draw_text_file_holds_what_is_returned_and_unknown_endings_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="svg, png, text, ascii"):
        draw_schedule(build("ring", 4), tmp_path / "ring.gif")
    draw_schedule(build("tree", 4), tmp_path / "tree.txt", title="two trees")
    text = (tmp_path / "tree.txt").read_text(encoding="utf-8")
    assert text == draw_schedule(build("tree", 4), title="two trees")
    assert text.startswith("two trees\n")


def test_simulation_timeline_has_a_box_per_event_and_end(monkeypatch):
    pytest.importorskip("matplotlib")
    from pycoll.draw import timeline

    boxes = []
    draw_box = timeline.Canvas.box

    def record(self, x, y, width, height, **look):
        boxes.append(look["z"])
        draw_box(self, x, y, width, height, **look)

    monkeypatch.setattr(timeline.Canvas, "box", record)
    simulation = build("ring", 4).simulate(1 << 20, 1e-6, 1e-10, 5e-11)
    svg = draw_simulation(simulation)
    ends = {"transfer": 2, "reduce": 1}  # a transfer keeps two ranks busy
    assert boxes.count(3) == sum(ends[event.kind] for event in simulation.events) > 0
    assert svg == draw_simulation(simulation)
    assert draw_simulation(build("ring", 1).simulate(1 << 20, 1e-6, 1e-10))  # of no event


def test_cluster_has_a_row_for_each_host_and_a_cell_for_each_link():
    ranks = [{"host": f"node{rank // 2}", "host_number": rank // 2} for rank in range(5)]
    links = [
        {"from": a, "to": b, "alpha_us": 10.0 + a, "gbit_per_s": 1.0 + b}
        for a, b in ((0, 1), (2, 3), (0, 2), (0, 4), (2, 4))
    ]
    figure = draw_cluster_figure({"ranks": ranks, "links": links}, "title")
    for panel, first in zip(figure.axes, ("10", "2"), strict=True):
        labels = [label.get_text() for label in panel.get_yticklabels()]
        assert labels == ["node0\nranks 0-1", "node1\nranks 2-3", "node2\nrank 4"]
        # Both directions of three links between hosts, and two within.
        assert len(panel.texts) == 8 and panel.texts[0].get_text() == first


def test_plot_of_a_cluster_needs_the_cluster():
    done = CliRunner().invoke(app, ["info", "--plot", "x.svg"])
    assert done.exit_code == 2 and "needs --cluster" in done.output
