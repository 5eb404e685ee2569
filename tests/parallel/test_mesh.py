"""Meshes: sizes, coordinates, and the communicators of the axes."""

from __future__ import annotations

import numpy as np
import pytest

from pycoll import UsageError, run_ranks
from pycoll import parallel as pc
from pycoll.parallel.core.mesh_sizes import AXES, infer_sizes, parse_sizes


@pytest.mark.pure
def test_sizes_with_one_open_are_inferred():
    assert infer_sizes({"pp": 2, "dp": -1, "tp": 2}, 8) == {"pp": 2, "dp": 2, "tp": 2}
    assert infer_sizes({"pp": -1, "dp": 1, "tp": 1}, 5) == {"pp": 5, "dp": 1, "tp": 1}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 3, "dp": 1, "tp": 2}, "multiplies to 6, but this job has 8 ranks"),
        ({"pp": 3, "dp": -1, "tp": 1}, "multiply to 3, which does not divide the 8 ranks"),
        ({"pp": -1, "dp": -1, "tp": 1}, "at most one of them -1"),
        ({"pp": 0, "dp": 8, "tp": 1}, "expected sizes of 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(sizes, message):
    with pytest.raises(UsageError, match=message):
        infer_sizes(sizes, 8)


@pytest.mark.pure
def test_text_of_sizes_is_read_or_refused():
    assert parse_sizes("dp=2, tp=4,pp=-1") == {"dp": 2, "tp": 4, "pp": -1}
    for text in ("dp", "dp=x", "xp=2", "dp=2,dp=2"):
        with pytest.raises(UsageError, match="expected for example"):
            parse_sizes(text)


def test_coordinates_and_communicators_agree():
    def work(comm):
        mesh = pc.mesh(pp=2, tp=2, comm=comm)
        ranks = {
            axis: mesh.comm(axis).all_gather(np.array([comm.rank])).tolist() for axis in mesh.sizes
        }
        return mesh.sizes, tuple(mesh.coordinates.values()), ranks

    outcomes = run_ranks(work, 8)
    for rank, (sizes, place, ranks) in enumerate(outcomes):
        assert sizes == {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
        assert place == (rank // 4, rank // 2 % 2, 0, 0, rank % 2)
        assert ranks["tp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert ranks["dp"] == [rank - rank % 4 // 2 * 2, rank - rank % 4 // 2 * 2 + 2]
        assert ranks["pp"] == [rank % 4, rank % 4 + 4]


def test_lines_that_only_some_ranks_need_are_made_by_all():
    def work(comm):
        mesh = pc.mesh(pp=2, tp=2, comm=comm)
        lines = [("tp",), ()] if mesh.rank("pp") else []
        mesh.make_lines_of_dp(lines)
        return [mesh.line_of_dp(*axes).size for axes in lines], len(mesh.planes)

    outcomes = run_ranks(work, 8, timeout_s=10)
    assert outcomes == [([], 4)] * 4 + [([4, 2], 4)] * 4


def test_environment_replaces_the_sizes(monkeypatch):
    monkeypatch.setenv("PYCOLL_MESH", "pp=2")
    assert run_ranks(lambda comm: pc.mesh(tp=2, comm=comm).sizes["pp"], 2) == [2, 2]


def test_no_launcher_is_a_world_of_one():
    assert run_ranks(lambda comm: pc.mesh(pp=2, tp=2).sizes, 1) == [dict.fromkeys(AXES, 1)]


def test_devices_that_are_not_there_are_refused_on_all_ranks(monkeypatch):
    monkeypatch.setenv("PYCOLL_DEVICE_LIBRARY", "/nowhere/library.so")

    def work(comm):
        texts = []
        for device in ("cuda", "meta", "no", 5.0):
            with pytest.raises(UsageError) as raised:
                pc.mesh(comm=comm, device=device if comm.rank else "cpu")
            texts.append(str(raised.value))
        assert str(pc.mesh(comm=comm, device="cpu").device) == "cpu"
        return texts

    first, second = run_ranks(work, 2)
    assert first == second
    assert "needs pycoll's device library: cannot open /nowhere" in first[0]
    for text in first[1:]:
        assert "expected 'cpu' or 'cuda' (on rank 1)" in text and "\n" not in text
