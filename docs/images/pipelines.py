"""Writes the pictures of docs/pipeline.md beside itself: `python docs/images/pipelines.py`."""

from pathlib import Path

from pycoll.parallel import pipeline
from pycoll.parallel.pipeline.draw_pipeline import draw_pipeline


def pictures():
    """Each picture's file and content."""
    # GPipe's paper goes back in reverse; with one stage per rank breadth first is that order.
    gpipe = pipeline.build("looped_bfs", 4, 4, 1)
    stream = pipeline.build("pipedream", 4, 16)
    drawn = {
        "gpipe": draw_pipeline(
            gpipe,
            costs=pipeline.Costs(1, 0.5, 0.5),
            style="gpipe",
            title="GPipe, 4 devices, 4 microbatches",
            format="svg",
        ),
        "pipedream": draw_pipeline(stream, title="PipeDream, 4 workers", until=28.0, format="svg"),
    }
    for name in ("1f1b", "interleaved_1f1b", "zb1p", "zb2p", "zbv", "dualpipev"):
        drawn[name] = draw_pipeline(pipeline.build(name, 4, 8), format="svg")
    return {f"pipeline-{name}.svg": content for name, content in drawn.items()}


if __name__ == "__main__":
    for file_name, content in pictures().items():
        (Path(__file__).parent / file_name).write_text(content)
