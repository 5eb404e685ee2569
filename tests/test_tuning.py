"""The measured table: its text, its file, and its use."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from tuning_tables import CORES, DATE, as_rows, cache, choice, cost, explained, invoke, size

import pycoll
from pycoll import SystemError, UsageError, _core, run_ranks, tuning

__all__ = ["cache"]  # a fixture


# The text.


@pytest.mark.pure
def test_table_to_text_and_back_is_the_same():
    sizes = [
        size(ring__simple=1.25e-5, one_shot__ll=3e-7),
        size("broadcast", 8, 3, "plain", 1 << 40, x__y=9),
    ]
    table = _core.TuningTable([cost(), cost("ll", 4, arrays="plain")], sizes)
    again = _core.TuningTable.parse(table.to_text())
    assert as_rows(again) == as_rows(table)
    assert again.to_text() == table.to_text()
    assert (again.version, again.machine) == (pycoll.__version__, _core.machine_fingerprint())


@pytest.mark.pure
def test_table_cut_off_anywhere_is_refused():
    text = _core.TuningTable([cost()], [size(ring__simple=1e-5)]).to_text()
    for length in range(len(text)):
        with pytest.raises(UsageError, match="line [0-9]+: "):
            _core.TuningTable.parse(text[:length])


@pytest.mark.pure
def test_table_with_any_byte_changed_is_refused():
    text = _core.TuningTable([cost()], [size(ring__simple=1e-5, tree__ll=2e-5)]).to_text()
    for at in range(len(text)):
        for new in ("#", "7", " ", "\n"):
            if text[at] != new:
                with pytest.raises(UsageError, match="line [0-9]+: "):
                    _core.TuningTable.parse(text[:at] + new + text[at + 1 :])


TIME, COST = "2 2 plain 4096 2026-11-21T14:30:00Z", "2 2 mapped 2026-11-21T14:30:00Z simple"
WRONG_LINES = [
    f"time all_reduce {TIME}",
    *(f"time all_reduce {TIME} {field}" for field in (
        "ring/simple", "ring=1e-5", "ring/simple/x=1e-5", "ring/simple=nan", "ring/simple=-1e-5",
        "ring/simple=0", "ring/simple=1e-5 ", " ring/simple=1e-5",
    )),
    *(f"time all_reduce {head} ring/simple=1e-5" for head in (
        "2 2 plain 4096 yesterday", TIME.replace("2 2", "0 2"), TIME.replace("2 2", "2 -2"),
        TIME.replace("4096", "99999999999999999999"), TIME.replace("plain ", ""),
        TIME.replace("plain", "both"),
    )),
    f"time All-Reduce {TIME} ring/simple=1e-5",
    *(f"cost {COST} {numbers}" for numbers in ("1 2", "1 2 inf", "1 2 3 4")),
    "cost 2 2 2026-11-21T14:30:00Z simple 1 2 3", "size 2", "",
]  # fmt: skip


@pytest.mark.pure
def test_lines_that_are_wrong_are_refused_and_named():
    """A line is refused before the digest is compared."""
    head = _core.TuningTable([], []).to_text().rpartition("end ")[0]
    for line in WRONG_LINES:
        with pytest.raises(UsageError, match="line 4: "):
            _core.TuningTable.parse(f"{head}{line}\nend 0123456789abcdef\n")
            pytest.fail(f"taken: {line!r}")


@pytest.mark.pure
def test_core_and_package_are_of_one_version():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{pycoll.__version__}"' in project
    assert _core.TuningTable([], []).version == pycoll.__version__


# The file.


@pytest.mark.pure
def test_saved_rows_are_loaded_again_and_replace_older_ones(cache):
    assert tuning.load()[1].startswith("none, ")
    file = tuning.save([cost()], [size(ring__simple=1e-5), size(nbytes=64, tree__ll=1e-6)])
    assert file.parent == cache
    tuning.save([cost(alpha=2e-6)], [size(star__simple=1e-7)])
    table, note = tuning.load()
    assert note == str(file)
    assert [c.alpha_s for c in table.costs] == [2e-6]
    assert [(s.nbytes, list(s.times)) for s in table.sizes] == [
        (64, ["tree/ll"]),
        (4096, ["star/simple"]),
    ]
    assert not list(cache.glob("*.??????*.tmp")) and len(list(cache.iterdir())) == 2  # and a lock


def _save_from_a_process(number: int) -> None:
    for turn in range(5):
        tuning.save(
            [], [size(ranks=2 + number, nbytes=4 << turn, ring__simple=1e-5 * (1 + number))]
        )


@pytest.mark.pure
def test_eight_processes_that_save_at_once_lose_nothing():
    processes = [
        multiprocessing.get_context("fork").Process(target=_save_from_a_process, args=(number,))
        for number in range(8)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    table, _ = tuning.load()
    expected = [(2 + number, 4 << turn) for number in range(8) for turn in range(5)]
    assert [(s.num_ranks, s.nbytes) for s in table.sizes] == expected


@pytest.mark.pure
def test_folder_that_cannot_be_made_is_an_error_of_save(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(SystemError, match="cannot write the table"):
        tuning.save([], [size(ring__simple=1e-5)])


@pytest.mark.pure
def test_table_is_kept_where_the_environment_says(tmp_path, monkeypatch):
    name = tuning.path().name
    monkeypatch.delenv("PYCOLL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning.path() == tmp_path / "xdg" / "pycoll" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning.path() == tmp_path / "home" / ".cache" / "pycoll" / name
    monkeypatch.delenv("HOME")
    with pytest.raises(UsageError, match="PYCOLL_CACHE_DIR"):
        tuning.path()


# Its use.


@pytest.mark.ranks
def test_fastest_of_the_table_is_chosen_and_explained(cache):
    tuning.save([], [size(star__simple=2e-6, tree__ll=1e-6, ring__simple=3e-6)])
    text = explained()
    assert choice() == "tree/ll"
    assert f"chosen by the measurement of {DATE} at 4 KiB" in text
    assert f"table: {tuning.path()}" in text
    assert [line.split()[-2:] for line in text.splitlines() if line.startswith("    tree ")] != []
    assert "1 us" in next(line for line in text.splitlines() if line.split()[:2] == ["tree", "ll"])


@pytest.mark.ranks
def test_rule_beats_the_table_and_may_lean_on_it(monkeypatch):
    tuning.save([], [size(star__simple=2e-6, star__ll=3e-6, tree__ll=1e-6)])
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:ring/simple")
    assert choice() == "ring/simple"
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:star")
    assert choice() == "star/simple"
    assert f"the rest by the measurement of {DATE}" in explained()
    monkeypatch.setenv("PYCOLL_ALGO", "all_reduce:auto/simple")
    assert choice() == "star/simple"


@pytest.mark.ranks
def test_between_two_measured_sizes_the_nearer_one_counts_more():
    slow_start = {"tree__ll": 1e-6, "star__simple": 8e-6}
    slow_end = {"tree__ll": 8e-6, "star__simple": 1e-6}
    tuning.save([], [size(nbytes=1024, **slow_start), size(nbytes=1 << 16, **slow_end)])
    wanted = {4: "tree/ll", 1024: "tree/ll", 2048: "tree/ll", 4096: "tree/ll"}
    wanted |= {1 << 14: "star/simple", 1 << 16: "star/simple", 1 << 30: "star/simple"}
    assert {nbytes: choice(nbytes=nbytes) for nbytes in wanted} == wanted


@pytest.mark.ranks
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) > 4, reason="with so many cores, 8 ranks do not share each one"
)
def test_large_broadcasts_of_ranks_that_share_cores_use_slots():
    """The root's array is then read from memory once, and not by each rank."""
    found = [
        choice(n=8, nbytes=mib << 20, collective="broadcast", mapped=True, threads=False)
        for mib in (2, 4)
    ]
    assert found == ["star/direct", "star/simple"]


