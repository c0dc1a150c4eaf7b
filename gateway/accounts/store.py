"""Redis store of one installation's tenants and keys."""

from __future__ import annotations

from redis.asyncio import Redis

from gateway.accounts.record import ACCOUNTS, Account
from gateway.registry.store import RedisRecordStore


def account_store(client: Redis, prefix: str = "loralane:") -> RedisRecordStore[Account]:
    """Return the store under the keys `{prefix}accounts:{all}:`. It contains hashes of API keys, never the keys."""
    return RedisRecordStore(client, f"{prefix}accounts:{{all}}:", ACCOUNTS)
