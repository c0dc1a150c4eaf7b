import asyncio
import random
from dataclasses import replace

import pytest
from fakes import ACME, BASE, CONTEXT, FakeStream, GatewayApp, build_gateway_app, ids_of, principal
from msgspec.structs import replace as replace_fields
from records import make_request

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import (
    ErrorCode,
    FinishReason,
    Lane,
    ProposalCount,
    Refusal,
    SamplingParams,
    TokenEvent,
)
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Principal, Tenant
from gateway.core.usage import DeferredUsage
from gateway.requests import engine_backend
from gateway.requests.settings import ServiceSettings
from gateway.requests.streams import join_chunks, merge_streams
from gateway.requests.types import Chat, GenerateRequest
from gateway.text.stop_strings import StopStrings

USUAL = len(ids_of("Hello, world!")) + 1
"""Tokens of the fake engine's answer, the end included."""


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


def request(prompt="Say hello", model=BASE, **fields) -> GenerateRequest:
    inputs = prompt if isinstance(prompt, list) else [prompt]
    return make_request(model, *inputs, **fields)


async def answers(gateway_app, wanted, who=None):
    """What was admitted, one whole chunk an answer, and the usage."""
    async with gateway_app.gateway.generate(who or principal(), wanted) as generation:
        chunks = [chunk async for chunk in generation]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    indices = sorted({chunk.answer for chunk in chunks})
    whole = [join_chunks([chunk for chunk in chunks if chunk.answer == index]) for index in indices]
    return generation.admitted, whole, chunks[-1].usage


async def refusal(gateway_app, wanted, who=None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await answers(gateway_app, wanted, who)
    await gateway_app.assert_empty()
    return caught.value


def settled(gateway_app):
    return list(gateway_app.limiter.ends.values())


async def test_an_answer_and_what_it_cost(gateway_app):
    gateway_app.engine.cached = lambda request: 4
    admitted, [answer], usage = await answers(gateway_app, request(max_tokens=50))
    assert (answer.text, answer.finish_reason) == ("Hello, world!", "stop")
    prompt, completion = len(ids_of("Say hello")), len(ids_of("Hello, world!")) + 1
    assert (usage.prompt, usage.completion, usage.cached) == (prompt, completion, 4)
    assert gateway_app.limiter.reserved[0].tokens == prompt + 50
    assert settled(gateway_app) == [[prompt + completion]]
    assert admitted.headers()["x-loralane-lane"] == "interactive"
    await gateway_app.assert_empty()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_what_was_made_before_an_administrator_ended_it_is_charged(gateway_app, monkeypatch, whole, at_once):
    async def ending(wanted):
        gateway_app.engine.requests.append(wanted)
        gateway_app.engine.ends[wanted.id] = "cancelled"
        refusal = Refusal(ErrorCode.CANCELLED, "an administrator cancelled the request")
        events = [TokenEvent(wanted.id, (65,)), TokenEvent(wanted.id, (66,) * 25, device_seconds=2.5)]
        events.append(TokenEvent(wanted.id, finish_reason=FinishReason.ERROR, refusal=refusal))
        for arrived in [events] if at_once else [[event] for event in events]:
            yield arrived

    def generate(wanted, session="", handover=None):
        return FakeStream(ending(wanted), lambda: None)

    monkeypatch.setattr(gateway_app.engine, "generate", generate)
    assert (await refusal(gateway_app, request(max_tokens=50, coalesce=whole))).fault is Fault.CANCELLED
    assert settled(gateway_app) == [[len(ids_of("Say hello")) + 26]]
    assert gateway_app.watcher.records[0].work.device_seconds == 2.5


async def test_output_is_bounded_by_max_tokens(gateway_app):
    _, [answer], usage = await answers(gateway_app, request(max_tokens=5))
    assert (answer.text, answer.finish_reason, usage.completion) == ("Hello", "length", 5)


async def test_without_max_tokens_the_context_is_the_bound(gateway_app):
    await answers(gateway_app, request("x" * 200))
    assert gateway_app.engine.requests[0].params.max_tokens == CONTEXT - 200


async def test_without_max_tokens_the_rest_of_the_context_or_the_protocols_default_is_the_bound(gateway_app):
    await answers(gateway_app, request())
    await answers(gateway_app, request(default_max_tokens=3))
    rest = CONTEXT - len(ids_of("Say hello"))
    assert [sent.params.max_tokens for sent in gateway_app.engine.requests] == [rest, 3]


@pytest.mark.parametrize("most", [57, 2**31 - 1])
async def test_more_than_the_context_has_room_for_is_cut_to_that(gateway_app, most):
    await answers(gateway_app, request("x" * 200, max_tokens=most, reserve_tokens=most))
    assert gateway_app.engine.requests[0].params.max_tokens == CONTEXT - 200
    assert gateway_app.limiter.reserved[0].tokens <= CONTEXT + 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, USUAL),
        ({"max_tokens": 50}, None),
        ({"default_max_tokens": 50}, None),
        ({"max_tokens": 2**31 - 1}, USUAL),
        ({"sampling": SamplingParams(ignore_eos=True)}, CONTEXT - len(ids_of("Say hello"))),
    ],
)
async def test_the_engine_is_told_what_to_expect_where_the_maximum_is_the_rest_of_the_context(
    gateway_app, fields, expected
):
    await answers(gateway_app, request())
    await answers(gateway_app, request(**fields))
    assert gateway_app.engine.requests[1].expected_tokens == expected


