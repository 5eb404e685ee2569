"""Pictures of schedules, and the command that draws and prints them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from command_line import invoke

from pycoll.errors import UsageError
from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.draw_pipeline import STYLES, draw_pipeline

pytestmark = pytest.mark.pure

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"


def test_text_of_gpipe_is_the_picture_of_the_paper():
    picture = draw_pipeline(pipeline.build("gpipe", 3, 2), costs=pipeline.Costs(1, 0.5, 0.5))
    assert picture == (
        "rank 0  |F0 F1             B0 B1 | live 2\n"
        "rank 1  |   F0 F1       B0 B1    | live 2\n"
        "rank 2  |      F0 F1 B0 B1       | live 2\n"
        "bubble 100.0 % of the work, 50.0 % of all time; live activations by rank: 2 2 2\n"
    )


def test_text_tells_the_stages_of_a_rank_apart():
    picture = draw_pipeline(pipeline.build("zbv", 2, 2))
    assert picture.splitlines()[1] == "rank 1  |   F0 f0 F1 f1 i0 w0 I0 W0 i1 w1 I1 W1    | live 4"


def test_lines_of_text_are_short_however_the_times_differ():
    """Measured times do: an action that takes a microsecond is no column."""
    schedule = pipeline.build("pipedream", 4, 8)
    text = draw_pipeline(schedule, costs=pipeline.Costs(1e-6, 1, 1))
    assert 1000 < max(map(len, text.splitlines())) < 2100


def test_every_schedule_is_drawn_and_always_the_same_in_every_style(tmp_path):
    pytest.importorskip("matplotlib")
    for name in pipeline.names():
        svg = draw_pipeline(pipeline.build(name, 2, 3), format="svg")
        assert svg.startswith("<?xml") and name in svg
        every = {"pipedream_2bw": "every 2 backwards", "pipedream": "each backward"}
        assert f"updated at the end of {every.get(name, '')}" in svg or name not in every
    schedule = pipeline.build("interleaved_1f1b", 3, 3)
    for style in STYLES:
        drawn = [draw_pipeline(schedule, style=style, until=4, format="svg") for _ in range(2)]
        assert drawn[0] == drawn[1], style
        draw_pipeline(schedule, tmp_path / "x.png", style=style)
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG"), style


def test_pictures_of_the_papers_are_those_of_the_documents():
    """Golden files: `python docs/images/pipelines.py` writes them."""
    pytest.importorskip("matplotlib")
    pictures = runpy.run_path(str(IMAGES / "pipelines.py"))["pictures"]()
    assert set(pictures) == {path.name for path in IMAGES.glob("pipeline-*.svg")}
    for name, svg in pictures.items():
        committed = (IMAGES / name).read_text()
        assert boxes(svg) == boxes(committed), name


def boxes(svg: str) -> list[str]:
    return re.findall(r'style="(fill: #[^"]*)"', svg)


def test_documents_list_every_schedule_and_its_name_in_torch():
    table = (IMAGES.parent / "pipeline.md").read_text()
    for name in pipeline.names():
        torch_name = pipeline.generator(name).torch_name or ""
        assert f"| `{name}` | {torch_name}".rstrip() in table, name


# The command.


def test_command_without_a_schedule_compares_all():
    rows = json.loads(invoke("pipeline", "-p", "4", "-m", "8", "--json"))
    assert [row["schedule"] for row in rows] == pipeline.names()
    by_name = {row["schedule"]: row for row in rows}
    assert by_name["1f1b"]["bubble"] == pytest.approx(3 / 8)
    assert by_name["1f1b"]["transfers"] == [8, 16, 16, 8]
    assert by_name["interleaved_1f1b"]["transfers"] == [24, 32, 32, 24]
    table = invoke("pipeline", "-p", "4", "-m", "8")
    assert all(name in table for name in pipeline.names())


def test_command_draws_prints_and_lists_actions(tmp_path):
    path = tmp_path / "x.svg"
    out = invoke("pipeline", "--schedule", "1f1b", "-p", "4", "-m", "8", "--plot", str(path))
    assert path.read_text().startswith("<?xml")
    assert "bubble 37.5 % of the work, 27.3 % of all time; live activations by rank: 4 3 2 1" in out
    assert "rank 3  |" in invoke("pipeline", "-s", "1f1b")
    actions = invoke("pipeline", "-s", "gpipe", "-p", "2", "-m", "1", "--actions")
    assert actions.startswith("0: 0RECV_B0 0F0 0SEND_F0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0\n")


def test_command_proves_a_schedule_of_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    figures = json.loads(invoke("pipeline", "--file", str(path), "--json"))
    assert (figures["schedule"], figures["ranks"], figures["bubble"]) == ("mine", 2, 0.5)
    path.write_text("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n")
    assert "schedule mine deadlocks: rank 0 waits in 0B0" in invoke(
        "pipeline", "--file", str(path), status=2
    )


def test_command_asked_wrongly_says_what_is_expected_and_help_shows_examples():
    assert "did you mean gpipe?" in invoke("pipeline", "-s", "gipe", status=2)
    assert "--costs 1,2: expected the times" in invoke("pipeline", "--costs", "1,2", status=2)
    assert "name a schedule to draw" in invoke("pipeline", "--text", status=2)
    with pytest.raises(UsageError, match="cannot draw as 'gif'"):
        draw_pipeline(pipeline.build("gpipe", 2, 2), "x.gif")
    example = "pycoll pipeline --schedule 1f1b -p 4 -m 8 --plot 1f1b.svg"
    assert example in invoke("pipeline", "--help")


@pytest.mark.ranks
@pytest.mark.torch
def test_command_measures_with_stages_that_sleep():
    pytest.importorskip("torch")
    out = invoke(
        *("pipeline", "-s", "zb1p", "-p", "2", "-m", "4", "--measure", "--unit-ms", "5", "--json")
    )
    figures = json.loads(out)
    assert figures["measured"] and figures["live"] == [2, 2]
    assert 13 * 0.005 <= figures["time"] < 1
