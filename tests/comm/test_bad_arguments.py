"""Bad arguments: each raises UsageError with a short text, and the ranks go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from odd_values import MAX_TEXT, arrays
from worlds import Comm, on_ranks

import pycoll
from pycoll import UsageError, _core, topology

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(60)]

COUNT = 1 << 18


def calls(comm: Comm) -> dict[str, Callable[[], Any]]:
    x = np.ones(4)
    work = comm.all_reduce(np.ones(4), async_op=True)
    work.wait()

    def set_register_after(value: Any) -> Callable[[], None]:
        return lambda: setattr(comm, "register_after", value)

    def set_timeout(value: Any) -> Callable[[], None]:
        return lambda: setattr(comm, "timeout_s", value)

    found: dict[str, Callable[[], Any]] = {
        "op with a surrogate": lambda: comm.all_reduce(x, "\ud800"),
        "op of a megabyte": lambda: comm.all_reduce(x, "s" * (1 << 20)),
        "op 5": lambda: comm.all_reduce(x, 5),
        "algorithm of a megabyte": lambda: comm.all_reduce(x, algorithm="s" * (1 << 20)),
        "algorithm with a surrogate": lambda: comm.all_reduce(x, algorithm="\udfff"),
        "keyword of a megabyte": lambda: comm.all_reduce(x, **{"k" * (1 << 20): 1}),
        "keyword with a surrogate": lambda: comm.all_reduce(x, **{"\ud800": 1}),
        "counts of a megabyte": lambda: comm.all_gather(x, counts=["n" * (1 << 20)] * 2),
        "counts of many": lambda: comm.all_gather(x, counts=list(range(1 << 20))),
        "counts 3": lambda: comm.all_gather(x, counts=3),
        "root text": lambda: comm.broadcast(x, root="0" * (1 << 20)),
        "peer text": lambda: comm.send(x, "1"),
        "tag text": lambda: comm.send(x, 0, "t" * (1 << 20)),
        "group 5": lambda: comm.group(5),
        "group of text": lambda: comm.group("ab"),
        "group of floats": lambda: comm.group([0.0, 1.0]),
        "group of many": lambda: comm.group(range(1 << 20)),
        "explain a surrogate": lambda: comm.explain("\ud800", 5),
        "explain 5": lambda: comm.explain(5, 5),
        "explain text bytes": lambda: comm.explain("all_reduce", "5"),
        "explain at another root": lambda: comm.explain("broadcast", 5, root=9),
    }
    for value in (1.5, "3", object(), None, [1.5], ["a"], [None], [[1]], 1 << 80, [1 << 40] * 4, -1,
                  [-1], [1] * 100, "ab", {"a": 1}):  # fmt: skip
        found[f"empty {value!r:.30}"] = lambda value=value: comm.empty(value, "f32")
    for dtype in (object, "O", "f99", 7.5, "\ud800", b"\xff", [("a", "O")], "S0", "x" * (1 << 20)):
        found[f"empty of {dtype!r:.30}"] = lambda dtype=dtype: comm.empty(3, dtype)
    for value in ("x", 1.5, None, -1, 1 << 40, 1 << 70, "n" * (1 << 20)):
        found[f"register_after {value!r:.30}"] = set_register_after(value)
    for value in ("5", float("nan"), [], object(), b"5"):
        found[f"wait {value!r:.30}"] = lambda value=value: work.wait(value)
        found[f"grow {value!r:.30}"] = lambda value=value: comm.grow(1, "127.0.0.1:1", value)
        found[f"join {value!r:.30}"] = lambda value=value: pycoll.join("127.0.0.1:1", value)
        found[f"init {value!r:.30}"] = lambda value=value: pycoll.init(value)
        found[f"run_ranks {value!r:.30}"] = lambda value=value: pycoll.run_ranks(
            len, 1, timeout_s=value
        )
    for value in (0, -1, -float("inf"), float("nan"), "5", None):
        found[f"timeout_s {value!r}"] = set_timeout(value)
    for value in (0, -1, -float("inf")):
        found[f"init {value}"] = lambda value=value: pycoll.init(value)
    for value in ("1", 0, 1.5, 1 << 70, None):
        found[f"grow by {value!r}"] = lambda value=value: comm.grow(value, "127.0.0.1:1", 1)
    for value in (5, None, b"127.0.0.1:1", "127.0.0.1:" + "9" * (1 << 20)):
        found[f"grow at {value!r:.30}"] = lambda value=value: comm.grow(1, value, 1)
    for value in (1 << 31, 1 << 70, 1.5, "8"):
        found[f"topology {value!r}"] = lambda value=value: topology.uniform(
            value, latency_s=1e-6, link_bytes_per_s=1e9
        )
    for name, array in arrays().items():
        found[f"all_reduce of {name}"] = lambda array=array: comm.all_reduce(array)
        found[f"send of {name}"] = lambda array=array: comm.send(array, 0)
        found[f"register {name}"] = lambda array=array: comm.register(array)
    return found


@on_ranks(processes=[1], threads=[2])
def test_bad_argument_raises_usage_error_with_a_short_text(comm):
    wrong = []
    for name, call in calls(comm).items():
        try:
            wrong.append(f"{name}: returned {call()!r:.60}")
        except UsageError as error:
            if len(str(error)) > MAX_TEXT:
                wrong.append(f"{name}: a text of {len(str(error))} characters: {str(error)[:80]}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:80]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(calls(comm))}:", *wrong])
    comm.barrier()


@on_ranks(processes=[2])
def test_wait_with_a_bad_timeout_leaves_the_operation_and_the_communicator_alone(comm):
    x = np.ones(COUNT)
    work = comm.all_reduce(x, async_op=True)
    for wrong in (float("nan"), "5", None.__class__):
        with pytest.raises(UsageError, match="timeout_s is .*, expected a number of seconds"):
            work.wait(wrong)
    assert work.wait(30)[0] == 2
    assert comm.all_reduce(np.ones(1))[0] == 2


@on_ranks(processes=[2])
def test_counts_that_change_while_they_are_read_are_those_of_the_start(comm):
    """An item's `__index__` may run any code."""

    class Shrinking:
        def __init__(self, counts: list[Any]) -> None:
            self.counts = counts

        def __index__(self) -> int:
            self.counts.clear()
            return 1

    for _ in range(20):
        counts: list[Any] = []
        counts.extend([Shrinking(counts), 1])
        assert comm.all_gather(np.array([comm.rank]), counts=counts).tolist() == [0, 1]
        assert counts == []