async def test_an_answer_of_a_completions_default_length_says_nothing_of_chats(gateway_app):
    await answers(gateway_app, request())
    await answers(gateway_app, request(default_max_tokens=3))
    await answers(gateway_app, request())
    assert gateway_app.engine.requests[2].expected_tokens == USUAL


async def test_quota_is_reserved_on_the_larger_of_two_maxima(gateway_app):
    await answers(gateway_app, request(max_tokens=5, reserve_tokens=30))
    assert gateway_app.limiter.reserved[0].tokens == len(ids_of("Say hello")) + 30


async def test_who_does_not_say_how_much_reserves_what_was_usual(gateway_app):
    prompt, answer = len(ids_of("Say hello")), len(ids_of("Hello, world!")) + 1
    await answers(gateway_app, request())
    await answers(gateway_app, request())
    await answers(gateway_app, request(n=3))
    await answers(gateway_app, request(model="poet"))
    await answers(gateway_app, request(max_tokens=50))
    most = CONTEXT - prompt
    wanted = [(asked.tokens - prompt, asked.least) for asked in gateway_app.limiter.reserved]
    least = prompt + 1
    assert wanted == [(most, least), (answer, least), (3 * answer, prompt + 3), (most, least), (50, None)]


async def test_what_is_usual_follows_what_comes_and_leaves_out_what_was_cut_short(gateway_app):
    await answers(gateway_app, request())
    gateway_app.engine.reply = lambda sent: "x" * 113
    await answers(gateway_app, request(max_tokens=2))
    await answers(gateway_app, request())
    gateway_app.engine.fail_after = 3
    with pytest.raises(ApiError):
        await answers(gateway_app, request())
    gateway_app.engine.fail_after = None
    await answers(gateway_app, request())
    prompt = len(ids_of("Say hello"))
    assert [asked.tokens - prompt for asked in gateway_app.limiter.reserved[2:]] == [14, 24, 24]
    assert [record.bill.reserved_tokens - prompt for record in gateway_app.watcher.records[2:]] == [14, 24, 24]


async def test_every_prompt_is_answered_n_times(gateway_app):
    gateway_app.engine.reply = lambda sent: f"{len(sent.prompt_ids)}/{sent.params.seed}"
    _, whole, usage = await answers(gateway_app, request(["aa", "bbbb"], n=2, seed=10, max_tokens=20))
    assert [answer.text for answer in whole] == ["2/10", "2/11", "4/10", "4/11"]
    assert usage.prompt == 6
    assert usage.completion == 4 * (len("2/10") + 1)
    assert gateway_app.limiter.reserved[0].tokens == 6 + 4 * 20
    await gateway_app.assert_empty()


async def test_without_a_seed_every_request_draws_anew(gateway_app):
    await answers(gateway_app, request())
    await answers(gateway_app, request())
    first, second = (sent.params.seed for sent in gateway_app.engine.requests)
    assert first != second


