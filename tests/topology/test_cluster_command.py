"""`pycoll simulate --topology`: tables, pictures and errors."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from cases import each_case
from clusters import fat_tree, hosts

import pycoll
from pycoll import UsageError, schedule, topology

# tests/command_line.py
from command_line import invoke, run  # isort: skip

pytestmark = pytest.mark.pure

EXAMPLES = Path(pycoll.__file__).parents[1] / "examples" / "topologies"
NVLINK = str(EXAMPLES / "nvlink_hosts.toml")


def rows(text, start):
    """Cells of the table lines that begin with one of the names."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return {cells[0]: cells[1:] for cells in lines if cells[0].startswith(start)}


def test_one_size_prints_the_fastest_first_with_the_busiest_link():
    text = invoke("simulate", "-t", NVLINK, "-n", "64", "-b", "1G")
    assert "all_reduce on 1,280 NVLink hosts: 64 ranks" in text
    found = rows(text, ("ring", "tree", "halving_doubling", "hierarchical"))
    assert {"ring", "tree", "halving_doubling", "hierarchical:host/ring"} <= set(found)
    cluster = topology.load(NVLINK).resized(64)
    times = {
        "ring": cluster.simulate("all_reduce", "ring", 1 << 30).time_s,
        "hierarchical:host/ring": cluster.simulate("all_reduce", "hierarchical", 1 << 30).time_s,
    }
    assert sorted(times, key=times.__getitem__) == [name for name in found if name in times]
    for name, time_s in times.items():
        assert found[name][0] == f"{time_s * 1e3:.4g} ms"
    assert found["ring"][3].startswith("cluster: host")
    assert found["ring"][-1] == "8"
    assert "exact: every message" in text and "not exact" not in text


def test_several_sizes_print_a_column_per_algorithm():
    args = ("-a", "ring,hierarchical:host/tree", "-b", "1K:1M:32")
    text = invoke("simulate", "-t", NVLINK, "-n", "32", *args)
    assert set(rows(text, ("1 KiB", "32 KiB", "1 MiB"))) == {"1 KiB", "32 KiB", "1 MiB", "1 MiB:"}
    assert "hierarchical:host/tree" in text


@each_case("collective", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_other_collectives_are_simulated_on_clusters(collective):
    text = invoke("simulate", collective, "-t", NVLINK, "-n", "16", "-b", "1M")
    assert f"{collective} on" in text


def test_registered_algorithm_is_simulated_on_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "_registered", {})
    (tmp_path / "mine.py").write_text(
        "from pycoll.schedule import copy, reduce, register\n"
        "@register('all_reduce', 'mine')\n"
        "def mine(n, root):\n"
        "    for rank in range(1, n):\n"
        "        yield reduce(0, 0, src=rank, dst=0)\n"
        "        yield copy(1, 0, src=0, dst=rank)\n"
    )
    args = ("--module", str(tmp_path / "mine.py"), "-b", "1M")
    text = invoke("simulate", "-t", NVLINK, "-n", "8", *args)
    found = rows(text, ("mine", "ring"))
    cluster = topology.load(NVLINK).resized(8)
    time_s = cluster.simulate("all_reduce", "mine", 1 << 20).time_s
    assert found["mine"][0] == f"{time_s * 1e6:.4g} us"


def test_plot_draws_curves_and_links(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    args = ("-a", "ring,hierarchical", "--plot", str(picture))
    out, err = run("simulate", "-t", str(EXAMPLES / "rails.toml"), "-n", "16", *args)
    assert f"wrote {picture}" in err
    words = re.findall(r">([^<]+)</text>", picture.read_text())
    assert {"time", "busbw, GB/s", "16 KiB", "1 GiB", "ring"} <= set(words)
    assert any(word.startswith("hierarchical:host/ring, 1 GiB: ") for word in words)
    assert any(word.startswith("busiest: host") for word in words)
    ElementTree.parse(picture)


def test_picture_of_one_size_has_links_only_and_may_be_png(tmp_path):
    pytest.importorskip("matplotlib")
    one = fat_tree(2, 2, 2).simulate("all_reduce", "ring", 1 << 20, timeline=True)
    one.draw(tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
    assert "busbw" not in one.draw()
    with pytest.raises(UsageError, match="nothing to draw"):
        hosts(2, 2).simulate("all_reduce", "ring", 64).draw()


@each_case(
    "args, message",
    [
        (("--topology", "nowhere.toml"), "cannot read the topology nowhere.toml"),
        (("--topology", NVLINK, "-n", "12"), "to 12 ranks: expected a multiple"),
        (("--topology", NVLINK, "--alpha", "1us"), "--alpha and --topology both set"),
        (("--topology", NVLINK, "-o", "x.svg"), "use --plot"),
        (("--topology", NVLINK, "-a", "rung"), "no algorithm called 'rung'"),
        (
            ("--topology", NVLINK, "-n", "16", "-a", "hierarchical:hots"),
            "no level is called 'hots'",
        ),
        (("--plot", "x.svg"), "--plot needs --topology"),
    ],
)
def test_wrong_use_with_clusters_is_named_and_status_2(args, message):
    said = invoke("simulate", *args, status=2)
    assert message in said
    assert all(line.startswith("pycoll: ") for line in said.splitlines())
