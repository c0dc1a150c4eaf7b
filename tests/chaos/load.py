"""Callers: seeded traffic of every kind, and what became of each request as its caller saw it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any, Literal

import httpx

from engine.executor.fake import fake_token
from tests.chaos.settings import ADAPTERS, CALLERS, FREE, MODEL, Caller

PATIENCE_SECONDS = 60.0
"""After which a caller has waited in vain; longer than a gateway lets any request run."""
SMALL_BUFFER = 4096
"""Bytes that a slow reader's kernel takes for it."""
VOCABULARY = range(1, 1000)
AGAIN_AT_ONCE = 8
"""Requests that are asked again at a time."""

Manner = Literal["reads", "reads slowly", "leaves"]
Ending = Literal["answered", "refused", "failed", "broken", "left", "forsaken"]
"""failed: told so in the middle of a stream. broken: the connection ended before the answer did. forsaken: nothing came
in PATIENCE_SECONDS."""


@dataclass(frozen=True)
class Ask:
    """A request, and how its caller will behave."""

    id: str
    caller: Caller
    adapter: str | None
    tier: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    stream: bool
    manner: Manner
    salt: str = ""

    def body(self) -> dict[str, Any]:
        """Return the body of the request. Half of the seeds are greedy."""
        fields: dict[str, Any] = {"model": self.adapter or MODEL, "prompt": list(self.prompt), "seed": self.seed}
        fields |= {"max_tokens": self.max_tokens, "service_tier": self.tier, "return_token_ids": True}
        fields |= {"temperature": self.seed % 2, "cache_salt": self.salt or None}
        return fields | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})

    def expected(self) -> list[int]:
        """Return the tokens that the fake executor generates for this request."""
        adapter = blake2b(self.adapter.encode(), digest_size=16).hexdigest() if self.adapter else None
        tokens = list(self.prompt)
        for _ in range(self.max_tokens):
            tokens.append(fake_token(adapter, self.seed, tokens, 1000))
        return tokens[len(self.prompt) :]

    def again(self) -> Ask:
        """Return the same request in the lane whose requests are not split, by a caller without limits, such that no
        engine has computed any of its KV."""
        return replace(
            self, id=f"{self.id}-again", caller=FREE, tier="flex", stream=False, manner="reads", salt=self.id
        )


@dataclass
class Outcome:
    """What a caller saw of a request. Times are on the event loop's clock."""

    ask: Ask
    began: float
    ended: float = 0.0
    ending: Ending = "broken"
    status: int = 0
    code: str | None = None
    tokens: list[int] = field(default_factory=list)
    used: int = 0
    """Prompt and completion tokens as the answer tells."""
    oddities: list[str] = field(default_factory=list)
    """What no answer may look like."""


@dataclass(frozen=True)
class Mix:
    """The composition of the traffic."""

    callers: int = 12
    """Number of callers that send requests concurrently, each one after the other."""
    pause: float = 0.05
    """Seconds between two requests of a caller, on average."""
    longest: int = 60
    """Tokens of most answers; one in ten is ten times as long."""
    longest_prompt: int = 80
    """Tokens."""
    leaving: float = 0.1
    slow: float = 0.1


class Load:
    """Traffic in the background. A seed determines the requests, but not when they are sent or how they end."""

    def __init__(self, url: str, seed: int, mix: Mix | None = None) -> None:
        self.outcomes: list[Outcome] = []
        self._url = url
        self._seed = seed
        self._mix = mix or Mix()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(self._mix.callers)]

    async def stop(self) -> None:
        """Send no more requests, and wait for those under way."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def herd(self, size: int) -> None:
        """Send `size` more requests at the same moment."""
        before = len(self.outcomes)
        asks = [self._ask(Random(f"{self._seed}/herd/{number}"), f"h{before}-{number}") for number in range(size)]
        async with client(self._url) as http:
            self.outcomes += await asyncio.gather(*(perform(http, ask) for ask in asks))

    async def _call(self, number: int) -> None:
        random = Random(f"{self._seed}/{number}")
        async with client(self._url) as http, client(self._url, slow=True) as slow:
            count = 0
            while not self._stopping:
                ask = self._ask(random, f"c{number}-{count}")
                self.outcomes.append(await perform(slow if ask.manner == "reads slowly" else http, ask))
                await asyncio.sleep(random.expovariate(1 / self._mix.pause))
                count += 1

    def _ask(self, random: Random, name: str) -> Ask:
        mix, luck = self._mix, random.random()
        stream = random.random() < 0.6
        manner: Manner = "leaves" if luck < mix.leaving else "reads"
        if stream and luck > 1 - mix.slow:
            manner = "reads slowly"
        length = random.randint(1, mix.longest) * (10 if random.random() < 0.1 else 1)
        return Ask(
            id=f"chaos-{self._seed}-{name}",
            caller=random.choice(CALLERS),
            adapter=random.choice((None, *ADAPTERS)),
            tier=random.choice(("priority", "flex", "auto")),
            prompt=tuple(random.choices(VOCABULARY, k=random.randint(1, mix.longest_prompt))),
            max_tokens=length,
            seed=random.randrange(1000),
            stream=stream,
            manner=manner,
        )


def client(url: str, *, slow: bool = False) -> httpx.AsyncClient:
    """Every request on a connection of its own: a kept one may be closed from the other end just as it is used."""
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)] if slow else []
    limits = httpx.Limits(max_keepalive_connections=0, max_connections=None)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options)
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE_SECONDS)


async def ask_again(url: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Ask all answered requests again, some at a time. Returns what became of them; each answer of `outcomes` that is
    another is an oddity of its own."""
    places = asyncio.Semaphore(AGAIN_AT_ONCE)

    async def compare(http: httpx.AsyncClient, outcome: Outcome) -> Outcome:
        async with places:
            other = await perform(http, outcome.ask.again())
        if other.ending != "answered" or other.tokens != outcome.tokens:
            outcome.oddities.append(f"another answer than undisturbed, when it was {other.ending}")
        return other

    async with client(url) as http:
        return await asyncio.gather(*(compare(http, each) for each in outcomes if each.ending == "answered"))