async def test_adapters_are_asked_for_by_version(gateway_app):
    admitted, _, _ = await answers(gateway_app, request(model="tiny:captain"))
    version = gateway_app.adapters.records["pirate"].version
    assert gateway_app.engine.requests[0].adapter_hash == version
    assert version[:10] in admitted.fingerprint
    assert admitted.model == "tiny:captain"
    assert gateway_app.watcher.records[0].served.adapter_hash == version


async def test_chats_go_through_the_template(gateway_app):
    await answers(gateway_app, request(Chat(({"role": "user", "content": "hi"},))))
    prompt = gateway_app.gateway.models.default.tokenizer.decode(
        gateway_app.engine.requests[0].prompt_ids, skip_special=False
    )
    assert prompt == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
async def test_a_stop_string_ends_the_answer_and_the_work(gateway_app, tokens_per_event):
    gateway_app.engine.tokens_per_event = tokens_per_event
    _, [answer], usage = await answers(gateway_app, request(stop=("wor", "zzz")))
    assert (answer.text, answer.finish_reason) == ("Hello, ", "stop")
    assert answer.token_ids == ids_of("Hello, wor")
    assert usage.completion == len(answer.token_ids)
    if tokens_per_event < 100:
        assert list(gateway_app.engine.ends.values()) == ["aborted"]
    await gateway_app.assert_empty()


async def test_all_answers_share_the_automaton_of_the_stop_strings(gateway_app, monkeypatch):
    made = []
    monkeypatch.setattr(engine_backend, "StopStrings", lambda stops: made.append(stops) or StopStrings(stops))
    _, found, _ = await answers(gateway_app, request(stop=("wor",), n=3))
    assert ([answer.text for answer in found], len(made)) == (["Hello, "] * 3, 1)


async def test_stop_strings_wait_for_min_tokens(gateway_app):
    wanted = request(stop=("l",), sampling=SamplingParams(min_tokens=5))
    _, [answer], _ = await answers(gateway_app, wanted)
    assert answer.text == "Hello, wor"


async def test_text_held_back_comes_out_at_the_end(gateway_app):
    _, [answer], _ = await answers(gateway_app, request(stop=("!?",)))
    assert (answer.text, answer.finish_reason) == ("Hello, world!", "stop")


async def test_a_stop_token_counts_but_has_no_text(gateway_app):
    wanted = request(sampling=SamplingParams(stop_token_ids=ids_of("o")))
    first = len(ids_of("Hello"))
    gateway_app.engine.last_words = TokenEvent("x", ids_of("Hello"), finish_reason=FinishReason.STOP)
    _, [answer], usage = await answers(gateway_app, wanted)
    assert (answer.text, usage.completion) == ("Hell", first)


async def test_lanes_are_the_tenants_at_most(gateway_app):
    batch_only = Principal(replace(ACME, default_lane=Lane.BATCH, highest_lane=Lane.BATCH), "key")
    admitted, _, _ = await answers(gateway_app, request(lane=Lane.INTERACTIVE), batch_only)
    assert admitted.lane is Lane.BATCH
    assert gateway_app.engine.requests[0].lane is Lane.BATCH
    record = gateway_app.watcher.records[0]
    assert (record.asked.lane, record.lane) == (Lane.INTERACTIVE, Lane.BATCH)


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (request(""), "prompt"),
        (request(()), "prompt"),
        (request([]), "prompt"),
        (request((1, 260)), "prompt"),
        (request((-1,)), "prompt"),
        (request(stop=("",)), "stop"),
        (request(stop=("x" * 20_000,)), "stop"),
        (request(n=129), "n"),
        (request(["a"] * 65, n=2), "n"),
        (request(max_tokens=3, sampling=SamplingParams(min_tokens=4)), "min_tokens"),
        (request(sampling=SamplingParams(stop_token_ids=(260,))), "stop_token_ids"),
        (request(sampling=SamplingParams(logit_bias=((-1, 1.0),))), "logit_bias"),
    ],
)
async def test_senseless_requests_cost_nothing(gateway_app, wanted, param):
    error = await refusal(gateway_app, wanted)
    assert (error.http_status, error.param) == (400, param)
    assert gateway_app.limiter.reserved_tokens == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [("x" * 256, 1), ("x" * 256, None), ("x" * 300, None)])