@pytest.mark.ranks
def test_mapped_and_plain_arrays_have_rows_of_their_own():
    nbytes = 1 << 20
    rows = {
        "plain": {"tree__simple": 1e-6, "two_shot__direct": 2e-6},
        "mapped": {"tree__simple": 2e-6, "two_shot__direct": 1e-6},
    }
    tuning.save([], [size(nbytes=nbytes, arrays=arrays, **row) for arrays, row in rows.items()])
    asked = {"nbytes": nbytes, "threads": False}
    assert choice(**asked) == "tree/simple"
    assert choice(**asked, mapped=True) == "two_shot/direct"
    text = explained(**asked)
    assert "all ranks are mapped (comm.empty()): two_shot/direct, by the measurement" in text
    assert "else: tree/simple, through slots" in text
    assert choice(nbytes=nbytes) == "two_shot/direct"  # threads


@pytest.mark.ranks
def test_table_decides_what_runs_on_plain_and_on_mapped_arrays():
    plain = {"two_shot__direct": 1e-6, "tree__simple": 2e-6}
    mapped = {"one_shot__direct": 1e-6, "star__simple": 2e-6}
    nbytes = 1 << 16
    tuning.save([], [size(nbytes=nbytes, arrays="plain", **plain), size(nbytes=nbytes, **mapped)])

    def work(comm: pycoll.Communicator) -> list[str]:
        ran = []

        def run(x, out=None):
            comm.all_reduce(x, out=out)
            ran.append(comm.flight_record()[-1]["algorithm"])

        own = [np.ones(nbytes // 4, np.float32) for _ in range(2)]
        shared = [comm.empty(nbytes // 4, np.float32) for _ in range(2)]
        run(*own)
        run(*shared)
        run(shared[0])  # in place: not by one_shot, whose inputs must last
        run(own[0], shared[0])
        return ran

    # Processes may be kept from reading each other's memory.
    plainly = "two_shot/direct" if _reads_processes() else "tree/simple"
    for ran in run_ranks(work, 2):
        assert ran == [plainly, "one_shot/direct", "star/simple", "tree/simple"]


def _reads_processes() -> bool:
    def work(comm: pycoll.Communicator) -> bool:
        x = np.ones(1 << 14, np.float32)
        try:
            comm.all_reduce(x, out=np.ones_like(x), algorithm="two_shot/direct")
        except UsageError:
            return False
        return True

    return all(run_ranks(work, 2))


@pytest.mark.ranks
def test_table_of_other_ranks_collectives_or_cores_is_not_used():
    untouched = choice()
    other = "tree__ll" if untouched != "tree/ll" else "star__ll"
    tuning.save(
        [],
        [
            size(ranks=3, **{other: 1e-9}),
            size("broadcast", **{other: 1e-9}),
            size(cores=CORES + 1, **{other: 1e-9}),
        ],
    )
    assert choice() == untouched
    assert choice(n=3) == other.replace("__", "/")


@pytest.mark.ranks
def test_names_that_this_build_lacks_and_slow_textbook_algorithms_are_not_chosen():
    tuning.save(
        [], [size(unheard_of__simple=1e-9, ring__lll=1e-9, ring_naive__ll=1e-9, tree__ll=1)]
    )
    assert choice() == "tree/ll"


@pytest.mark.ranks
def test_fitted_costs_of_the_table_are_those_of_the_simulation():
    tuning.save([cost("simple", alpha=5e-4), cost("direct", alpha=5e-4)], [])
    text = explained()
    assert f"fitted, simple of mapped arrays on {DATE} with 2 ranks" in text
    assert text.splitlines()[0].rpartition(": ")[2].startswith("one_shot/ll")
    # Other numbers of ranks take the costs of the nearest one that also shares cores, or does not.
    assert ("simulation: fitted" in explained(n=3)) == (CORES >= 3)


def _damage(how: str) -> str:
    """Spoils this machine's table; returns what is said of it."""
    file = tuning.save([], [size(tree__ll=1e-9)])
    text = file.read_text()
    if how == "torn":
        file.write_text(text[: len(text) // 2])
        return "is damaged, line "
    if how == "changed":
        file.write_text(text.replace("tree/ll", "star/ll"))
        return "the digest does not match the lines before"
    if how == "noise":
        file.write_bytes(bytes(range(256)) * 64)
        return "is damaged, line 1: expected 'pycoll-tuning 2'"
    if how == "empty":
        file.write_bytes(b"")
        return "is damaged, line 1: "
    if how == "huge":
        file.write_bytes(b"#" * (2 << 20))
        return "is longer than"
    if how == "folder":
        file.unlink()
        file.mkdir()
        return "cannot read"
    if how == "pipe":
        file.unlink()
        os.mkfifo(file)
        return "cannot read"
    old, new = {
        "stale": ("pycoll 0.1.0", "pycoll 0.0.9"),
        "foreign": ("machine ", "machine VAX-11 "),
        "other format": ("pycoll-tuning 2", "pycoll-tuning 1"),
    }[how]
    body = text.replace(old, new, 1).rpartition("end ")[0]
    file.write_text(f"{body}end {_digest(body)}\n")
    return {
        "stale": "is of pycoll 0.0.9, this is",
        "foreign": "was measured on another machine (VAX-11 ",
        "other format": "is damaged, line 1: expected 'pycoll-tuning 2'",
    }[how]


def _digest(body: str) -> str:
    value = 1469598103934665603
    for byte in body.encode():
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return f"{value:016x}"


DAMAGES = ["torn", "changed", "noise", "empty", "huge", "folder", "pipe"]
DAMAGES += ["stale", "foreign", "other format"]


@pytest.mark.ranks
def test_table_that_cannot_be_used_is_ignored_with_the_reason(tmp_path, monkeypatch):
    untouched = choice()
    assert untouched != "tree/ll"
    for how in DAMAGES:
        monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path / how))
        said = _damage(how)
        text = explained()
        assert choice() == untouched, how
        assert "table: ignored, " in text and said in text, (how, text)
        result = invoke("info")
        assert result.exit_code == 0 and said in result.stdout, how
        if how not in ("folder", "pipe"):
            tuning.save([], [size(tree__ll=1e-9)])  # it is replaced by the next one
            assert choice() == "tree/ll", how


@pytest.mark.ranks
def test_table_of_rank_0_counts_for_all_ranks_and_splits(tmp_path, monkeypatch):
    original = pycoll.init

    def init(**options):
        os.environ["PYCOLL_CACHE_DIR"] = str(tmp_path / f"of rank {os.environ['RANK']}")
        algorithm = ["tree__ll", "star__simple", "ring__simple"][int(os.environ["RANK"])]
        rows = [size(ranks=n, arrays="plain", **{algorithm: 1e-9}) for n in (2, 3)]
        tuning.save([], rows)
        return original(**options)

    monkeypatch.setattr(pycoll, "init", init)

    def work(comm: pycoll.Communicator) -> list[str]:
        x = np.ones(16)
        comm.all_reduce(x)
        part = comm.split(0 if comm.rank else 1)
        part.all_reduce(x)
        return [c.explain("all_reduce", 4096).splitlines()[0] for c in (comm, part)]

    for rank, (whole, part) in enumerate(run_ranks(work, 3, timeout_s=20)):
        assert ": tree/ll over" in whole
        assert rank == 0 or ": tree/ll over" in part


@pytest.mark.ranks
def test_ranks_that_are_pinned_apart_count_all_their_cores():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    original = pycoll.init

    def init(**options):
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]})
        return original(**options)

    def work(comm: pycoll.Communicator) -> str:
        return comm.explain("all_reduce", 4096)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pycoll, "init", init)
        pinned = run_ranks(work, 2)
    assert pinned == run_ranks(work, 2)
