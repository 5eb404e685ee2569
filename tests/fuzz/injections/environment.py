"""Odd values of every environment variable: the job works, or each rank's error has its name.

Each case sets one variable of the table (decision 0042), or one of a launcher, on both ranks of a
world, which makes an all_reduce and is then aborted. Odd values that are right for another reason
(a rank that exists, an address that answers) count as a job that works.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from isolated import run_isolated
from odd_values import MAX_TEXT

import pycoll
from injections import Outcome
from pycoll import environment

CASES = 1200
FEW = (1, 2, 3, 4, 5, 6, 7, 8)
RANKS = 2
TIMEOUT_S = 5.0
DEADLINE_S = 60.0

SRUN = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
MPIEXEC = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2"}
# Variables of launchers, and those that stand beside them in place of RANK and WORLD_SIZE.
LAUNCHERS: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), {}),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES"), SRUN),
    **dict.fromkeys((*MPIEXEC, "OMPI_COMM_WORLD_LOCAL_SIZE"), MPIEXEC),
}
# Variables without which another one is not read.
NEEDS = {"PYCOLL_OPENSSL": {"PYCOLL_TLS": "1"}, "PYCOLL_MPI": {"PYCOLL_TRANSPORT": "mpi"}}
VALUES: tuple[str | bytes, ...] = (
    "", " ", "0", "1", "-1", "2", "3", "01", "+1", "1 ", " 1", "1.5", "1e3", "0x10", "nan", "inf",
    "-inf", "1e999", "9" * 30, "yes", "on", "TRUE", "x", "\x1b[31mred\x1b[0m\n", "\t\r\n", "𝒳",
    "\u202e", b"\xff\xfe", b"a\xffb", b"\xed\xa0\x80", "a" * (1 << 20), "../..", "/nonexistent",
    "/dev/null", "/proc/self/mem", "/", "all_reduce:ring", "all_reduce:ring:0-64k,x", ":::", "%n%s",
    "1-2", "65535-65536", "0-0", "20-10", "lo", "eth9", "^lo", "::1", "[::1]:1", "none", "mpi",
    "tcp", "generic", "avx512", "device", "KILL", "SIGKILL", "USR1", "64", "-9", "libc.so.6", "{}",
    "dp=2", "dp=-1,tp=x", "= =", "$(id)", "host.invalid",
)  # fmt: skip


@contextlib.contextmanager
def joining_with(variables: Mapping[str, str | bytes], instead: bool) -> Iterator[None]:
    """Within, ranks join with these variables, {rank} for their number; `instead` of RANK."""
    join = pycoll.init

    def changed(**options: Any) -> pycoll.Communicator:
        rank = os.environ["RANK"]
        if instead:
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
        for name, value in variables.items():
            text = value if isinstance(value, bytes) else value.replace("{rank}", rank).encode()
            os.environb[name.encode()] = text
        return join(**options)

    with mock.patch.object(pycoll, "init", changed):
        yield


def sum_and_abort(comm: pycoll.Communicator) -> str:
    total = comm.all_reduce(np.full(3, comm.rank + 1.0))
    if (total != comm.size * (comm.size + 1) / 2).any():
        return f"the sum is {total}"
    comm.barrier()  # no rank is still in the sum
    comm.abort("the end")
    try:
        comm.barrier()
    except pycoll.AbortedError:
        return ""
    return "a call works after abort"


def judge(name: str, outcomes: list[Any]) -> str:
    """What is wrong with the ranks' outcomes."""
    for outcome in outcomes:
        if not isinstance(outcome, Exception):
            if outcome:
                return str(outcome)
            continue
        text = str(outcome)
        shown = f"{type(outcome).__name__}: {text[:300]!r}"
        if not isinstance(outcome, pycoll.Error):
            return f"no error of pycoll: {shown}"
        if len(text) > MAX_TEXT:
            return f"a text of {len(text)} characters: {shown}"
        if any(ord(letter) < 32 or ord(letter) == 127 for letter in text.replace("\n  ", "")):
            return f"control characters in {shown}"
        if name not in text:
            return f"without the name of the variable: {shown}"
    return ""


def run_here(name: str, value: str | bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        said = os.open("stderr", os.O_CREAT | os.O_RDWR)
        os.dup2(said, 2)
        beside = LAUNCHERS.get(name) or NEEDS.get(name, {})
        with joining_with({**beside, name: value}, instead=bool(LAUNCHERS.get(name))):
            outcomes = pycoll.run_ranks(
                sum_and_abort, RANKS, timeout_s=TIMEOUT_S, return_errors=True
            )
        text = Path(folder, "stderr").read_text(errors="replace")
        os.chdir("/")
        return judge(name, outcomes) or ("Traceback" in text and text[-500:]) or ""


def names() -> list[str]:
    return [row.name for row in environment.table()] + list(LAUNCHERS)


def is_right(name: str, value: str | bytes) -> bool:
    """Whether a launcher's variable with that value is right, and its ranks only are not there."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return name in LAUNCHERS and name != "MASTER_ADDR" and text.isdigit() and len(text) < 5


def run_case(seed: int) -> Outcome:
    name = names()[seed % len(names())]
    rng = random.Random(seed)
    value = rng.choice(VALUES)
    while is_right(name, value):
        value = rng.choice(VALUES)
    complaint, crash = run_isolated(functools.partial(run_here, name, value), DEADLINE_S)
    wrong = crash[-400:] or complaint
    return Outcome(f"{name}={value[:40]!r}: {wrong}" if wrong else "")