async def test_a_context_too_long_is_told_with_numbers(gateway_app, prompt, max_tokens):
    error = await refusal(gateway_app, request(prompt, max_tokens=max_tokens))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert str(len(prompt) + (max_tokens or 1)) in error.message
    assert str(CONTEXT) in error.message
    assert gateway_app.limiter.reserved_tokens == 0


TOKENIZED_THEN_REFUSED = {
    "an empty prompt": request(["x" * 50, ""]),
    "an id that is no token": request(["x" * 50, (260,)]),
    "a long prompt": request("x" * 300),
    "min_tokens": request(max_tokens=3, sampling=SamplingParams(min_tokens=4)),
    "a grammar": request(sampling=SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(?=a)")), grammar="regex"),
}


@pytest.mark.parametrize("name", TOKENIZED_THEN_REFUSED)
async def test_a_request_refused_after_tokenizing_counts_without_tokens(gateway_app, name):
    wanted, caller = TOKENIZED_THEN_REFUSED[name], principal("sk-globex")
    errors = [await refusal(gateway_app, wanted, caller) for _ in range(3)]
    assert [error.http_status for error in errors] == [400] * 3
    assert [(asked.tokens, asked.adapter) for asked in gateway_app.limiter.reserved] == [(0, BASE)] * 3
    assert (settled(gateway_app), gateway_app.limiter.rows) == ([[0]] * 3, [])
    for beyond in (wanted, request(max_tokens=1)):
        error = await refusal(gateway_app, beyond, caller)
        assert (error.fault, error.limit_kind) == (Fault.RATE_LIMIT_EXCEEDED, "requests")


async def test_a_tenant_beyond_its_requests_per_minute_has_no_prompt_tokenized(gateway_app, monkeypatch):
    tokenizer, caller, encoded = gateway_app.gateway.models.default.tokenizer, principal("sk-globex"), []
    encode = tokenizer.encode

    async def noted(text, **more):
        encoded.append(text)
        return await encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", noted)
    for _ in range(3):
        await answers(gateway_app, request(max_tokens=1), caller)
    error = await refusal(gateway_app, request(max_tokens=1), caller)
    assert (error.fault, error.limit_kind, len(encoded)) == (Fault.RATE_LIMIT_EXCEEDED, "requests", 3)
    assert gateway_app.watcher.records[-1].times.reserve_seconds is not None


async def test_a_request_refused_before_tokenizing_does_not_count(gateway_app):
    for wanted in (request([]), request(stop=("",)), request(n=129), request(model="unknown")):
        await refusal(gateway_app, wanted)
    assert gateway_app.limiter.reserved == []


async def test_a_request_refused_by_a_limit_of_tokens_counts_unless_it_is_of_a_batch(gateway_app):
    caller, large = principal("sk-globex"), request(max_tokens=240)
    assert (await refusal(gateway_app, replace_fields(large, deferred=DeferredUsage()), caller)).http_status == 429
    assert gateway_app.limiter.reserved == []  # the gateway itself sends lines of batches again
    assert (await refusal(gateway_app, large, caller)).fault is Fault.INSUFFICIENT_QUOTA
    assert settled(gateway_app) == [[0]]
    assert gateway_app.watcher.records[-1].bill.reserved_tokens > 200


async def test_a_caller_that_leaves_while_its_prompt_is_tokenized_is_counted(gateway_app, monkeypatch):
    begun, never = asyncio.Event(), asyncio.Event()

    async def encode(text, **more):
        begun.set()
        await never.wait()

    monkeypatch.setattr(gateway_app.gateway.models.default.tokenizer, "encode", encode)
    error = await refusal(gateway_app, request(deadline=0.01))
    assert (error.fault, settled(gateway_app)) == (Fault.DEADLINE_EXCEEDED, [[0]])
    begun.clear()
    task = asyncio.create_task(answers(gateway_app, request()))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    await gateway_app.assert_empty()
    assert settled(gateway_app) == [[0], [0]]


async def test_limits_refuse_before_the_engine_hears_of_it(gateway_app):
    error = await refusal(gateway_app, request(model="pirate", max_tokens=250 - 9), principal("sk-globex"))
    assert error.code == "insufficient_quota"
    assert gateway_app.engine.requests == []
    assert gateway_app.watcher.records[0].outcome.status == 429


@pytest.mark.parametrize("how", ["not ready", "before the first event", "in the middle"])
async def test_an_engine_that_is_gone_is_503_and_free(gateway_app, how):
    gateway_app.engine.ready = how != "not ready"
    gateway_app.engine.fail_after = {"before the first event": 0, "in the middle": 3}.get(how)
    error = await refusal(gateway_app, request())
    assert (error.http_status, error.code) == (503, "engine_unavailable")
    assert error.retry_after is not None
    assert settled(gateway_app) == [[0]]


async def test_one_lost_answer_of_several_ends_all(gateway_app):
    gateway_app.engine.fail_after = 3
    error = await refusal(gateway_app, request(n=3))
    assert error.code == "engine_unavailable"
    assert settled(gateway_app) == [[0]]


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        (FinishReason.ABORT, 503, "preempted"),
        (FinishReason.ERROR, 500, "internal_error"),
        (ErrorCode.LANE_QUEUE_FULL, 503, "lane_queue_full"),
        (ErrorCode.QUEUE_TIMEOUT, 503, "queue_timeout"),
        (ErrorCode.MODEL_NOT_FOUND, 404, "model_not_found"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, "context_length_exceeded"),
        (ErrorCode.INVALID_REQUEST, 400, None),
    ],
)
async def test_what_the_engine_refuses_is_free(gateway_app, event, status, code):
    if isinstance(event, FinishReason):
        gateway_app.engine.last_words = TokenEvent("x", finish_reason=event)
    else:
        gateway_app.engine.last_words = TokenEvent(
            "x", finish_reason=FinishReason.ERROR, refusal=Refusal(event, "because")
        )
    error = await refusal(gateway_app, request())
    assert (error.http_status, error.code) == (status, code)
    assert settled(gateway_app) == [[0]]


