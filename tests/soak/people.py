"""The simulated users of the server. Each act is one valid or invalid interaction and returns its outcome as text."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import msgspec

from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationStub
from tests.soak.house import ADMIN_KEY, KEYS, MODEL, House

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ADMIN_READS = (
    *("/admin/v1/adapters", "/admin/v1/overview", "/admin/v1/limits/usage?tenant=acme", "/admin/v1/usage"),
    *("/admin/v1/requests", "/admin/v1/lanes", "/admin/v1/tenants", "/admin/v1/keys", "/metrics", "/openapi.json"),
)
NONSENSE: tuple[dict[str, Any], ...] = (
    {"content": b"{"},
    {"json": {"model": "no-such-model", "messages": [{"role": "user", "content": "hi"}]}},
    {"json": {"model": MODEL, "messages": [], "temperature": 99}},
    {"json": {"model": MODEL, "messages": [{"role": "user", "content": "hi " * 5000}]}},
    {"json": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, "headers": {"authorization": "x"}},
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
OURS = frozenset((200, 201, 400, 401, 404, 409, 429, 503))
"""HTTP statuses that are expected under this use. 500 never is."""
SECONDS = 120.0
"""Timeout of each call and of waiting for a batch."""


@dataclass(slots=True)
class Visit:
    """State of one simulated user: clients, a random generator, the server's description, and the signal to stop."""

    house: House
    client: httpx.AsyncClient
    admins: httpx.AsyncClient
    stub: GenerationStub
    dice: random.Random
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def model(self) -> str:
        return self.dice.choice([MODEL, *self.house.residents, *self.house.visitors])

    def words(self, most: int) -> str:
        return " ".join(self.dice.choices(("ship", "sea", "sun", "law", "tea", "cat"), k=self.dice.randrange(1, most)))

    def chat(self, most_tokens: int, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.words(60)}]
        tokens = self.dice.randrange(1, most_tokens)
        return {"model": self.model(), "messages": messages, "max_tokens": tokens, **fields}


Act = Callable[[Visit], Awaitable[str]]


def said(response: httpx.Response) -> str:
    """Return an expected status as text, or else "unexpected" with the status and the beginning of the body."""
    if response.status_code in OURS:
        return str(response.status_code)
    return f"unexpected: http {response.status_code} {response.text[:200]}"


async def chat(visit: Visit) -> str:
    extras: Sequence[dict[str, Any]] = ({}, {}, {"n": 2}, {"logprobs": True}, {"stop": ["sea"]}, {"temperature": 1.3})
    return said(await visit.client.post(CHATS, json=visit.chat(16, **visit.dice.choice(extras))))


async def structured(visit: Visit) -> str:
    return said(await visit.client.post(CHATS, json=visit.chat(16, response_format=FORMAT)))


async def batch_lane(visit: Visit) -> str:
    body = {"model": visit.model(), "prompt": visit.words(120), "max_tokens": 40, "service_tier": "flex"}
    return said(await visit.client.post(COMPLETIONS, json=body))


async def stream(visit: Visit) -> str:
    """Read a streamed chat to its end, and return its status or refusal."""
    async with aclosing(_events(visit, 24)) as events:
        async for event in events:
            last = event
    return last


async def leave(visit: Visit) -> str:
    """Disconnect in the middle of a streamed answer, or before its first token."""
    patience = visit.dice.randrange(0, 6)
    async with aclosing(_events(visit, 100)) as events:
        with suppress(TimeoutError):
            async with asyncio.timeout(visit.dice.uniform(0.05, 4.0)):
                async for event in events:
                    patience -= 1
                    if patience < 0 or event.startswith("unexpected"):
                        return event if event.startswith("unexpected") else "left"
    return "left"


async def read_slowly(visit: Visit) -> str:
    async with aclosing(_events(visit, 32)) as events:
        async for event in events:
            last = event
            await asyncio.sleep(visit.dice.uniform(0.0, 0.1))
    return last


async def exceed(visit: Visit) -> str:
    """Send a chat as the tenant `small`, which exceeds its request limit."""
    headers = {"authorization": f"Bearer {KEYS['small']}"}
    answer = await visit.client.post(CHATS, json=visit.chat(4), headers=headers)
    await asyncio.sleep(0.1)
    return said(answer)


async def blunder(visit: Visit) -> str:
    nonsense: dict[str, Any] = visit.dice.choice(NONSENSE)
    answer = await visit.client.post(CHATS, **nonsense)
    await asyncio.sleep(0.1)
    return said(answer)


async def administer(visit: Visit) -> str:
    answer = await visit.admins.get(visit.dice.choice(ADMIN_READS))
    await asyncio.sleep(0.2)
    return said(answer) if answer.status_code == 200 else f"unexpected: {answer.url} {answer.status_code}"


async def churn_adapters(visit: Visit) -> str:
    """Load or replace one adapter, and half of the time unload another, whether it is in use or not."""
    name, folder = await asyncio.to_thread(visit.house.next_visitor)
    body = {"name": name, "source": str(folder), "replace": True}
    answer = await visit.admins.post("/admin/v1/adapters", json=body)
    await asyncio.sleep(visit.dice.uniform(0.2, 1.0))
    if answer.status_code == 200 and visit.dice.random() < 0.5:
        answer = await visit.admins.delete(f"/admin/v1/adapters/{visit.dice.choice(visit.house.visitors)}")
    return said(answer)


