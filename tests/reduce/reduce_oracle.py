"""The oracle of reductions, under the name that the tests import it by."""

from pycoll.bench.arithmetic import *  # noqa: F403