@pytest.mark.parametrize("wait", [0.0, 12.5, None])
async def test_the_engine_knows_when_to_ask_again(gateway_app, wait):
    refused = Refusal(ErrorCode.QUEUE_TIMEOUT, "too long a queue", wait)
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refused)
    assert (await refusal(gateway_app, request())).retry_after == wait


async def test_a_tenants_name_and_weight_reach_the_engine(gateway_app):
    heavy = Principal(replace(ACME, name="heavy", weight=4.0), "key")
    await gateway_app.limiter.configure([heavy.tenant])
    await answers(gateway_app, request(), heavy)
    await answers(gateway_app, request())
    assert [(sent.tenant, sent.weight) for sent in gateway_app.engine.requests] == [("heavy", 4.0), ("acme", 1.0)]


async def test_batch_work_carries_what_is_left_of_its_deadline(gateway_app):
    gateway_app.limiter.delay = 0.02
    await answers(gateway_app, request(lane=Lane.BATCH, deadline=60.0))
    await answers(gateway_app, request(lane=Lane.BATCH))
    await answers(gateway_app, request(lane=Lane.INTERACTIVE, deadline=60.0))
    left, *others = [sent.deadline for sent in gateway_app.engine.requests]
    assert others == [None, None]
    assert 0 < left <= 60.0 - 0.04


async def test_goals_of_its_own_reach_the_engine(gateway_app):
    await answers(gateway_app, request(ttft=0.25, itl=0.05, n=2))
    await answers(gateway_app, request())
    goals = [(sent.ttft, sent.itl) for sent in gateway_app.engine.requests]
    assert goals == [(0.25, 0.05), (0.25, 0.05), (None, None)]


async def test_a_salt_reaches_the_engine_with_every_answer(gateway_app):
    await answers(gateway_app, request(["aa", "bbbb"], n=2, cache_salt="s"))
    await answers(gateway_app, request())
    assert [sent.cache_salt for sent in gateway_app.engine.requests] == ["s"] * 4 + [""]


async def test_a_prediction_reaches_the_engine_as_tokens_cut_to_what_answers_may_need(gateway_app):
    await answers(gateway_app, request(prediction="Hello", n=2))
    await answers(gateway_app, request(prediction="x" * 50 * CONTEXT))
    await answers(gateway_app, request(prediction="Hello", sampling=SamplingParams(speculates=False)))
    gateway_app.engine.info.max_model_len = 9999
    await answers(gateway_app, request(prediction="x" * 5000, max_tokens=2))
    sent = [sent.prediction for sent in gateway_app.engine.requests]
    assert sent == [ids_of("Hello")] * 2 + [ids_of("x" * CONTEXT), (), ids_of("x" * 520)]