async def churn_keys(visit: Visit) -> str:
    """Create a key, use it and delete it."""
    made = await visit.admins.post("/admin/v1/keys", json={"tenant": "acme", "label": "soak"})
    if made.status_code not in (200, 201):
        return said(made)
    headers = {"authorization": f"Bearer {made.json()['key']}"}
    answer = await visit.client.post(CHATS, json=visit.chat(4), headers=headers)
    await visit.admins.delete(f"/admin/v1/keys/{made.json()['id']}")
    await asyncio.sleep(0.5)
    return said(answer)


async def call(visit: Visit) -> str:
    """Stream a completion over gRPC; half of the calls are cancelled by the client."""
    request = pb.GenerateRequest(model=visit.model(), prompt=visit.words(40), sampling=pb.SamplingParams(max_tokens=32))
    metadata = (("authorization", f"Bearer {KEYS['acme']}"),)
    answer = visit.stub.GenerateStream(request, metadata=metadata, timeout=SECONDS)
    patience = visit.dice.choice((3, 1000))
    try:
        async for _ in answer:
            patience -= 1
            if patience < 0:
                answer.cancel()
                return "left"
    except grpc.aio.AioRpcError as error:
        code = error.code()
        is_ours = code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        return f"grpc {code.name}" if is_ours else f"unexpected: {error.details()}"
    return "grpc OK"


async def submit_batch(visit: Visit) -> str:
    """Submit a batch job of LINES lines, wait for it or cancel it, and delete its files."""
    lines = [{"custom_id": str(i), "method": "POST", "url": CHATS, "body": visit.chat(8)} for i in range(LINES)]
    text = b"\n".join(map(msgspec.json.encode, lines))
    file = {"file": ("lines.jsonl", text)}
    given = await visit.client.post("/v1/files", files=file, data={"purpose": "batch"})
    if given.status_code != 200:
        return said(given)
    wanted = {"input_file_id": given.json()["id"], "endpoint": CHATS, "completion_window": "10m"}
    made = await visit.client.post("/v1/batches", json=wanted)
    if made.status_code != 200:
        return said(made)
    batch = await _ended(visit, made.json()["id"], cancel=visit.dice.random() < 0.3)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch[name] is not None:
            await visit.client.delete(f"/v1/files/{batch[name]}")
    wrong = {error["code"] for error in (batch["errors"] or {"data": ()})["data"]}
    is_ours = batch["status"] in ("completed", "cancelled") or wrong == {"model_not_found"}
    return str(batch["status"]) if is_ours else f"unexpected: {batch}"


async def _ended(visit: Visit, batch_id: str, *, cancel: bool) -> dict[str, Any]:
    """Return the batch when it has ended, or raise TimeoutError after SECONDS. `cancel` cancels it after a delay."""
    if cancel:
        await asyncio.sleep(visit.dice.uniform(0.0, 2.0))
        await visit.client.post(f"/v1/batches/{batch_id}/cancel")
    async with asyncio.timeout(SECONDS):
        while True:
            batch = (await visit.client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return dict(batch)
            await asyncio.sleep(0.3)


CROWD: tuple[tuple[Act, int], ...] = (
    *((chat, 4), (structured, 1), (batch_lane, 4), (stream, 3), (leave, 3), (read_slowly, 2), (exceed, 1)),
    *((blunder, 1), (administer, 2), (churn_adapters, 1), (churn_keys, 1), (call, 2)),
)
"""Acts, and how many users repeat each of them concurrently."""
WITH_BATCHES = (*CROWD, (submit_batch, 1))
LINES = 12
"""Number of lines in a batch job."""


async def crowd_of(house: House) -> Sequence[tuple[Act, int]]:
    """Return the acts, each with its number of concurrent users; batch jobs are left out if the server has none."""
    async with httpx.AsyncClient(base_url=house.url, headers=_bearer(KEYS["acme"])) as client:
        has_batches = (await client.get("/v1/batches")).is_success
    return WITH_BATCHES if has_batches else CROWD


async def busy_round(house: House, seconds: float, seed: int, crowd: Sequence[tuple[Act, int]]) -> Counter[str]:
    """Let all users repeat their acts for `seconds`, and end those begun. Counts how often each act ended how."""
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=house.url, timeout=SECONDS, limits=limits, headers=_bearer(KEYS["acme"])) as client,
        httpx.AsyncClient(base_url=house.url, timeout=SECONDS, headers=_bearer(ADMIN_KEY)) as admins,
        grpc.aio.insecure_channel(house.grpc) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        visits = [
            (
                act,
                Visit(house, client, admins, GenerationStub(channel), random.Random(f"{seed} {act.__name__} {person}")),
            )
            for act, people in crowd
            for person in range(people)
        ]
        for act, visit in visits:
            tasks.create_task(_keep_doing(act, visit, outcomes))
        await asyncio.sleep(seconds)
        for _, visit in visits:
            visit.stopping.set()
    return outcomes


async def _keep_doing(act: Act, visit: Visit, outcomes: Counter[str]) -> None:
    while not visit.stopping.is_set():
        try:
            word = await act(visit)
        except (httpx.HTTPError, TimeoutError) as error:
            word = f"unexpected: {type(error).__name__} {error}"
        outcomes[f"{act.__name__}: {word}"] += 1


async def _events(visit: Visit, most_tokens: int) -> AsyncGenerator[str, None]:
    """Yield "token" for each line of a streamed chat, then its status; or only the refusal if it is refused."""
    body = visit.chat(most_tokens, stream=True)
    async with visit.client.stream("POST", CHATS, json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            yield said(answer)
            return
        async for _ in answer.aiter_lines():
            yield "token"
    yield "200"


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