async def perform(http: httpx.AsyncClient, ask: Ask) -> Outcome:
    now = asyncio.get_running_loop().time
    outcome = Outcome(ask, now())
    headers = {"authorization": f"Bearer {ask.caller.key}", "x-request-id": ask.id, "connection": "close"}
    try:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            http.stream("POST", "/v1/completions", json=ask.body(), headers=headers) as answer,
        ):
            outcome.status = answer.status_code
            await _read(answer, outcome)
    except httpx.TransportError:
        pass  # broken, unless the end had come already
    except TimeoutError:
        outcome.ending = "forsaken"
    outcome.ended = now()
    return outcome


async def _read(answer: httpx.Response, outcome: Outcome) -> None:
    if answer.headers.get("x-request-id") != outcome.ask.id:
        outcome.oddities.append(f"x-request-id is {answer.headers.get('x-request-id')}")
    if answer.status_code != 200:
        error = json.loads(await answer.aread())["error"]
        outcome.ending, outcome.code = "refused", error["code"]
    elif outcome.ask.manner == "leaves":
        await anext(answer.aiter_raw(), b"")
        outcome.ending = "left"
    elif outcome.ask.stream:
        await _read_stream(answer, outcome)
    else:
        _take_whole(json.loads(await answer.aread()), outcome)


async def _read_stream(answer: httpx.Response, outcome: Outcome) -> None:
    finishes, ended, failed = 0, False, False
    async for event in _events(answer, slowly=outcome.ask.manner == "reads slowly"):
        if ended or (failed and event != "[DONE]"):
            outcome.oddities.append(f"after the end came {event[:80]}")
        if event == "[DONE]":
            ended, outcome.ending = True, "failed" if failed else "answered"
            continue
        body = json.loads(event)
        if "error" in body:
            failed, outcome.ending, outcome.code = True, "failed", body["error"]["code"]
            continue
        finishes += sum(choice["finish_reason"] is not None for choice in body["choices"])
        outcome.tokens += [token for choice in body["choices"] for token in choice.get("token_ids") or ()]
        _note_usage(body, outcome)
    if outcome.ending == "answered" and finishes != 1:
        outcome.oddities.append(f"{finishes} finish reasons")


async def _events(answer: httpx.Response, *, slowly: bool) -> AsyncIterator[str]:
    """What every event says, without the pings between them."""
    left = ""
    async for piece in answer.aiter_text():
        *whole, left = (left + piece).split("\n")
        for line in whole:
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
        if slowly:
            await asyncio.sleep(0.02)


def _take_whole(body: dict[str, Any], outcome: Outcome) -> None:
    [choice] = body["choices"]
    outcome.ending, outcome.tokens = "answered", choice["token_ids"]
    _note_usage(body, outcome)


def _note_usage(body: dict[str, Any], outcome: Outcome) -> None:
    usage = body.get("usage")
    if usage:
        outcome.used = usage["prompt_tokens"] + usage["completion_tokens"]
        if usage["completion_tokens"] != len(outcome.tokens) or usage["prompt_tokens"] != len(outcome.ask.prompt):
            outcome.oddities.append(f"usage is {usage} of {len(outcome.tokens)} tokens")