async def test_proposals_are_told_apart_in_usage_and_charged_where_accepted(gateway_app):
    gateway_app.engine.proposals = (ProposalCount("prediction", 7, 4), ProposalCount("prompt", 9, 1))
    _, _, usage = await answers(gateway_app, request(n=2, prediction="Hello"))
    assert (usage.completion, usage.accepted_prediction, usage.rejected_prediction) == (2 * USUAL, 8, 6)
    [record] = gateway_app.watcher.records
    assert record.work.proposed() == (10, 32)
    assert record.used_tokens == record.work.prompt_tokens + 2 * USUAL


@pytest.mark.parametrize("order", [(0, 8), (8, 0)])
async def test_a_prompts_cached_tokens_are_those_of_its_first_answer_to_run(gateway_app, order):
    gateway_app.engine.cached = lambda sent: len(sent.prompt_ids) + order[int(sent.id[-1]) % 2]
    _, _, usage = await answers(gateway_app, request(["aa", "bbbb"], n=2))
    assert (usage.prompt, usage.cached) == (6, 6)


async def test_an_adapter_that_did_not_survive_a_restart_is_unavailable(gateway_app):
    gateway_app.engine.rejected = "files are gone"
    await gateway_app.adapters.restore()
    error = await refusal(gateway_app, request(model="pirate"))
    assert error.code == "engine_unavailable"


async def test_a_deadline_that_has_passed_reserves_nothing(gateway_app):
    error = await refusal(gateway_app, request(deadline=0.0))
    assert (error.http_status, error.code) == (504, "deadline_exceeded")
    assert gateway_app.limiter.reserved == []


@pytest.mark.parametrize(
    ("settings", "deadline"),
    [
        (ServiceSettings(request_timeout=0.05), None),
        (ServiceSettings(first_token_timeout=0.05), None),
        (ServiceSettings(request_timeout=None, first_token_timeout=None), 0.05),
    ],
)
async def test_waiting_ends_with_the_deadline(tmp_path, settings, deadline):
    gateway_app = await build_gateway_app(tmp_path, settings)
    gateway_app.engine.admit = asyncio.Event()
    error = await refusal(gateway_app, request(deadline=deadline))
    assert (error.code, error.message) == ("deadline_exceeded", "there was no token before the deadline")
    assert settled(gateway_app) == [[len(ids_of("Say hello"))]]


async def test_an_answer_that_takes_too_long_is_charged_for_what_it_was(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(request_timeout=1.0))
    gateway_app.engine.go_on = asyncio.Event()
    error = await refusal(gateway_app, request())
    assert (error.code, error.message) == ("deadline_exceeded", "there was no complete answer before the deadline")
    assert settled(gateway_app) == [[len(ids_of("Say hello")) + 1]]
    assert list(gateway_app.engine.ends.values()) == ["aborted"]


async def test_the_first_token_has_a_deadline_of_its_own_in_the_interactive_lane(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(first_token_timeout=1.0))
    gateway_app.engine.go_on = asyncio.Event()
    asyncio.get_running_loop().call_later(1.2, gateway_app.engine.go_on.set)
    _, [answer], _ = await answers(gateway_app, request())
    assert answer.text == "Hello, world!"
    gateway_app.engine.admit = asyncio.Event()
    asyncio.get_running_loop().call_later(1.2, gateway_app.engine.admit.set)
    _, [answer], _ = await answers(gateway_app, request(lane=Lane.BATCH))
    assert answer.text == "Hello, world!"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stall_ends_the_request_which_is_charged_for_what_it_was(gateway_app, n):
    gateway_app.engine.go_on = asyncio.Event()
    error = await refusal(gateway_app, request(n=n, stall=0.2))
    assert (error.code, error.message) == ("deadline_exceeded", "there was no token for 0.2 s")
    assert settled(gateway_app) == [[len(ids_of("Say hello")) + n]]
    assert set(gateway_app.engine.ends.values()) == {"aborted"}


async def test_every_token_begins_a_new_stall_limit(gateway_app):
    gateway_app.engine.pause = 0.1
    _, [answer], _ = await answers(gateway_app, request(stall=1.0))
    assert answer.text == "Hello, world!"


