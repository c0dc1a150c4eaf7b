"""Every policy over HTTP and over gRPC: a member that fails, a deadline, a caller who leaves, and exact usage and
limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest
from fakes import ACME, BASE
from grpc_app import as_key, open_grpc_app, refused

from engine.executor.fake import FAKE_HIDDEN
from gateway.core.limits import Limits
from gateway.pb import generation_pb2 as pb
from gateway.requests.route_runner import RouteTable
from gateway.virtual_models.acceptance import Acceptance
from gateway.virtual_models.by_lane import ByLane
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.learned import Learned
from gateway.virtual_models.policy import MemberState, Shadow
from gateway.virtual_models.split import Split
from tests.gateway.virtual_models.test_learned import write_router
from tests.gateway.virtual_models.test_virtual_models import PROMPT_TOKENS, ROUTE, SMALL, USED, small_engine

POLICIES = {
    "split": lambda folder: Split({SMALL: 1}),
    "shadow": lambda folder: Split({SMALL: 1}, shadow=Shadow(BASE)),
    "lane": lambda folder: ByLane(interactive=SMALL, batch=BASE),
    "fallback": lambda folder: Fallback((SMALL, BASE)),
    "cascade": lambda folder: Cascade((SMALL, BASE), Acceptance(logprob=-1.0)),
    "learned": lambda folder: Learned(write_router(folder / "router.json", FAKE_HIDDEN), SMALL, BASE),
}
"""Each sends the question to the small member."""
REASONS = {
    "split": "split",
    "shadow": "split",
    "lane": "lane",
    "fallback": "first",
    "cascade": "accepted",
    "learned": "small",
}
REPLACED = {"fallback": "engine_unavailable", "cascade": "engine_unavailable", "learned": "no_vector"}
"""Why the large member answers if the small one fails, by policy; the others have no second member to try."""


class HttpCaller:
    """Asks over HTTP. Answers are (member, reason), errors their codes."""

    def __init__(self, api) -> None:
        self._app = api.gateway_app

    async def ask(self, seconds: float | None = None) -> tuple[str, str] | str:
        limit = {} if seconds is None else {"timeout": seconds}
        async with self._app.client() as client:
            body = {"model": ROUTE, "messages": [{"role": "user", "content": "hi"}], **limit}
            answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return answer.json()["error"]["code"]
        return answer.headers["x-loralane-model"], answer.headers["x-loralane-reason"]

    @asynccontextmanager
    async def asking(self):
        """Leave while the answer is under way."""
        running = asyncio.create_task(self.ask())
        yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class GrpcCaller:
    def __init__(self, api) -> None:
        self._generation = api.generation

    def _call(self, seconds: float | None = None):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        return self._generation.Generate(pb.GenerateRequest(model=ROUTE, chat=chat), metadata=as_key(), timeout=seconds)

    async def ask(self, seconds: float | None = None) -> tuple[str, str] | str:
        call = self._call(seconds)
        if await call.code() is not grpc.StatusCode.OK:
            return (await refused(call)).reason.lower()
        initial = dict(await call.initial_metadata())
        return initial["x-loralane-model"], initial["x-loralane-reason"]

    @asynccontextmanager
    async def asking(self):
        call = self._call()
        yield
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call


class Room:
    def __init__(self, policy: str, api, caller, small) -> None:
        self.policy, self.caller, self.small = policy, caller, small
        self.app = api.gateway_app

    async def charged(self) -> dict[str, int]:
        """Tokens in usage by name, once nothing runs any more."""
        await self.app.gateway.close()
        found = Counter()
        for row in self.app.limiter.rows:
            found[row.name.adapter] += row.counts.tokens
        return {name: tokens - self.vector * (name == SMALL) for name, tokens in found.items()}

    @property
    def vector(self) -> int:
        """Tokens that vectors were charged."""
        return PROMPT_TOKENS * sum(request.pooling is not None for request in self.small.requests)

    @property
    def answers(self) -> list[str]:
        """How the small member's answers ended."""
        return [
            self.small.ends[one.id] for one in self.small.requests if one.pooling is None and one.id in self.small.ends
        ]


@pytest.fixture(params=POLICIES)
def policy(request):
    return request.param


@pytest.fixture(params=[HttpCaller, GrpcCaller], ids=["http", "grpc"])
async def room(request, policy, tmp_path):
    small = small_engine()
    routes = RouteTable({ROUTE: POLICIES[policy](tmp_path)}, lambda member: MemberState(ttft_s=30.0))
    async with open_grpc_app(tmp_path, others={SMALL: small}, routes=routes) as api:
        yield Room(policy, api, request.param(api), small)
        await api.assert_empty()
        assert small.open == 0


async def test_the_member_that_answers_is_charged_once(room):
    assert await room.caller.ask() == (SMALL, REASONS[room.policy])
    assert await room.charged() == {SMALL: USED[SMALL]}
    assert room.vector == (PROMPT_TOKENS if room.policy == "learned" else 0)


async def test_a_member_that_fails_is_replaced_or_its_error_is_told_and_nothing_is_charged_for_it(room):
    room.small.fail_after = 1  # after the event of its admission
    answer, reason = await room.caller.ask(), REPLACED.get(room.policy)
    assert answer == ((BASE, reason) if reason else "engine_unavailable")
    assert await room.charged() == ({BASE: USED[BASE]} if reason else {})


async def test_a_deadline_ends_the_member_and_what_it_computed_is_charged(room):
    room.small.go_on = asyncio.Event()
    assert await room.caller.ask(seconds=0.4) == "deadline_exceeded"
    assert await room.charged() == {SMALL: PROMPT_TOKENS + 1}
    assert room.answers == ["aborted"]


async def test_a_caller_who_leaves_ends_the_member_and_what_it_computed_is_charged(room):
    room.small.go_on = asyncio.Event()
    async with room.caller.asking(), asyncio.timeout(30):
        while not any(room.small.generated[one.id] for one in room.small.requests):
            await asyncio.sleep(0.002)
    async with asyncio.timeout(30):
        while not room.answers:
            await asyncio.sleep(0.002)
    assert await room.charged() == {SMALL: PROMPT_TOKENS + 1}
    assert room.answers == ["aborted"]


async def test_a_request_counts_once_in_the_limit_of_requests(room):
    await room.app.limiter.configure([replace(ACME, limits=Limits(requests_per_minute=1))])
    assert await room.caller.ask() == (SMALL, REASONS[room.policy])
    before = len(room.small.requests)
    assert await room.caller.ask() == "rate_limit_exceeded"
    assert await room.charged() == {SMALL: USED[SMALL]}
    assert len(room.small.requests) == before
