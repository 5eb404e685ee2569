"""A cluster of Ray on this machine: each of its nodes is a raylet with workers of its own."""

from __future__ import annotations

import pytest

MEMORY = 80 << 20  # bytes of a node's object store


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of two CPUs; the driver is on the first one."""
    ray = pytest.importorskip("ray", reason="pip install 'pycoll[ray]'")
    from ray.cluster_utils import Cluster

    of_node = {"num_cpus": 2, "object_store_memory": MEMORY}
    made = Cluster(initialize_head=True, head_node_args=of_node)
    try:
        made.add_node(**of_node)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
