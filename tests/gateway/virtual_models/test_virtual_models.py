"""Virtual models over HTTP and gRPC: which member answers, what happens when members fail, and what is charged."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import ACME, BASE, TEMPLATE, FakeEngine, GatewayApp, build_gateway_app, key_ring, tiny_tokenizer
from grpc_app import as_key, open_grpc_app

from engine.core.messages.requests import Lane
from engine.pb import engine_pb2 as engine_pb
from engine.rpc.stream import EngineUnavailable
from gateway.batches.answers import LineName
from gateway.batches.lease import Lease
from gateway.batches.lines import LineRunner
from gateway.batches.record import Batch
from gateway.core.billing import BillingConfig, Price
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Principal
from gateway.core.usage import DeferredUsage
from gateway.pb import generation_pb2 as pb
from gateway.requests.route_runner import RouteTable
from gateway.virtual_models.acceptance import Acceptance, Verifier
from gateway.virtual_models.by_lane import ByLane
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.policy import MemberState, Policy, Shadow, Step
from gateway.virtual_models.split import Split

SMALL, JUDGE, ROUTE = "small", "judge", "auto"
SMALL_SAYS, LARGE_SAYS = "A small answer.", "Hello, world!"
PROMPT_TOKENS = len(["<|user", "<|end", "<|assistant", ""]) - 1 + len("hi")
CHEAP, DEAR = Decimal(1), Decimal(10)
USED = {BASE: PROMPT_TOKENS + len(LARGE_SAYS) + 1, SMALL: PROMPT_TOKENS + len(SMALL_SAYS) + 1}
"""Tokens of each member's answer to the question of `chat`: every byte is a token, and an EOS ends the answer."""


