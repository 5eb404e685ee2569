"""Makes the oracles of tests/comm and the networks of tests/hosts known here."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("comm", "hosts")]
