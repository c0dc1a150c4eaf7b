"""The registry of one base model's adapters."""

from __future__ import annotations

from redis.asyncio import Redis

from gateway.adapters.record import ADAPTERS, AdapterRecord
from gateway.registry.store import RecordStore, RedisRecordStore

AdapterStore = RecordStore[AdapterRecord]


class RedisAdapterStore(RedisRecordStore[AdapterRecord]):
    """An `AdapterStore` shared by every gateway of one base model."""

    def __init__(self, client: Redis, base: str, prefix: str = "loralane:") -> None:
        """`base`: the model all these adapters are made for."""
        super().__init__(client, f"{prefix}adapters:{{{base}}}:", ADAPTERS)
