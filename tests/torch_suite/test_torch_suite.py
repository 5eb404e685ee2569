"""torch's own tests of process groups and DistributedDataParallel pass with pycoll.

Every test that passes with Gloo must, and those that Gloo fails and pycoll passed once; the table
outcomes.jsonl says which. `record_outcomes.py` writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # torch's tests import it

import tables  # noqa: E402
from suite_client import WORLD_SIZES, Row, Server, in_a_word, read_table  # noqa: E402
from suite_server import VIEWS  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

HEAD, ROWS = read_table()
BACKEND = os.environ.get("PYCOLL_TEST_BACKEND", "pycoll")
QUICK = ("gloo", 2)  # view and number of ranks that run in less than a minute
SLOW_WORLD_SIZE = 4  # every test that passes anywhere passes there

of_this_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != HEAD["torch"].partition("+")[0],
    reason=f"the table is of torch {HEAD['torch']}, this is {torch.__version__}",
)


def is_quick(row: Row, world_size: int) -> bool:
    """Tests that torch runs for Gloo where there is no GPU, but for those that wait."""
    return (row.view, world_size) == QUICK and not row.long


def names_of(view: str, world_size: int, quick: bool = False) -> list[str]:
    """Tests that must pass, the long ones first, so that they do not run alone at the end."""
    rows = [
        row
        for row in ROWS
        if row.view == view and is_quick(row, world_size) == quick
        if row.passes("gloo", world_size) or row.passes("pycoll", world_size)
    ]
    return [row.test for row in sorted(rows, key=lambda row: not row.long)]


def check_all_pass(server: Server, names: list[str]) -> None:
    server.ask(names)
    outcomes = [server.outcome(name) for name in names]
    failures = [x for x in outcomes if x.outcome != "pass"]
    texts = [f"{x.name}: {in_a_word(x)}\n{x.reason}\n{x.log}" for x in failures]
    assert not failures, f"{len(failures)} of {len(names)} do not pass\n\n" + "\n".join(texts)


@pytest.fixture(scope="module")
def quick_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server, since its start takes seconds, and the folder of its temporary files."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        server = Server(BACKEND, *QUICK)
    yield server, folder
    server.close()


@of_this_torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tests_that_torch_runs_for_gloo_pass_on_two_ranks(quick_server):
    check_all_pass(quick_server[0], names_of(*QUICK, quick=True))


@pytest.mark.slow
def test_server_that_is_told_to_end_leaves_no_file(quick_server):
    server, folder = quick_server
    server.ask(["test_get_rank", "test_barrier_timeout_global"])
    assert server.outcome("test_get_rank").outcome == "pass"
    assert list(folder.iterdir())
    server.close()
    assert not list(folder.iterdir())


@of_this_torch
@pytest.mark.timeout(1800)  # the server ends a test after 240 s
@pytest.mark.parametrize(
    ("world_size", "view"),
    [
        # The same tests as the view "gloo" has, but for devices.
        pytest.param(
            n,
            view,
            marks=pytest.mark.slow
            if n == SLOW_WORLD_SIZE and view != "gloo on GPUs"
            else pytest.mark.soak,
        )
        for n in WORLD_SIZES
        for view in VIEWS
    ],
)
def test_tests_of_a_view_pass(world_size, view):
    server = Server(BACKEND, view, world_size)
    try:
        check_all_pass(server, names_of(view, world_size))
    finally:
        server.close()


@pytest.mark.pure
def test_slow_tier_has_every_test_that_passes_somewhere():
    for view in VIEWS:
        slow = {*names_of(view, SLOW_WORLD_SIZE)}
        for n in WORLD_SIZES:
            left_out = {*names_of(view, n), *names_of(view, n, quick=True)} - slow
            assert not left_out, (view, n, left_out)


@pytest.mark.pure
def test_table_holds_each_test_once_and_says_why_what_fails():
    assert len({row.test for row in ROWS}) == len(ROWS) > 200
    for row in ROWS:
        assert row.view in VIEWS
        for outcomes in row.outcomes.values():
            assert outcomes.keys() == {str(n) for n in WORLD_SIZES}
            for word in outcomes.values():
                assert word == "pass" or word.startswith(("skip: ", "fail: ")), word


@pytest.mark.pure
def test_pycoll_passes_all_that_gloo_passes_in_the_table():
    for row in ROWS:
        for n in WORLD_SIZES:
            assert row.passes("pycoll", n) or not row.passes("gloo", n), (row.test, n)


@pytest.mark.pure
def test_tables_of_the_document_are_what_was_recorded():
    """PYCOLL_UPDATE_GOLDEN=1 writes them anew, so that a change is read in the diff."""
    text = tables.DOCUMENT.read_text()
    expected = tables.filled(text, tables.tables(HEAD, ROWS))
    if os.environ.get("PYCOLL_UPDATE_GOLDEN"):
        tables.DOCUMENT.write_text(expected)
    assert tables.DOCUMENT.read_text() == expected


@of_this_torch
@pytest.mark.slow
def test_features_of_the_document_are_what_pycoll_does():
    import features

    found = features.probe_all()
    recorded = json.loads(features.RESULTS.read_text())[BACKEND]
    for part, words in recorded.items():
        assert words.keys() == found[part].keys()
        wrong = {name: found[part][name] for name in words if found[part][name] != words[name]}
        assert not wrong, f"{wrong}, recorded: {[words[name] for name in wrong]}"