async def test_waiting_for_the_first_token_is_no_stall(gateway_app):
    gateway_app.engine.admit = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, gateway_app.engine.admit.set)
    _, [answer], _ = await answers(gateway_app, request(stall=0.2))
    assert answer.text == "Hello, world!"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_caller_that_reads_slowly_is_no_stall(gateway_app, n):
    finished, pauses = [], iter((0.5, 0.5))
    async with gateway_app.gateway.generate(principal(), request(n=n, stall=0.2)) as generation:
        async for chunk in generation:
            if chunk.token_ids:
                await asyncio.sleep(next(pauses, 0))
            finished += [chunk.answer] if chunk.finish_reason else []
    assert list(pauses) == []
    assert sorted(finished) == list(range(n))


async def test_the_deadline_ends_a_request_whose_stall_limit_is_longer(gateway_app):
    gateway_app.engine.go_on = asyncio.Event()
    error = await refusal(gateway_app, request(deadline=0.5, stall=60.0))
    assert (error.code, error.message) == ("deadline_exceeded", "there was no complete answer before the deadline")


async def test_the_engine_holds_no_tokens_back_where_a_stall_would_be_seen(gateway_app):
    await answers(gateway_app, request(coalesce=True, stall=60.0))
    await answers(gateway_app, request(coalesce=True))
    assert [sent.whole for sent in gateway_app.engine.requests] == [False, True]


async def test_a_full_lane_is_503_and_the_other_lane_is_not(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(lane_capacity={Lane.INTERACTIVE: 1, Lane.BATCH: 1}))
    async with gateway_app.gateway.generate(principal(), request()):
        with pytest.raises(ApiError) as caught:
            await answers(gateway_app, request())
        assert (caught.value.http_status, caught.value.code) == (503, "lane_queue_full")
        await answers(gateway_app, request(lane=Lane.BATCH))
    await answers(gateway_app, request())
    await gateway_app.assert_empty()


async def test_a_tenant_that_fills_a_lane_leaves_its_neighbour_a_share(tmp_path):
    """1,500 requests of four answers in a lane of 400: the neighbour is admitted at once, the greedy one refused."""
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(lane_capacity={Lane.INTERACTIVE: 400}))
    gateway_app.engine.go_on = asyncio.Event()
    attack = [asyncio.create_task(answers(gateway_app, request(n=4))) for _ in range(1500)]
    while sum(task.done() for task in attack) < 1400:
        await asyncio.sleep(0)
    neighbour = Principal(Tenant("initech"), "key")
    neighbours = [asyncio.create_task(answers(gateway_app, request(), neighbour)) for _ in range(200)]
    while sum(record.caller.tenant == "initech" for record in gateway_app.gateway.live.values()) < 200:
        await asyncio.sleep(0)
    assert not any(task.done() for task in neighbours)
    with pytest.raises(ApiError) as caught:
        await answers(gateway_app, request(), neighbour)
    assert (caught.value.code, caught.value.http_status) == ("lane_queue_full", 503)
    gateway_app.engine.go_on.set()
    refused = [error for error in await asyncio.gather(*attack, return_exceptions=True) if isinstance(error, ApiError)]
    assert len(refused) == 1400 and {error.code for error in refused} == {"lane_queue_full"}
    assert {answer.text for _, [answer], _ in await asyncio.gather(*neighbours)} == {"Hello, world!"}
    await gateway_app.assert_empty()


async def test_a_tenant_that_has_nothing_in_a_full_lane_gets_one_request_in(tmp_path):
    """Its weight gives it a share of less than one answer, and its request has more answers than the lane."""
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(lane_capacity={Lane.INTERACTIVE: 4}))
    gateway_app.engine.go_on = asyncio.Event()
    heavy, light = Principal(Tenant("heavy", weight=1000.0), "key"), Principal(Tenant("light", weight=0.001), "key")
    running = [asyncio.create_task(answers(gateway_app, request(), heavy)) for _ in range(4)]
    running.append(asyncio.create_task(answers(gateway_app, request(n=8), light)))
    while len(gateway_app.gateway.live) < 5:
        await asyncio.sleep(0)
    for tenant in (heavy, light):
        with pytest.raises(ApiError) as caught:
            await answers(gateway_app, request(), tenant)
        assert caught.value.code == "lane_queue_full"
    gateway_app.engine.go_on.set()
    assert [len(texts) for _, texts, _ in await asyncio.gather(*running)] == [1, 1, 1, 1, 8]
    await gateway_app.assert_empty()


