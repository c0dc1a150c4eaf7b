"""What a deployment has written down: its request log, the ledger in Redis, and the engine's statistics."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from tests.chaos.deployment import LOOKS, Deployment
from tests.chaos.settings import CALLERS

Record = dict[str, Any]
"""A line of the request log."""


class RequestLog:
    """The records of the request log, by the id that the caller gave."""

    def __init__(self, deployment: Deployment) -> None:
        self._path = deployment.request_log
        self._position = 0
        self.records: dict[str, list[Record]] = defaultdict(list)
        self.torn = 0
        """Number of lines that are no JSON."""

    def read_on(self) -> None:
        """Read what was logged since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._position)
            text = log.read()
        whole, _, _ = text.rpartition(b"\n")
        self._position += len(whole) + bool(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            self.torn += 1
            return
        if record["event"] == "log_lines_lost":
            return  # which lines those were, their requests' records are missing for
        self.records[record["request_id"]].append(record)


async def used_tokens(deployment: Deployment) -> dict[str, int]:
    """Return the tokens that the ledger has for each tenant."""
    async with deployment.admin() as http:
        answer = await http.get("/admin/v1/usage", params={"group_by": "tenant"})
    lines = answer.raise_for_status().json()["usage"]
    found = {line["tenant"]: line["prompt_tokens"] + line["completion_tokens"] for line in lines}
    return {caller.name: found.get(caller.name, 0) for caller in CALLERS}


async def undelivered_tokens(deployment: Deployment) -> float:
    """Return the most used tokens that any gateway still holds because Redis has not taken them."""
    async with deployment.admin() as http:
        texts = [(await http.get("/metrics")).text for _ in range(LOOKS * deployment.kind.gateways)]
    lines = [line for text in texts for line in text.splitlines()]
    return max(float(line.split()[-1]) for line in lines if line.startswith("loralane_usage_undelivered_tokens"))


async def slots_taken(deployment: Deployment) -> int:
    """Return how many requests count as running, over all tenants, keys and adapters."""
    taken = 0
    async with deployment.store.client() as redis:
        seconds, micros = await redis.time()
        async for key in redis.scan_iter("loralane:running:*"):
            taken += await redis.zcount(key, f"({seconds * 1000 + micros // 1000}", "+inf")
    return taken


async def open_leases(deployment: Deployment) -> int:
    """Return how many reservations are not settled."""
    async with deployment.store.client() as redis:
        return len([key async for key in redis.scan_iter("loralane:lease:*")])


async def fetches_of(deployment: Deployment) -> Counter[str]:
    """Return how many fetches of KV the engines have counted, by how they ended."""
    return sum((Counter(dict(stats.kv_fetches)) for stats in await deployment.engine_stats()), Counter())
