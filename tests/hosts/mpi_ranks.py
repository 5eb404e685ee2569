"""A rank of a job of mpiexec: runs a function of mpi_jobs.py and prints what it returned."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "comm"), str(here.parent)]

import mpi_jobs  # noqa: E402


def main() -> None:
    rank, result = getattr(mpi_jobs, sys.argv[1])()
    # At once, so that lines of several ranks do not mix.
    os.write(1, f"\nRESULT {json.dumps([rank, result])}\n".encode())


if __name__ == "__main__":
    main()