class Room:
    """A gateway with a virtual model, its members' engines, and the outcomes that it has reported."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.states: dict[str, MemberState] = {}
        self.outcomes = []
        self.app: GatewayApp

    @property
    def charged(self) -> dict[str, int]:
        """Tokens in usage by name."""
        found = Counter()
        for row in self.app.limiter.rows:
            found[row.name.adapter] += row.counts.tokens
        return dict(found)

    async def chat(self, key: str = "sk-acme", question: str = "hi", **fields):
        async with self.app.client(key) as client:
            body = {"model": ROUTE, "messages": [{"role": "user", "content": question}], **fields}
            return await client.post("/v1/chat/completions", json=body)


def small_engine(reply: str = SMALL_SAYS) -> FakeEngine:
    engine = FakeEngine(tiny_tokenizer(reverse=True))
    engine.reply = lambda request: reply
    return engine


@pytest.fixture
async def make_room(tmp_path: Path):
    rooms = []

    async def make(policy: Policy, **options) -> Room:
        room = Room()
        others = {SMALL: small_engine(), JUDGE: small_engine("yes")}
        table = RouteTable(
            {ROUTE: policy},
            lambda member: room.states.get(member, MemberState()),
            billing=BillingConfig(prices=(Price(CHEAP, CHEAP, adapter=SMALL), Price(DEAR, DEAR))),
            observe=room.outcomes.append,
        )
        room.table = table
        room.app = await build_gateway_app(tmp_path, others=others, routes=table, **options)
        room.engines = {BASE: room.app.engine, **others}
        rooms.append(room)
        return room

    yield make
    for room in rooms:
        await room.app.assert_empty()
        assert [name for name, engine in room.engines.items() if engine.open] == []


def answer_of(response) -> tuple[str, str, str]:
    """The text, the member and the reason, which header and body tell alike."""
    assert response.status_code == 200, response.text
    body = response.json()
    told = body["x_loralane"]
    assert (told["model"], told["reason"]) == (
        response.headers["x-loralane-model"],
        response.headers["x-loralane-reason"],
    )
    return body["choices"][0]["message"]["content"], told["model"], told["reason"]


async def test_a_split_follows_its_weights_and_keeps_a_conversation_on_one_member(make_room):
    room = await make_room(Split({BASE: 1, SMALL: 1}))
    members = {question: answer_of(await room.chat(question=question))[1] for question in map(str, range(16))}
    assert set(members.values()) == {BASE, SMALL}
    for question, member in members.items():
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "?"},
            {"role": "user", "content": "go on"},
        ]
        assert answer_of(await room.chat(messages=turns))[1] == member
    assert (await room.chat()).json()["model"] == ROUTE


async def test_a_split_by_tenant_and_a_weight_of_zero(make_room):
    room = await make_room(Split({BASE: 1, SMALL: 1}, sticky="tenant"))
    assert len({answer_of(await room.chat(question=str(at)))[1] for at in range(8)}) == 1
    alone = await make_room(Split({BASE: 0, SMALL: 3}, sticky="request"))
    assert {answer_of(await alone.chat())[1] for _ in range(4)} == {SMALL}


async def test_lanes_have_members_of_their_own(make_room):
    room = await make_room(ByLane(interactive=BASE, batch=SMALL))
    assert answer_of(await room.chat()) == (LARGE_SAYS, BASE, "lane")
    assert answer_of(await room.chat(service_tier="flex")) == (SMALL_SAYS, SMALL, "lane")


async def test_a_shadow_answers_in_the_batch_lane_for_no_tenant(make_room):
    room = await make_room(Split({BASE: 1}, shadow=Shadow(SMALL, at_once=1)))
    small = room.engines[SMALL]
    small.admit = asyncio.Event()
    assert answer_of(await room.chat()) == (LARGE_SAYS, BASE, "split")
    assert answer_of(await room.chat())[1] == BASE
    while not small.requests:
        await asyncio.sleep(0)
    [copied] = small.requests  # the second copy found no room
    assert (copied.lane, copied.tenant) == (Lane.BATCH, "virtual-model-copy")
    small.admit.set()
    while len(room.outcomes) < 3:
        await asyncio.sleep(0.001)
    assert room.charged == {BASE: 2 * USED[BASE]}
    [shadow] = [outcome for outcome in room.outcomes if outcome.reason == "shadow"]
    assert sum(run.prompt + run.completion for run in shadow.runs) == USED[SMALL]
    assert "virtual-model-copy" not in {reserved.tenant for reserved in room.app.limiter.reserved}


async def test_a_fallback_passes_over_members_that_are_slow_or_away(make_room):
    room = await make_room(Fallback((BASE, SMALL)))
    assert answer_of(await room.chat()) == (LARGE_SAYS, BASE, "first")
    room.states[BASE] = MemberState(wait_s=0.6)
    assert answer_of(await room.chat()) == (SMALL_SAYS, SMALL, "queue")
    assert answer_of(await room.chat(service_tier="flex"))[1] == BASE
    room.states[BASE] = MemberState(ready=False)
    assert answer_of(await room.chat())[1:] == (SMALL, "down")
    room.states[SMALL] = MemberState(wait_s=9.0)
    assert answer_of(await room.chat())[1:] == (SMALL, "down")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fallback_leaves_a_member_that_fails_before_its_first_token(make_room, stream):
    room = await make_room(Fallback((BASE, SMALL)))
    room.app.engine.fail_after = 1  # after the event of its admission
    response = await room.chat(stream=stream)
    assert response.headers["x-loralane-reason"] == "engine_unavailable"
    assert (json.dumps(SMALL_SAYS) in response.text) or stream
    assert room.charged == {SMALL: USED[SMALL]}
    [outcome] = room.outcomes
    assert (outcome.member, outcome.reason) == (SMALL, "engine_unavailable")


async def test_a_fallback_does_not_change_members_after_the_first_token(make_room):
    room = await make_room(Fallback((BASE, SMALL)))
    room.app.engine.fail_after = 2
    room.app.engine.ready = True
    answer = await room.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert room.engines[SMALL].requests == []


async def test_a_fallback_takes_prompts_that_are_too_long_to_a_longer_context(make_room):
    room = await make_room(Fallback((SMALL, BASE)))
    room.engines[SMALL].info.max_model_len = 64
    _, member, reason = answer_of(await room.chat(question="x" * 100))
    assert (member, reason) == (BASE, "context_length_exceeded")
    assert (await room.chat(question="x" * 300)).json()["error"]["code"] == "context_length_exceeded"
    assert [asked.is_counted for asked in room.app.limiter.reserved] == [False, True, False, True]


async def test_a_cascade_sends_the_small_answer_if_it_passes(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-1.0)))
    response = await room.chat()
    assert answer_of(response) == (SMALL_SAYS, SMALL, "accepted")
    assert response.json()["choices"][0]["logprobs"] is None
    assert "discarded" not in response.json()["x_loralane"]
    assert room.charged == {SMALL: USED[SMALL]}
    [outcome] = room.outcomes
    assert (outcome.member, outcome.reason) == (SMALL, "accepted")
    millionth = Decimal(USED[SMALL]).scaleb(-6)
    assert outcome.costs == (millionth * CHEAP, millionth * DEAR)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cascade_escalates_what_is_uncertain_and_charges_both(make_room, stream):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    response = await room.chat(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    discarded = [{"model": SMALL, "prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(SMALL_SAYS) + 1}]
    told = {"model": BASE, "reason": "logprob", "discarded": discarded}
    if stream:
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert [chunk["x_loralane"] for chunk in chunks] == [told] * len(chunks)
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
        assert (said, chunks[-1]["usage"]["completion_tokens"]) == (LARGE_SAYS, len(LARGE_SAYS) + 1)
    else:
        assert answer_of(response)[:2] == (LARGE_SAYS, BASE)
        assert response.json()["x_loralane"] == told
    assert room.charged == USED
    assert room.app.limiter.reserved[0].tokens == 2 * room.app.limiter.reserved[1].tokens
    [outcome] = room.outcomes
    assert outcome.reason == "logprob" and outcome.costs.actual > outcome.costs.dearest


async def test_a_cascade_refuses_answers_that_were_cut_off(make_room):
    room = await make_room(Cascade((SMALL, BASE)))
    room.engines[SMALL].reply = lambda request: "long" * 100
    assert answer_of(await room.chat(max_tokens=20))[1:] == (BASE, "invalid")
    room.engines[SMALL].reply = lambda request: SMALL_SAYS
    assert answer_of(await room.chat(n=2, max_tokens=20))[1:] == (SMALL, "accepted")


async def test_a_batch_learns_that_the_first_member_works_while_its_answer_is_held_back(make_room):
    room, begun = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4))), []
    room.engines[SMALL].go_on = asyncio.Event()
    body = json.dumps({"model": ROUTE, "messages": [{"role": "user", "content": "hi"}]}).encode()
    batch = Batch("batch_1", ACME.name, "", "/v1/chat/completions", "file-1", "1h", total=1, shard_size=128)
    holders = SimpleNamespace(holder=lambda tenant, key_id: Principal(ACME, key_id))
    now = asyncio.get_running_loop().time()
    lines = LineRunner(room.app.gateway, holders, Lease(batch, "shard", 1, 3600.0, 0, 0, 1), now)
    running = asyncio.create_task(
        lines.run(LineName("batch_1", 1, "a"), body, lambda: begun.append(1), DeferredUsage())
    )
    while not (begun or running.done()):
        await asyncio.sleep(0.001)
    assert begun == [1] and not running.done()
    room.engines[SMALL].go_on.set()
    assert json.loads((await running).text)["response"]["body"]["x_loralane"]["model"] == BASE
    assert begun == [1]


async def test_a_cascade_refuses_answers_that_say_nothing(make_room):
    room = await make_room(Cascade((SMALL, BASE)))
    room.engines[SMALL].reply = lambda request: " \n"
    assert answer_of(await room.chat())[1:] == (BASE, "invalid")


async def test_a_cascade_wants_two_samples_to_agree(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(agreement=True)))
    assert answer_of(await room.chat(temperature=0))[1:] == (SMALL, "accepted")
    first, second = room.engines[SMALL].requests
    assert (first.params.temperature, second.params.temperature) == (0, 0.7)
    assert room.charged == {SMALL: 2 * USED[SMALL]}
    said = iter(("It is 4.", "It is 5."))
    room.engines[SMALL].reply = lambda request: next(said)
    assert answer_of(await room.chat())[1:] == (BASE, "disagreement")


async def test_a_cascade_asks_a_verifier(make_room):
    verifier = Verifier(JUDGE, "Is {answer} right for {question}?")
    room = await make_room(Cascade((SMALL, BASE), Acceptance(verifier=verifier)))
    assert answer_of(await room.chat(question="{answer}"))[1:] == (SMALL, "accepted")
    [asked] = room.engines[JUDGE].requests
    read = room.engines[JUDGE].tokenizer.decode(asked.prompt_ids, skip_special=False)
    assert f"Is {SMALL_SAYS} right for {{answer}}?" in read
    assert asked.params.max_tokens == 1
    room.engines[JUDGE].reply = lambda request: "no"
    response = await room.chat()
    assert answer_of(response)[1:] == (BASE, "verifier")
    assert [run["model"] for run in response.json()["x_loralane"]["discarded"]] == [SMALL, ROUTE]  # not JUDGE
    assert set(room.charged) == {SMALL, JUDGE, BASE}


async def test_the_operator_s_verifier_judges_for_tenants_that_may_not_name_it(make_room):
    verifier = Verifier("poet", "Is {answer} right?")
    room = await make_room(Cascade((SMALL, BASE), Acceptance(verifier=verifier)))
    room.app.engine.reply = lambda request: "yes" if request.adapter_hash else LARGE_SAYS
    room.app.open_again(key_ring({"sk-acme": replace(ACME, adapters=(ROUTE,))}))
    assert answer_of(await room.chat())[1:] == (SMALL, "accepted")
    assert (await room.chat(model="poet")).status_code == 404


CALL = '<tool_call>{"name": "add", "arguments": {"a": %s}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def test_a_cascade_judges_tool_calls(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(agreement=True)))
    room.engines[SMALL].reply = lambda request: CALL % "1"
    response = await room.chat(tools=[TOOL])
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["arguments"], response.headers["x-loralane-model"]) == ('{"a": 1}', SMALL)
    said = iter((CALL % "1", CALL % "2"))
    room.engines[SMALL].reply = lambda request: next(said)
    assert answer_of(await room.chat(tools=[TOOL]))[1:] == (BASE, "disagreement")
    room.engines[SMALL].reply = lambda request: CALL % "1,"
    assert answer_of(await room.chat(tools=[TOOL]))[1:] == (BASE, "invalid")


async def test_a_cascade_judges_what_follows_a_schema(make_room):
    room = await make_room(Cascade((SMALL, BASE)))
    wanted = {"response_format": {"type": "json_object"}}
    room.engines[SMALL].reply = lambda request: '{"a": 1}'
    assert answer_of(await room.chat(**wanted))[1:] == (SMALL, "accepted")
    room.engines[SMALL].reply = lambda request: '{"a": '  # a fake engine, which follows no grammar
    assert answer_of(await room.chat(**wanted))[1:] == (BASE, "invalid")


async def test_what_limits_refuse_is_not_copied(make_room):
    room = await make_room(Split({BASE: 1}, shadow=Shadow(SMALL)))
    await room.app.limiter.configure([replace(ACME, limits=Limits(tokens_per_minute=10))])
    assert (await room.chat(max_tokens=30)).status_code == 429
    assert room.engines[SMALL].requests == []


async def test_a_cascade_whose_member_fails_uses_the_other(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    room.engines[SMALL].ready = False
    assert answer_of(await room.chat())[1:] == (BASE, "engine_unavailable")
    room.engines[SMALL].ready, room.app.engine.ready = True, False
    assert answer_of(await room.chat()) == (SMALL_SAYS, SMALL, "engine_unavailable")
    room.engines[SMALL].ready = False
    assert (await room.chat()).json()["error"]["code"] == "engine_unavailable"
    assert room.outcomes[-1].reason == "failed"


async def test_a_stream_of_a_cascade_does_not_wait_for_ever(make_room):
    room = await make_room(Cascade((SMALL, BASE), patience=0.1))
    room.engines[SMALL].admit = asyncio.Event()
    response = await room.chat(stream=True)
    assert (response.headers["x-loralane-model"], response.headers["x-loralane-reason"]) == (BASE, "slow")
    assert list(room.engines[SMALL].ends.values()) == ["aborted"]


async def test_a_plan_that_ends_with_a_member_that_is_too_slow_ends_with_the_deadline(make_room, monkeypatch):
    async def plan(policy, asked):
        return [Step(SMALL, "small", Acceptance(), patience_s=0.05)]

    room = await make_room(Cascade((SMALL, BASE)))
    monkeypatch.setattr(Cascade, "plan", plan)
    room.engines[SMALL].admit = asyncio.Event()
    answer = await room.chat(stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_member_that_is_too_slow_before_its_reservation_counts_the_request_once(make_room, monkeypatch):
    async def never(*args, **more):
        await asyncio.Event().wait()

    room = await make_room(Cascade((SMALL, BASE), patience=0.1))
    monkeypatch.setattr(room.app.gateway.models.find(SMALL)[0].tokenizer, "encode_chat", never)
    assert (await room.chat(stream=True)).headers["x-loralane-reason"] == "slow"
    assert [asked.is_counted for asked in room.app.limiter.reserved] == [False, True]


async def test_a_member_that_is_too_slow_while_its_failure_is_counted_counts_the_request_once(make_room, monkeypatch):
    room = await make_room(Cascade((SMALL, BASE), patience=0.1))
    limiter, reserve = room.app.limiter, room.app.limiter.reserve

    async def reserve_slowly(wanted):
        monkeypatch.setattr(limiter, "reserve", reserve)
        await asyncio.sleep(0.2)  # four times the patience
        return await reserve(wanted)

    monkeypatch.setattr(limiter, "reserve", reserve_slowly)
    room.engines[SMALL].ready = False
    assert (await room.chat(stream=True)).headers["x-loralane-reason"] == "slow"
    assert [asked.is_counted for asked in limiter.reserved] == [False, True]


async def test_a_member_that_is_too_slow_while_it_is_settled_has_left_its_slot(make_room, monkeypatch):
    room = await make_room(Cascade((SMALL, BASE), patience=0.1))
    limiter, settle = room.app.limiter, room.app.limiter.settle
    await limiter.configure([replace(ACME, limits=Limits(concurrent_requests=1))])

    async def settle_slowly(grant, tokens):
        monkeypatch.setattr(limiter, "settle", settle)
        await asyncio.sleep(0.2)  # four times the patience
        await settle(grant, tokens)

    monkeypatch.setattr(limiter, "settle", settle_slowly)
    room.engines[SMALL].fail_after = 0
    assert (await room.chat(stream=True)).headers["x-loralane-reason"] == "slow"


async def test_a_deadline_counts_from_the_arrival_and_ends_all_members(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    room.app.engine.go_on = asyncio.Event()
    answer = await room.chat(timeout=1.0)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert list(room.app.engine.ends.values()) == ["aborted"]
    assert room.outcomes[0].member == BASE


async def test_a_client_that_leaves_ends_the_member_that_works(make_room):
    room = await make_room(Cascade((SMALL, BASE)))
    room.engines[SMALL].go_on = asyncio.Event()
    running = asyncio.create_task(room.chat())
    while not room.engines[SMALL].generated:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert list(room.engines[SMALL].ends.values()) == ["aborted"]
    assert room.app.engine.requests == []


async def test_limits_refuse_what_only_the_small_member_would_fit(make_room):
    room = await make_room(Cascade((SMALL, BASE)))
    await room.app.limiter.configure([replace(ACME, limits=Limits(tokens_per_minute=100))])
    refused = await room.chat(max_tokens=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert answer_of(await room.chat(max_tokens=30))[1] == SMALL
    assert answer_of(await room.chat(max_tokens=30))[1] == SMALL  # the first was settled by what it used


async def test_a_fallback_reserves_the_tokens_of_one_member(make_room):
    room = await make_room(Fallback((BASE, SMALL)))
    await room.app.limiter.configure([replace(ACME, limits=Limits(tokens_per_minute=100))])
    assert answer_of(await room.chat(max_tokens=60))[1] == BASE


async def test_a_cascade_sends_what_it_held_back_if_limits_refuse_the_next_member(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    await room.app.limiter.set_limits(Scope(ACME.name, adapter=BASE), {"requests_per_minute": 1})
    assert answer_of(await room.chat()) == (LARGE_SAYS, BASE, "logprob")
    assert answer_of(await room.chat()) == (SMALL_SAYS, SMALL, "rate_limit_exceeded")


async def test_an_escalated_request_counts_once_in_the_tenant_s_limits(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    await room.app.limiter.configure([replace(ACME, limits=Limits(requests_per_minute=2, concurrent_requests=1))])
    assert answer_of(await room.chat()) == (LARGE_SAYS, BASE, "logprob")
    room.app.engine.ready = False
    assert answer_of(await room.chat()) == (SMALL_SAYS, SMALL, "engine_unavailable")
    assert (await room.chat()).json()["error"]["code"] == "rate_limit_exceeded"


async def test_an_escalated_request_does_not_exceed_the_limit_of_concurrent_requests(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    await room.app.limiter.configure([replace(ACME, limits=Limits(concurrent_requests=1))])
    limiter, others = room.app.limiter, []
    settle = limiter.settle

    async def settle_and_lose_the_slot(grant, tokens):
        limiter.settle = settle
        await settle(grant, tokens)
        others.append(await limiter.reserve(grant.request))

    limiter.settle = settle_and_lose_the_slot
    assert answer_of(await room.chat()) == (SMALL_SAYS, SMALL, "rate_limit_exceeded")
    await limiter.settle(*others, 0)


async def test_a_request_that_fails_counts_once_in_the_requests_of_a_minute(make_room):
    room = await make_room(Fallback((BASE, SMALL)))
    await room.app.limiter.configure([replace(ACME, limits=Limits(requests_per_minute=2, tokens_per_minute=300))])
    room.app.engine.fail_after = room.engines[SMALL].fail_after = 1
    codes = [(await room.chat(max_tokens=100)).json()["error"]["code"] for _ in range(3)]
    assert codes == ["engine_unavailable", "engine_unavailable", "rate_limit_exceeded"]


def make_deadly(engine: FakeEngine) -> None:
    """Let every request crash the engine. The next process tells that the last one had been computed alone."""

    async def crash(request):
        engine.ready, engine.ends[request.id] = False, "failed"
        asyncio.get_running_loop().call_later(0.01, setattr, engine, "ready", True)
        raise EngineUnavailable("gone")
        yield []

    async def learn_fate(life: str) -> engine_pb.PreviousLife:
        return engine_pb.PreviousLife(life=life, crashed=True, request_ids=[engine.requests[-1].id])

    engine._arriving, engine.fate, engine.learn_fate = crash, lambda life: None, learn_fate


@pytest.mark.parametrize("policy", [Fallback((SMALL, JUDGE, BASE)), Cascade((SMALL, JUDGE, BASE))])
async def test_a_request_that_crashes_engines_does_not_take_one_of_each_member(make_room, policy):
    room = await make_room(policy)
    for engine in room.engines.values():
        make_deadly(engine)
    answer = await room.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crashed")
    taken = {name: [request.suspect for request in engine.requests] for name, engine in room.engines.items()}
    assert taken == {SMALL: [False], JUDGE: [True], BASE: []}
    assert room.charged == {}


async def test_a_member_that_is_too_slow_after_a_crash_leaves_a_suspect(make_room):
    room = await make_room(Cascade((SMALL, BASE), patience=0.1, shadow=Shadow(JUDGE)))
    small, arriving = room.engines[SMALL], FakeEngine._arriving

    async def crash_once(request):
        if len(small.requests) == 1:
            small.ends[request.id] = "failed"
            raise EngineUnavailable("gone")
        async for events in arriving(small, request):
            yield events

    small._arriving, small.fate, small.admit = crash_once, lambda life: None, asyncio.Event()
    assert (await room.chat(stream=True)).headers["x-loralane-reason"] == "slow"
    taken = {name: [request.suspect for request in engine.requests] for name, engine in room.engines.items()}
    assert taken == {SMALL: [False, True], BASE: [True], JUDGE: []}


async def test_a_slow_member_does_not_lose_what_an_earlier_one_said(make_room):
    room = await make_room(Cascade((SMALL, JUDGE, BASE), Acceptance(logprob=-0.4), patience=0.1))
    room.engines[JUDGE].admit, room.app.engine.ready = asyncio.Event(), False
    answer = await room.chat(stream=True)
    assert (answer.headers["x-loralane-model"], answer.headers["x-loralane-reason"]) == (SMALL, "engine_unavailable")


async def test_a_verifier_sees_the_prompt_of_each_answer(make_room):
    verifier = Verifier(JUDGE, "Is {answer} right for {question}?")
    room = await make_room(Cascade((SMALL, BASE), Acceptance(verifier=verifier)))
    async with room.app.client() as client:
        body = {"model": ROUTE, "prompt": ["one", "two"], "n": 2, "max_tokens": 20}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    judge = room.engines[JUDGE]
    read = [judge.tokenizer.decode(asked.prompt_ids, skip_special=False) for asked in judge.requests]
    assert ["one" if "for one?" in said else "two" for said in read] == ["one", "one", "two", "two"]


async def test_members_that_a_tenant_may_not_use_are_left_out(make_room):
    room = await make_room(Fallback(("poet", BASE)))
    assert (await room.chat("sk-globex")).status_code == 404  # the virtual model is not among its patterns
    async with room.app.client() as client:
        cards = (await client.get("/v1/models")).json()["data"]
        [card] = [card for card in cards if card["id"] == ROUTE]
        one = (await client.get(f"/v1/models/{ROUTE}")).json()
    assert card == one and (card["root"], card["parent"]) == (BASE, None)
    async with room.app.client("sk-globex") as client:
        assert ROUTE not in [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def test_a_virtual_model_refuses_vectors_of_two_models_and_adapters_beside_it(make_room):
    room = await make_room(Split({BASE: 1, SMALL: 1}))
    async with room.app.client() as client:
        vector = await client.post("/v1/embeddings", json={"model": ROUTE, "input": "hi"})
    assert (vector.status_code, vector.json()["error"]["param"]) == (400, "model")
    both = await room.chat(adapter_id="pirate")
    assert (both.status_code, both.json()["error"]["param"]) == (400, "adapter_id")
    assert {record.status for record in room.app.watcher.records} == {400}


async def test_an_adapter_cannot_take_the_name_of_a_virtual_model(make_room, tmp_path):
    room = await make_room(Split({BASE: 1}))
    body = {"name": ROUTE, "source": str(tmp_path / "pirate"), "base_model": SMALL}
    async with room.app.client("sk-admin") as client:
        answer = await client.post("/admin/v1/adapters", json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"{ROUTE!r} is the name of a virtual model")


async def test_thinking_needs_a_member_that_shows_it(make_room, monkeypatch):
    room = await make_room(Fallback((BASE, SMALL)))
    monkeypatch.setattr(room.engines[SMALL].tokenizer._template, "chat_template", TEMPLATE + "{# <think> #}")
    body = {"model": ROUTE, "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
    async with room.app.client() as client:
        thinking = await client.post("/v1/messages", json=body | {"thinking": {"type": "enabled"}})
        assert (thinking.status_code, thinking.headers["x-loralane-model"]) == (200, SMALL)
        assert (await client.post("/v1/messages", json=body)).headers["x-loralane-model"] == BASE


async def test_messages_and_responses_use_virtual_models_too(make_room):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    async with room.app.client() as client:
        said = [{"role": "user", "content": "hi"}]
        message = await client.post("/v1/messages", json={"model": ROUTE, "max_tokens": 30, "messages": said})
        response = await client.post("/v1/responses", json={"model": ROUTE, "input": "hi"})
        completion = await client.post("/v1/completions", json={"model": ROUTE, "prompt": "hi", "max_tokens": 30})
    assert message.json()["content"][0]["text"] == LARGE_SAYS
    assert response.json()["output"][0]["content"][0]["text"] == LARGE_SAYS
    assert completion.json()["choices"][0]["text"] == LARGE_SAYS
    assert {answer.headers["x-loralane-model"] for answer in (message, response, completion)} == {BASE}


async def test_virtual_models_over_grpc(make_room, tmp_path):
    room = await make_room(Cascade((SMALL, BASE), Acceptance(logprob=-0.4)))
    async with open_grpc_app(tmp_path, others={SMALL: small_engine()}, routes=room.table) as api:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        call = api.generation.Generate(pb.GenerateRequest(model=ROUTE, chat=chat), metadata=as_key())
        answer = await call
        initial = dict(await call.initial_metadata())
    assert answer.choices[0].text == LARGE_SAYS
    assert (initial["x-loralane-model"], initial["x-loralane-reason"]) == (BASE, "logprob")
