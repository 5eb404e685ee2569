"""The measured table: times of algorithms and protocols on this machine, and where it is kept.

A communicator's rank 0 reads the table when the communicator is made (csrc/comm/settings.h), and
all its ranks choose by it. `pycoll tune` makes it: `measure` runs on every rank, `fit_costs` finds
the costs that the simulation needs, and `save` puts what was found into the file.
"""

from pycoll.bench.timing import spread_ranks
from pycoll.tuning.file import load, path, save, today
from pycoll.tuning.fit import fit_costs
from pycoll.tuning.measure import (
    ARRAYS,
    AUTO,
    Effort,
    Measured,
    asks_for_arrays,
    measure,
    smallest_nbytes,
)

__all__ = [
    "ARRAYS",
    "AUTO",
    "Effort",
    "Measured",
    "asks_for_arrays",
    "fit_costs",
    "load",
    "measure",
    "path",
    "save",
    "smallest_nbytes",
    "spread_ranks",
    "today",
]
