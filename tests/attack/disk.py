"""Attacks on what a gateway's process and disk have of everything: space and file descriptors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import httpx

from tests.attack.attacker import Attack, Attacker

MIB = 2**20


async def uploads_that_fill_the_disk(attacker: Attacker, count: int = 24, size: int = 7 * MIB) -> Counter[str]:
    """Upload `count` files of `size` bytes, then a batch and a stored response; delete what was kept. While the disk
    has its reserve, uploads are 507, and deleting always works."""
    answers, kept = Counter[str](), []
    for _ in range(count):
        content = {"file": ("a.jsonl", b"x" * size)}
        answer = await attacker.http.post("/v1/files", files=content, data={"purpose": "batch"})
        answers[f"upload {answer.status_code}"] += 1
        if answer.status_code == 200:
            kept.append(answer.json()["id"])
    if kept:
        batch = {"input_file_id": kept[0], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = await attacker.http.post("/v1/batches", json=batch)
        answers[f"batch {made.status_code}"] += 1
        await _cancelled(attacker, made)
    body = {"model": attacker.model, "input": "hi", "store": True, "max_output_tokens": 16}
    stored = await attacker.http.post("/v1/responses", json=body)
    answers[f"stored response {stored.status_code}"] += 1
    if stored.status_code == 200:
        await attacker.http.delete(f"/v1/responses/{stored.json()['id']}")
    for file_id in kept:
        answers[f"delete {await _deleted(attacker, file_id)}"] += 1
    return answers


async def idle_connections(attacker: Attacker, count: int = 400, seconds: float = 1.0) -> Counter[str]:
    """Open `count` connections to the HTTP and to the gRPC port and send nothing for some seconds; chat meanwhile."""
    url = httpx.URL(str(attacker.http.base_url))
    host, _, port = attacker.grpc_target.rpartition(":")
    opening = [asyncio.open_connection(*at) for at in ((url.host, url.port), (host, int(port))) for _ in range(count)]
    opened = await asyncio.gather(*opening, return_exceptions=True)
    answers = Counter("opened" if isinstance(one, tuple) else type(one).__name__ for one in opened)
    try:
        answers[f"chat {await attacker.chat()}"] += 1
    except httpx.TransportError:
        answers["chat refused"] += 1
    await asyncio.sleep(seconds)
    for one in opened:
        if isinstance(one, tuple):
            one[1].close()
    return answers


async def _cancelled(attacker: Attacker, made: httpx.Response) -> None:
    if made.status_code == 200:
        await attacker.http.post(f"/v1/batches/{made.json()['id']}/cancel")


async def _deleted(attacker: Attacker, file_id: str, tries: int = 100) -> int:
    """Delete a file, which a batch that is being cancelled may still need for a moment; returns the status."""
    for _ in range(tries):
        status = (await attacker.http.delete(f"/v1/files/{file_id}")).status_code
        if status != 409:
            break
        await asyncio.sleep(0.1)
    return status


ATTACKS: Mapping[str, Attack] = {
    "uploads that fill the disk": uploads_that_fill_the_disk,
    "idle connections": idle_connections,
}
