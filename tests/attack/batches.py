"""Attacks with batches, whose work without lines (validating, finalizing, sweeping) all tenants share."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.attack.attacker import Attack, Attacker

ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
SCHEMA = {"type": "object", "properties": {f"k{j}": {"type": "string", "enum": ["a"] * 20} for j in range(50)}}
TOOLS = [{"type": "function", "function": {"name": f"f{j}", "parameters": SCHEMA}} for j in range(20)]
"""A line with these tools has 140 kB and takes some 7 ms to check."""


async def slow_checks(attacker: Attacker, batches: int = 6, lines: int = 500) -> Counter[str]:
    """Have several files checked at once that take seconds of processor time each, as if their batches were meant, and
    cancel the batches before their lines run."""
    file_id = await _upload(attacker, lines, tools=TOOLS)
    ids = [await _create(attacker, file_id) for _ in range(batches)]
    await asyncio.sleep(3.0)
    return await _cancel(attacker, file_id, ids)


async def large_cancels(attacker: Attacker, batches: int = 4, lines: int = 20_000) -> Counter[str]:
    """Cancel large batches, each of which gets an error file with a line for every request."""
    file_id = await _upload(attacker, lines)
    ids = [await _create(attacker, file_id) for _ in range(batches)]
    while any([await _status(attacker, batch_id) == "validating" for batch_id in ids]):
        await asyncio.sleep(0.2)
    return await _cancel(attacker, file_id, ids)


async def _upload(attacker: Attacker, lines: int, **fields: object) -> str:
    """Upload a file whose lines differ only in their ids, so that the attacker encodes a body once. Return its id."""
    body = json.dumps(attacker.body(**fields))
    start = '{"method": "POST", "url": "/v1/chat/completions", "custom_id": "'
    text = "\n".join(f'{start}{number}", "body": {body}}}' for number in range(lines)).encode()
    answer = await attacker.http.post("/v1/files", files={"file": ("a.jsonl", text)}, data={"purpose": "batch"})
    return str(answer.raise_for_status().json()["id"])


async def _create(attacker: Attacker, file_id: str) -> str:
    asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = await attacker.http.post("/v1/batches", json=asked)
    return str(answer.raise_for_status().json()["id"])


async def _status(attacker: Attacker, batch_id: str) -> str:
    return str((await attacker.http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()["status"])


async def _cancel(attacker: Attacker, file_id: str, ids: Sequence[str]) -> Counter[str]:
    """Cancel batches, wait until they have ended and their file can be deleted, and count how they ended."""
    for batch_id in ids:
        await attacker.http.post(f"/v1/batches/{batch_id}/cancel")
    while not ENDED.issuperset(found := [await _status(attacker, batch_id) for batch_id in ids]):
        await asyncio.sleep(0.2)
    while (await attacker.http.delete(f"/v1/files/{file_id}")).status_code == 409:  # a batch still needs it
        await asyncio.sleep(0.2)
    return Counter(found)


ATTACKS: Mapping[str, Attack] = {
    "slow checks of batch files": slow_checks,
    "cancels of large batches": large_cancels,
}
"""The attacks of this file by name."""