@on_ranks(threads=[1])
def test_communicator_without_init_raises_usage_error(comm):
    methods = [name for name in dir(_core.Communicator) if not name.startswith("__")]
    assert len(methods) > 30
    raw = comm.split(0)
    taken = pycoll.Communicator(raw)  # takes the core communicator from `raw`
    empties = [
        pycoll.Communicator.__new__(pycoll.Communicator),
        _core.Communicator.__new__(_core.Communicator),
        raw,
    ]
    wrong = []
    arguments: list[tuple[Any, ...]] = [
        (), (1,), (0, 0), (1, 2, 3), (np.ones(3),), (np.ones(3), 0),
        ("all_reduce", 8, 0, False, False),
    ]  # fmt: skip
    for empty in empties:
        for name in methods:
            for args in arguments:
                try:
                    value = getattr(empty, name)
                    if not callable(value):
                        break
                    value(*args)
                except (UsageError, TypeError, AttributeError):
                    continue
                except Exception as error:
                    wrong.append(f"{name}{args}: {type(error).__name__}: {error}")
    assert not wrong, wrong
    with pytest.raises(UsageError, match="was never initialised"):
        empties[0].all_reduce(np.ones(3))
    with pytest.raises(UsageError, match="was never initialised"):
        empties[1].rank  # noqa: B018
    taken.close()


def test_environment_that_is_no_utf8_is_named():
    program = "import pycoll; pycoll.init(timeout_s=1)"
    names = [row["name"] for row in _core.bootstrap.environment_table()]
    assert len(names) > 10
    # One process for all names: each is wrong once.
    loop = (
        "import os, pycoll\n"
        "for name in os.environ['NAMES'].split():\n"
        "    os.environb[name.encode()] = b'a\\xffb'\n"
        "    try:\n"
        "        pycoll.init(timeout_s=1)\n"
        "        print(name, 'was accepted')\n"
        "    except pycoll.UsageError as error:\n"
        "        if name not in str(error): print(name, error)\n"
        "    except BaseException as error:\n"
        "        print(name, type(error).__name__, error)\n"
        "    del os.environ[name]\n"
    )
    environment = {**os.environ, "NAMES": " ".join(names)}
    done = subprocess.run(
        [sys.executable, "-c", loop], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("", "")
    for name in ("MASTER_ADDR", "RANK"):
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        variables["MASTER_PORT"] = "1"
        raw = {key.encode(): value.encode() for key, value in (os.environ | variables).items()}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=raw | {name.encode(): b"\xff\xfe"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "UnicodeDecodeError" not in done.stderr, done.stderr
        assert "pycoll.errors." in done.stderr.splitlines()[-1], done.stderr