async def test_the_live_table_shows_what_runs(gateway_app):
    async with gateway_app.gateway.generate(principal(), request(model="poet")) as generation:
        [record] = gateway_app.gateway.live.values()
        assert (record.id, record.served.adapter, record.caller.tenant) == (generation.admitted.id, "poet", "acme")
        assert gateway_app.gateway.active == 1
    await gateway_app.assert_empty()


async def test_leaving_early_aborts_and_charges_what_was_made(gateway_app):
    async with gateway_app.gateway.generate(principal(), request()) as generation:
        async for chunk in generation:
            if chunk.text:
                break
    assert list(gateway_app.engine.ends.values()) == ["aborted"]
    assert settled(gateway_app) == [[len(ids_of("Say hello")) + 1]]
    record = gateway_app.watcher.records[0]
    assert (record.outcome.finish, record.outcome.status) == ("cancelled", 499)
    await gateway_app.assert_empty()


async def test_a_bug_in_the_consumer_leaves_nothing_running(gateway_app):
    with pytest.raises(ZeroDivisionError):
        async with gateway_app.gateway.generate(principal(), request()):
            raise ZeroDivisionError
    assert gateway_app.watcher.records[0].outcome.status == 500
    await gateway_app.assert_empty()


async def test_leaving_while_the_limiter_is_asked_gives_the_reservation_back(gateway_app):
    gateway_app.limiter.delay = 0.05
    task = asyncio.create_task(answers(gateway_app, request()))
    await asyncio.sleep(0.07)
    task.cancel()
    await asyncio.wait([task])
    await gateway_app.assert_empty()
    assert settled(gateway_app) == [[0], [0]]
    assert gateway_app.engine.requests == []


async def test_two_cancellations_settle_once(gateway_app):
    gateway_app.engine.go_on = asyncio.Event()
    gateway_app.limiter.delay = 0.02
    task = asyncio.create_task(answers(gateway_app, request()))
    while not gateway_app.engine.open:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    await gateway_app.assert_empty()


async def test_any_number_of_cancellations_leaves_nothing_running(gateway_app):
    rng = random.Random(7)
    gateway_app.engine.pause, gateway_app.limiter.delay = 0.002, 0.003

    async def visit(number: int) -> None:
        task = asyncio.create_task(answers(gateway_app, request(n=rng.choice([1, 1, 3]), stop=("wor",))))
        await asyncio.sleep(rng.uniform(0, 0.3))
        for _ in range(number % 3):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])

    await asyncio.gather(*[visit(number) for number in range(200)])
    await gateway_app.assert_empty()
    assert len(gateway_app.watcher.records) == 200
    assert {record.outcome.finish for record in gateway_app.watcher.records} == {"cancelled", "stop"}


async def test_an_error_while_settling_does_not_spoil_the_answer(gateway_app, monkeypatch):
    async def broken(grant, actual_tokens):
        raise RuntimeError("the books are gone")

    monkeypatch.setattr(gateway_app.limiter, "settle", broken)
    _, [answer], _ = await answers(gateway_app, request())
    assert answer.text == "Hello, world!"
    assert gateway_app.gateway.active == 0


async def test_the_end_of_all_requests_does_not_reach_one_that_is_being_settled(gateway_app):
    async with gateway_app.gateway.generate(principal(), request()) as generation:
        chunks = [chunk async for chunk in generation]
        assert chunks[-1].usage is not None
        gateway_app.limiter.delay = 0.02
        asyncio.get_running_loop().call_soon(gateway_app.gateway.end_requests)
    assert gateway_app.watcher.records[0].outcome.finish == "stop"
    await gateway_app.assert_empty()


async def test_merge_closes_every_stream_it_was_given():
    closed = []

    async def stream(name):
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    merged = merge_streams([stream("a"), stream("b")], 2)
    assert {await anext(merged) for _ in range(6)} == {"a", "b"}
    await merged.aclose()
    assert sorted(closed) == ["a", "b"]
