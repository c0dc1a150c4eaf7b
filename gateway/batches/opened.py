"""Assembles the files and batches of one gateway process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from redis.asyncio import Redis

from gateway.accounts.registry import AccountRegistry
from gateway.batches.service import Batches
from gateway.batches.store import BatchStore
from gateway.batches.strays import StraySweeper
from gateway.batches.webhooks.opened import open_webhooks
from gateway.batches.workers import working
from gateway.config.whole import Config
from gateway.files.registry import FileRegistry
from gateway.files.service import FileLimits, Files
from gateway.files.storage import Storage, open_storage
from gateway.files.sweeper import Sweeper, sweeping
from gateway.observe.metrics import Metrics
from gateway.service import Gateway


@asynccontextmanager
async def open_batches(
    redis: Redis, data_dir: Path, config: Config, gateway: Gateway, accounts: AccountRegistry, metrics: Metrics
) -> AsyncIterator[tuple[Files, Batches]]:
    """Open files and batches. While the context is entered, sweep leftovers and, unless `batches.workers` is off, work
    on batches and deliver webhook events.

    Raises:
        ConfigError: the storage or the webhooks need a package that is not installed.
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
            await stack.enter_async_context(working(store, files, gateway, accounts, metrics, config))
        yield files, Batches(store, files, config.batches.tenant_jobs)


def _files(storage: Storage, registry: FileRegistry, config: Config) -> Files:
    bounds = config.batches
    return Files(storage, registry, FileLimits(bounds.max_file_bytes, bounds.tenant_bytes, bounds.tenant_files))


def _store(redis: Redis, config: Config) -> BatchStore:
    return BatchStore(
        redis,
        lease_seconds=config.batches.lease_s,
        retention_seconds=config.batches.retention_days * 86_400,
        prefix=config.redis.key_prefix,
        told=config.batches.webhooks,
    )
