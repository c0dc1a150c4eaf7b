"""What a plant has written down: its request log, the ledger in Redis, the engine's own account."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from tests.chaos.plant import LOOKS, Plant
from tests.chaos.settings import CALLERS

Record = dict[str, Any]
"""A line of the request log."""


class RequestLog:
    """Lines by the id their caller gave."""

    def __init__(self, plant: Plant) -> None:
        self._path = plant.request_log
        self._position = 0
        self.records: dict[str, list[Record]] = defaultdict(list)
        self.torn = 0
        """Lines that are none."""

    def read_on(self) -> None:
        """What has come since."""
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


async def used_tokens(plant: Plant) -> dict[str, int]:
    """Of each tenant, in the ledger."""
    async with plant.admin() as http:
        answer = await http.get("/admin/v1/usage", params={"group_by": "tenant"})
    lines = answer.raise_for_status().json()["usage"]
    found = {line["tenant"]: line["prompt_tokens"] + line["completion_tokens"] for line in lines}
    return {caller.name: found.get(caller.name, 0) for caller in CALLERS}


async def undelivered_tokens(plant: Plant) -> float:
    """Used, and kept in some gateway until Redis takes them. Each tells its own."""
    async with plant.admin() as http:
        texts = [(await http.get("/metrics")).text for _ in range(LOOKS * plant.kind.gateways)]
    lines = [line for text in texts for line in text.splitlines()]
    return max(float(line.split()[-1]) for line in lines if line.startswith("loralane_usage_undelivered_tokens"))


async def slots_taken(plant: Plant) -> int:
    """Requests that count as running, of all tenants, keys and adapters."""
    taken = 0
    async with plant.store.client() as redis:
        seconds, micros = await redis.time()
        async for key in redis.scan_iter("loralane:running:*"):
            taken += await redis.zcount(key, f"({seconds * 1000 + micros // 1000}", "+inf")
    return taken


async def open_leases(plant: Plant) -> int:
    """Reservations that nobody has settled."""
    async with plant.store.client() as redis:
        return len([key async for key in redis.scan_iter("loralane:lease:*")])
