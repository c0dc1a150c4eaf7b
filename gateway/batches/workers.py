"""Assembles the dispatcher of one gateway process."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.core.types import Lane
from gateway.accounts.registry import AccountRegistry
from gateway.batches.dispatcher import Dispatcher
from gateway.batches.gate import Gate
from gateway.batches.metrics import BatchMetrics
from gateway.batches.shard import Workshop
from gateway.batches.store import BatchStore
from gateway.batches.validation import Validator
from gateway.config.whole import Config
from gateway.core.routing import Catalog
from gateway.core.tenants import Tenant
from gateway.files.service import Files
from gateway.observe.metrics import Metrics
from gateway.service import Gateway


@asynccontextmanager
async def working(
    store: BatchStore,
    files: Files,
    gateway: Gateway,
    accounts: AccountRegistry,
    metrics: Metrics,
    config: Config,
) -> AsyncIterator[None]:
    """Work on batches while the context is entered. A line may be as long as the body of an HTTP request."""
    gate = Gate(gateway.engine, lambda: gateway.lane_capacity[Lane.BATCH], asyncio.get_running_loop().time)
    shop = Workshop(store, files, gateway, accounts, gate, metrics.batch_line)
    bounds = config.batches.max_lines, config.http.max_body_bytes
    validator = Validator(store, files, _tenants(gateway, accounts), *bounds)
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    async with Dispatcher(shop, validator.run, owner=owner, lease_seconds=config.batches.lease_s) as dispatcher:
        metrics.register(BatchMetrics(dispatcher, gate))
        yield


def _tenants(gateway: Gateway, accounts: AccountRegistry) -> Callable[[str], tuple[Tenant, Catalog]]:
    """Return a function that finds a tenant and its models. The function raises ApiError: TENANT_NOT_FOUND."""

    def found(name: str) -> tuple[Tenant, Catalog]:
        tenant = accounts.tenant(name).tenant
        assert tenant is not None, "a tenant's record"
        return tenant, gateway.intake.catalog_for(tenant)

    return found
