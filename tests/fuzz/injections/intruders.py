"""Processes that try to become a rank: another user, another host, with a recorded handshake.

In each mode but `none` (SECURITY.md). All are refused, while the ranks join and while they work,
and the job works, also after a shrink. Needs root and network namespaces.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from intruders import MODES, complaint, job_among_intruders
from namespaces import Network, why_not

from injections import Outcome

CASES = 6
FEW = (1, 2)
TRIES = 170  # of each of three intruders, twice in a case


def run_case(seed: int) -> Outcome:
    if why := why_not():
        return Outcome(label=f"left out, {why}")
    mode = list(MODES)[seed % len(MODES)]
    with contextlib.closing(Network(2)) as network, tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        outcomes, counts = job_among_intruders(network, mode, TRIES, Path(folder))
    return Outcome(complaint(outcomes, counts, TRIES), label=mode)
