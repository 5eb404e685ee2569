"""Parameter servers: `with pc.ps.run(servers=2, mode="ssp", staleness=3) as w: ...`."""

from pycoll.parallel.ps.downpour import Downpour
from pycoll.parallel.ps.filters import KKT, Filter, Int8Feedback, KeyCache, Significance
from pycoll.parallel.ps.optimizers import SGD, Adagrad, Adam, Proximal, ProximalSGD
from pycoll.parallel.ps.report import Report
from pycoll.parallel.ps.run import Job, join, run, start
from pycoll.parallel.ps.tables import Embedding
from pycoll.parallel.ps.worker import Worker

__all__ = [
    "KKT",
    "SGD",
    "Adagrad",
    "Adam",
    "Downpour",
    "Embedding",
    "Filter",
    "Int8Feedback",
    "Job",
    "KeyCache",
    "Proximal",
    "ProximalSGD",
    "Report",
    "Significance",
    "Worker",
    "join",
    "run",
    "start",
]
