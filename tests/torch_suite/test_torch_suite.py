"""torch's own tests of process groups and DistributedDataParallel pass with pycoll.

Every test that passes with Gloo must, and those that Gloo fails and pycoll passed once; the table
outcomes.jsonl says which. `record_outcomes.py` writes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # torch's tests import it

import tables  # noqa: E402
from suite_client import WORLD_SIZES, Row, Server, in_a_word, read_table  # noqa: E402
from suite_server import VIEWS  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ranks]

HEAD, ROWS = read_table()
BACKEND = os.environ.get("PYCOLL_TEST_BACKEND", "pycoll")
# At two ranks the tests that torch runs for Gloo where there is no GPU, but for those that wait.
QUICK_WORLD_SIZE = 2


def is_quick(row: Row, world_size: int) -> bool:
    return world_size == QUICK_WORLD_SIZE and row.view == "gloo" and not row.long


CASES = [
    pytest.param(
        (row.view, world_size),
        row.test,
        id=f"{world_size}-{row.view}-{row.test}".replace(" ", "-"),
        marks=() if is_quick(row, world_size) else pytest.mark.slow,
    )
    for world_size in WORLD_SIZES
    for view in VIEWS
    for row in ROWS
    if row.view == view and (row.passes("gloo", world_size) or row.passes("pycoll", world_size))
]


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, int], Server]]:
    """One for each view and world size while its tests run: the next one ends the last."""
    running: dict[tuple[str, int], Server] = {}
    yield running
    for server in running.values():
        server.close()


def asked(servers: dict, key: tuple[str, int], request: pytest.FixtureRequest) -> Server:
    """With all its tests of this session asked for, so that several run at a time."""
    if key not in servers:
        for other in list(servers):
            servers.pop(other).close()
        servers[key] = Server(BACKEND, *key)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            cases = [getattr(item, "callspec", None) for item in request.session.items]
            params = [case.params for case in cases if case is not None]
            servers[key].ask(p["name"] for p in params if p.get("key") == key and "name" in p)
    if "PYTEST_XDIST_WORKER" in os.environ:
        servers[key].ask([request.node.callspec.params["name"]])
    return servers[key]


@pytest.mark.timeout(300)  # the server ends a test after 240 s
@pytest.mark.parametrize(("key", "name"), CASES)
def test_of_torch_passes(key, name, servers, request):
    if torch.__version__.partition("+")[0] != HEAD["torch"].partition("+")[0]:
        pytest.skip(f"the table is of torch {HEAD['torch']}, this is {torch.__version__}")
    outcome = asked(servers, key, request).outcome(name)
    assert outcome.outcome == "pass", f"{in_a_word(outcome)}\n{outcome.reason}\n{outcome.log}"


def test_server_that_is_told_to_end_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = Server("gloo", "gloo", 2)
    server.ask(["test_get_rank", "test_barrier_timeout_global"])
    assert server.outcome("test_get_rank").outcome == "pass"
    assert list(tmp_path.iterdir())
    server.close()
    assert not list(tmp_path.iterdir())


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_features_of_the_document_are_what_pycoll_does():
    import features

    environment = {**os.environ, "PYCOLL_TEST_BACKEND": "pycoll"}
    command = [sys.executable, features.__file__, "probe"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    recorded = json.loads(features.RESULTS.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == recorded["pycoll"]
