"""Starts ranks: functions on this host, programs on this host and on others."""

from pycoll.launch.rank_functions import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
