"""A gateway starts while nodes of its cluster are down."""

from __future__ import annotations

from patient_valkey import PatientValkey
from valkey_cluster import SLOTS, free_port, until_ok

from gateway.accounts.record import account_store
from gateway.accounts.registry import open_accounts
from gateway.core.tenants import Tenant, hash_key
from gateway.redis.connect import connect_cluster

SECRET = "sk-of-the-configuration"
SEEDS = [(Tenant("acme"), [hash_key(SECRET)])]


async def test_nodes_are_found_through_any_that_is_named(cluster_ports):
    async with connect_cluster(f"redis://127.0.0.1:1,127.0.0.1:{cluster_ports[1]}") as client:
        assert {node.port for node in client.get_nodes()} == set(cluster_ports)


async def test_a_start_without_any_node_serves_the_configuration_until_the_cluster_is_there():
    port, bus = free_port(), free_port()
    async with (
        connect_cluster(f"redis://127.0.0.1:{port}") as client,
        open_accounts(account_store(client), lambda tenants: None, SEEDS) as accounts,
    ):
        assert accounts.authenticate(SECRET).tenant == Tenant("acme")
        assert not accounts.records["tenant/acme"].generation
        config = {"cluster-enabled": "yes", "cluster-port": bus}
        with PatientValkey(port=port, config=config) as server:
            await until_ok(server.connection_url, (0, SLOTS - 1))
            while not accounts.records["tenant/acme"].generation:
                await accounts._log.next_change.wait()
            await accounts.create_key("acme")
