"""Odd arguments of every public method: one short UsageError, or a call that works.

Ranks are processes (odd seeds) or threads (even seeds). Each call has a communicator of its own,
which must work afterwards, unless the call raised an error that breaks it or was to break it; the
communicator of all must always work. An object's own exception may come through.
"""

from __future__ import annotations

import faulthandler
import functools
import random
import re
import time

import numpy as np
import odd_calls
from isolated import Notes, run_isolated
from odd_values import MAX_TEXT, OddError

import pycoll
from injections import Outcome

CASES = 100
FEW = (1, 2, 3, 4)
CALLS = 28  # of a case
RANKS = 2
TIMEOUT_S = 10.0
DEADLINE_S = 60.0
LATE_S = 0.5  # after this a rank that was refused ends the others' wait

# What Python says of a function's parameters, before the function runs.
SIGNATURE = re.compile(r"positional argument|unexpected keyword|multiple values for|keywords must")


def outcome_of(call: odd_calls.OddCall) -> tuple[str, str]:
    """What the call did, "returned" or "refused" or "raised", and what is wrong with that."""
    try:
        call.run()
    except OddError:
        return "refused", ""
    except pycoll.Error as error:
        wrong = ""
        if len(str(error)) > MAX_TEXT:
            wrong = f"a text of {len(str(error))} characters: {str(error)[:80]}"
        if isinstance(error, pycoll.UsageError):
            return "refused", wrong
        if isinstance(error, (*call.method.may_raise, pycoll.AbortedError)):
            return "raised", wrong
        return "raised", f"{type(error).__name__}: {str(error)[:200]}"
    except TypeError as error:
        if SIGNATURE.search(str(error)):
            return "refused", ""
        return "refused", f"TypeError: {str(error)[:200]}"
    except BaseException as error:
        return "refused", f"{type(error).__name__}: {str(error)[:200]}"
    return "returned", ""


def works(comm: pycoll.Communicator) -> str:
    expected = comm.size * (comm.size + 1) / 2
    try:
        total = comm.all_reduce(np.full(5, comm.rank + 1.0))
    except pycoll.Error as error:
        return f"the next call raised {type(error).__name__}: {str(error)[:200]}"
    return "" if (total == expected).all() else f"the next call returned {total}"


def make_calls(world: pycoll.Communicator, seed: int, notes: Notes) -> list[str]:
    """Returns what is wrong."""
    if seed % 2:
        odd_calls.leave_the_job()
    wrong = []
    faulthandler.dump_traceback_later(DEADLINE_S - 5, exit=False)
    for idx in range(CALLS):
        with world.split(0) as part:
            call = odd_calls.draw(random.Random(f"{seed} {idx}"), part)
            notes.set(world.rank, f"rank {world.rank}, call {idx}: {call.text}")
            kind, complaint = outcome_of(call)
            notes.num_done[world.rank] = idx + 1
            late_s = time.monotonic() + LATE_S
            while (
                kind != "returned" and (notes.num_done <= idx).any() and time.monotonic() < late_s
            ):
                time.sleep(0.0005)
            aborts = kind != "returned" and bool((notes.num_done <= idx).any()) and not part.closed
            if aborts:
                part.abort("this rank's call was refused")
            kind_idx = ["returned", "refused", "raised"].index(kind)
            kinds, aborted = world.all_gather(np.array([[kind_idx, aborts]])).T
            # The same calls on all ranks, whatever one of them complains of. A rank may have
            # aborted although the other one was only slow.
            is_whole = not call.method.breaks and not aborted.any()
            if is_whole and kinds.max() == kinds.min() < 2:
                of_part = works(part)
                complaint = complaint or of_part
            of_world = works(world)
            complaint = complaint or of_world
            if complaint:
                wrong.append(f"call {idx}: {call.text}: {complaint}")
    return wrong


def run_case(seed: int) -> Outcome:
    notes = Notes(RANKS)
    run = functools.partial(
        pycoll.run_ranks,
        make_calls,
        RANKS,
        seed,
        notes,
        threads=seed % 2 == 0,
        timeout_s=TIMEOUT_S,
    )
    wrong, crash = run_isolated(run, DEADLINE_S)
    if crash:
        return Outcome(f"{crash[-300:]} ({notes})")
    found = sorted({text for rank in wrong for text in rank})
    return Outcome("\n    ".join(found), label="processes" if seed % 2 else "threads")
