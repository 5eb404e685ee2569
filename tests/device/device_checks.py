"""Compares collectives on a device's arrays with their oracles."""

from __future__ import annotations

from typing import Any

import numpy as np
from comm_cases import crc, inputs

import pycoll
from pycoll.arrays.device import DeviceArray
from pycoll.bench.oracle import COLLECTIVES as ORACLES
from pycoll.bench.oracle import arguments, run


def check(comm: pycoll.Communicator, name: str, rows: int, root: int, **options: Any) -> int:
    """Runs it on values that all ranks know. Returns a checksum of the result, 0 for none."""
    oracle = ORACLES[name]
    shape = (comm.size, *oracle.leading(comm.size, rows), 3)
    values = inputs(comm.size, int(np.prod(shape[1:])), seed=rows).reshape(shape)
    x = DeviceArray.of(values[comm.rank])
    given = arguments(name, root)
    result = run(comm, name, x, **given, **options)
    expected = oracle.expected(values, comm.rank, root, "sum")
    if expected is None:
        return 0
    comm.synchronize()
    got = (x if oracle.in_place else result).numpy()
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6, err_msg=f"{name} {rows}")
    return crc(got)
