"""Redis store of one base model's adapters."""

from __future__ import annotations

from redis.asyncio import Redis

from gateway.adapters.record import ADAPTERS, AdapterRecord
from gateway.registry.store import RedisRecordStore


def adapter_store(client: Redis, base: str, prefix: str = "loralane:") -> RedisRecordStore[AdapterRecord]:
    """Return the store under the keys `{prefix}adapters:{base}:`. `base` is the base model of these adapters."""
    return RedisRecordStore(client, f"{prefix}adapters:{{{base}}}:", ADAPTERS)
