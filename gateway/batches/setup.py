"""Assembles the files and batches of one gateway process, with its dispatcher and its metrics of batch work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from engine.core.messages.requests import Lane
from gateway.accounts.registry import AccountRegistry
from gateway.batches.context import BatchContext
from gateway.batches.dispatcher import Dispatcher, cancel_until_done
from gateway.batches.finalize import StraySweeper
from gateway.batches.gate import Gate, LineGate
from gateway.batches.lease import TaskKind
from gateway.batches.route_gate import RouteGate, UpstreamGate
from gateway.batches.service import Batches
from gateway.batches.store import BatchStore
from gateway.batches.validation import Validator
from gateway.batches.webhooks.setup import open_webhooks
from gateway.config.whole import Config
from gateway.core.lifecycle import Lifecycle
from gateway.core.space import Disk
from gateway.core.tenants import Tenant
from gateway.files.registry import FileRegistry
from gateway.files.service import FileLimits, Files
from gateway.files.storage import Storage, open_storage
from gateway.files.sweeper import Sweeper, sweeping
from gateway.observe.metrics import Metrics
from gateway.observe.vllm_requests import MODEL
from gateway.requests.served_model import ServedModel
from gateway.requests.service import Gateway
from gateway.responses.service import Responses


@asynccontextmanager
async def open_batches(
    redis: Redis,
    data_dir: Path,
    config: Config,
    gateway: Gateway,
    accounts: AccountRegistry,
    metrics: Metrics,
    responses: Responses,
    disk: Disk | None = None,
) -> AsyncIterator[tuple[Files, Batches]]:
    """Yield the operations on files and batches. Background tasks delete expired files and, unless `batches.workers` is
    off, work on batches and deliver webhook events until the exit. `disk` is the store's; None means that the store is
    elsewhere.

    Raises ConfigError if the storage cannot be opened, or it or the webhooks need a package that is not installed.
    """
    async with AsyncExitStack() as stack:
        storage = stack.enter_context(closing(open_storage(config.batches.storage, data_dir)))
        registry, store = FileRegistry(redis, prefix=config.redis.key_prefix), _store(redis, config)
        files = _files(storage, registry, config)
        for sweeper in (Sweeper(storage, registry), StraySweeper(storage, store)):
            await stack.enter_async_context(sweeping(sweeper.sweep))
        endpoints = config.batches.webhooks if config.batches.workers else {}
        await stack.enter_async_context(open_webhooks(redis, config.redis.key_prefix, endpoints, metrics))
        if config.batches.workers:
            await stack.enter_async_context(dispatching(store, files, gateway, accounts, metrics, config, responses))
        yield files, Batches(store, files, config.batches.tenant_jobs, disk)


def _files(storage: Storage, registry: FileRegistry, config: Config) -> Files:
    bounds = config.batches
    return Files(storage, registry, FileLimits(bounds.max_file_bytes, bounds.tenant_bytes, bounds.tenant_files))


def _store(redis: Redis, config: Config) -> BatchStore:
    return BatchStore(
        redis,
        lease_seconds=config.batches.lease_s,
        retention_seconds=config.batches.retention_days * 86_400,
        prefix=config.redis.key_prefix,
        webhook_tenants=config.batches.webhooks,
        usage_days=config.billing.retention_days,
    )


@asynccontextmanager
async def dispatching(
    store: BatchStore,
    files: Files,
    gateway: Gateway,
    accounts: AccountRegistry,
    metrics: Metrics,
    config: Config,
    responses: Responses,
) -> AsyncIterator[None]:
    """Run a `Dispatcher`, with metrics, while the context is entered. A line may be as long as the body of an HTTP
    request."""
    gates = open_gates(gateway)
    all_gates = with_route_gates(gates, gateway)
    counted = metrics.batches.line, metrics.batches.wasted_tokens
    context = BatchContext(store, files, gateway, accounts, all_gates, *counted, responses=responses)
    bounds = config.batches.max_lines, config.http.max_body_bytes
    validator = Validator(store, files, partial(_tenant, accounts), gateway.models, *bounds, rules=accounts.rules)
    life = gateway.lifecycle
    async with Dispatcher(context, validator.run, owner=life.id, lease_seconds=config.batches.lease_s) as dispatcher:
        metrics.register(BatchMetrics(dispatcher, gates))
        leaving = asyncio.create_task(_leave(dispatcher, life), name="batches-leave")
        try:
            yield
        finally:
            await cancel_until_done(leaving)


async def _leave(dispatcher: Dispatcher, life: Lifecycle) -> None:
    """Wait until the gateway drains, and hand its batches over."""
    await life.draining.wait()
    await dispatcher.hand_over()


def open_gates(gateway: Gateway) -> Mapping[str, Gate]:
    """Return the gates that admit batch lines to the engines of the base models, by the model's name."""
    clock = asyncio.get_running_loop().time
    return {model.name: Gate(model.engine, partial(_batch_capacity, model), clock) for model in gateway.models}


def with_route_gates(gates: Mapping[str, Gate], gateway: Gateway) -> Mapping[str, Gate | RouteGate]:
    """Return the gates of the base models, followed by a gate for each virtual model, all by the model's name."""
    upstreams = UpstreamGate()
    homes: dict[str, LineGate] = {**gates, "": upstreams}

    def of(model: str, tenant: Tenant | None) -> list[LineGate]:
        members = [homes[home] for home in gateway.batch_homes(model, tenant)]
        return members or [upstreams]  # a line that no member may answer only gets its error

    routes = {model: RouteGate(partial(of, model)) for model in gateway.virtual_models}
    return {**gates, **routes}


def _batch_capacity(model: ServedModel) -> int:
    return model.lane_capacity[Lane.BATCH]


def _tenant(accounts: AccountRegistry, name: str) -> Tenant:
    """Return the tenant of a name. Raises ApiError: TENANT_NOT_FOUND."""
    tenant = accounts.tenant(name).tenant
    assert tenant is not None, "a tenant's record"
    return tenant


class BatchMetrics(Collector):
    def __init__(self, dispatcher: Dispatcher, gates: Mapping[str, Gate]) -> None:
        """`gates` are those of the base models, by the model's name, which also count lines of virtual models."""
        self._dispatcher = dispatcher
        self._gates = gates

    def collect(self) -> Iterable[Metric]:
        leases = GaugeMetricFamily("loralane_batch_leases", "Batch tasks leased by this process.", labels=["task"])
        for task in get_args(TaskKind):
            leases.add_metric([task], self._dispatcher.leases.get(task, 0))
        backlog = GaugeMetricFamily(
            "loralane_batch_backlog", "Batch lines that wait in this process for the engine.", labels=[MODEL]
        )
        running = GaugeMetricFamily(
            "loralane_batch_lines_running", "Batch lines that the engine is working on.", labels=[MODEL]
        )
        waiting = self._dispatcher.backlog
        for model in dict.fromkeys((*self._gates, *waiting)):
            backlog.add_metric([model], waiting[model])
        for model, gate in self._gates.items():
            running.add_metric([model], gate.in_flight)
        yield from (leases, backlog, running)
        yield GaugeMetricFamily(
            "loralane_batches_open", "Batches of all tenants that have not ended.", self._dispatcher.open
        )
