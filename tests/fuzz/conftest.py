"""Makes the oracles of tests/comm and the jobs and networks of tests/hosts known here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("comm", "hosts")]
