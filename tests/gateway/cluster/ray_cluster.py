"""A Ray cluster of pretended nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80 << 20
"""Size of each node's object store, which tokens never use; Ray's minimum is about 75 MiB."""
SETTINGS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
    "worker_niceness": 0,
}
"""Settings of Ray with which a dead node is noticed in seconds and not in a quarter of a minute, and engines have the
priority of other processes. With Ray's niceness of 15, they get a thirtieth of the processors that other tests use."""


@contextmanager
def pretended_cluster(cpus: tuple[int, ...]) -> Iterator[Any]:
    """Run a head without resources, and a node for each number of CPUs; yields the `Cluster`, whose `worker_nodes` are
    these nodes."""
    from ray.cluster_utils import Cluster

    own = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": SETTINGS, **own})
    try:
        for count in cpus:
            cluster.add_node(wait=False, num_cpus=count, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
