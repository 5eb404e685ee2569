"""Makes the oracles, jobs and networks of other folders known here."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDERS = ("comm", "hosts", "parallel", "bootstrap", "torch")
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in FOLDERS]
