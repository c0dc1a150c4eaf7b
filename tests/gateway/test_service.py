import asyncio
import random
from dataclasses import replace

import pytest
from fakes import ACME, BASE, CONTEXT, House, build_house, ids_of, principal

from engine.core.types import ErrorCode, FinishReason, Lane, Refusal, SamplingParams, TokenEvent
from gateway.core.errors import ApiError, Fault
from gateway.core.routing import ModelQuery
from gateway.core.tenants import Principal, Tenant
from gateway.requests.admission import ServiceSettings
from gateway.requests.types import Chat, GenerateRequest, join, merge

USUAL = len(ids_of("Hello, world!")) + 1
"""Tokens of the fake engine's answer, the end included."""


@pytest.fixture
async def house(tmp_path) -> House:
    return await build_house(tmp_path)


def request(prompt="Say hello", model=BASE, **fields) -> GenerateRequest:
    inputs = prompt if isinstance(prompt, list) else [prompt]
    return GenerateRequest(ModelQuery(model), tuple(inputs), "req-1", **fields)


async def answers(house, wanted, who=None):
    """What was admitted, one whole chunk an answer, and the usage."""
    async with house.gateway.generate(who or principal(), wanted) as generation:
        chunks = [chunk async for chunk in generation]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    indices = sorted({chunk.answer for chunk in chunks})
    whole = [join([chunk for chunk in chunks if chunk.answer == index]) for index in indices]
    return generation.admitted, whole, chunks[-1].usage


async def refusal(house, wanted, who=None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await answers(house, wanted, who)
    await house.assert_empty()
    return caught.value


def settled(house):
    return list(house.limiter.ends.values())


async def test_an_answer_and_what_it_cost(house):
    house.engine.cached = lambda request: 4
    admitted, [answer], usage = await answers(house, request(max_tokens=50))
    assert (answer.text, answer.finish_reason) == ("Hello, world!", "stop")
    prompt, completion = len(ids_of("Say hello")), len(ids_of("Hello, world!")) + 1
    assert (usage.prompt, usage.completion, usage.cached) == (prompt, completion, 4)
    assert house.limiter.reserved[0].tokens == prompt + 50
    assert settled(house) == [[prompt + completion]]
    assert admitted.headers()["x-loralane-lane"] == "interactive"
    await house.assert_empty()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
async def test_what_was_made_before_an_administrator_ended_it_is_charged(house, monkeypatch, whole, at_once):
    async def generate(wanted):
        house.engine.requests.append(wanted)
        house.engine.ends[wanted.id] = "cancelled"
        refusal = Refusal(ErrorCode.CANCELLED, "an administrator cancelled the request")
        events = [TokenEvent(wanted.id, (65,)), TokenEvent(wanted.id, (66,) * 25, device_seconds=2.5)]
        events.append(TokenEvent(wanted.id, finish_reason=FinishReason.ERROR, refusal=refusal))
        for arrived in [events] if at_once else [[event] for event in events]:
            yield arrived

    monkeypatch.setattr(house.engine, "generate", generate)
    assert (await refusal(house, request(max_tokens=50, whole=whole))).fault is Fault.CANCELLED
    assert settled(house) == [[len(ids_of("Say hello")) + 26]]
    assert house.watcher.records[0].device_seconds == 2.5


async def test_output_is_bounded_by_max_tokens(house):
    _, [answer], usage = await answers(house, request(max_tokens=5))
    assert (answer.text, answer.finish_reason, usage.completion) == ("Hello", "length", 5)


async def test_without_max_tokens_the_context_is_the_bound(house):
    await answers(house, request("x" * 200))
    assert house.engine.requests[0].params.max_tokens == CONTEXT - 200


async def test_without_max_tokens_the_rest_of_the_context_or_the_protocols_default_is_the_bound(house):
    await answers(house, request())
    await answers(house, request(default_max_tokens=3))
    rest = CONTEXT - len(ids_of("Say hello"))
    assert [sent.params.max_tokens for sent in house.engine.requests] == [rest, 3]


@pytest.mark.parametrize("most", [57, 2**31 - 1])
async def test_more_than_the_context_has_room_for_is_cut_to_that(house, most):
    await answers(house, request("x" * 200, max_tokens=most, reserve_tokens=most))
    assert house.engine.requests[0].params.max_tokens == CONTEXT - 200
    assert house.limiter.reserved[0].tokens <= CONTEXT + 200


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
async def test_the_engine_is_told_what_to_expect_where_the_maximum_is_the_rest_of_the_context(house, fields, expected):
    await answers(house, request())
    await answers(house, request(**fields))
    assert house.engine.requests[1].expected_tokens == expected


async def test_an_answer_of_a_completions_default_length_says_nothing_of_chats(house):
    await answers(house, request())
    await answers(house, request(default_max_tokens=3))
    await answers(house, request())
    assert house.engine.requests[2].expected_tokens == USUAL


async def test_quota_is_reserved_on_the_larger_of_two_maxima(house):
    await answers(house, request(max_tokens=5, reserve_tokens=30))
    assert house.limiter.reserved[0].tokens == len(ids_of("Say hello")) + 30


async def test_who_does_not_say_how_much_reserves_what_was_usual(house):
    prompt, answer = len(ids_of("Say hello")), len(ids_of("Hello, world!")) + 1
    await answers(house, request())
    await answers(house, request())
    await answers(house, request(n=3))
    await answers(house, request(model="poet"))
    await answers(house, request(max_tokens=50))
    most = CONTEXT - prompt
    wanted = [(asked.tokens - prompt, asked.least) for asked in house.limiter.reserved]
    least = prompt + 1
    assert wanted == [(most, least), (answer, least), (3 * answer, prompt + 3), (most, least), (50, None)]


async def test_what_is_usual_follows_what_comes_and_leaves_out_what_was_cut_short(house):
    await answers(house, request())
    house.engine.reply = lambda sent: "x" * 113
    await answers(house, request(max_tokens=2))
    await answers(house, request())
    house.engine.fail_after = 3
    with pytest.raises(ApiError):
        await answers(house, request())
    house.engine.fail_after = None
    await answers(house, request())
    prompt = len(ids_of("Say hello"))
    assert [asked.tokens - prompt for asked in house.limiter.reserved[2:]] == [14, 24, 24]
    assert [record.reserved_tokens - prompt for record in house.watcher.records[2:]] == [14, 24, 24]


async def test_every_prompt_is_answered_n_times(house):
    house.engine.reply = lambda sent: f"{len(sent.prompt_ids)}/{sent.params.seed}"
    _, whole, usage = await answers(house, request(["aa", "bbbb"], n=2, seed=10, max_tokens=20))
    assert [answer.text for answer in whole] == ["2/10", "2/11", "4/10", "4/11"]
    assert usage.prompt == 6
    assert usage.completion == 4 * (len("2/10") + 1)
    assert house.limiter.reserved[0].tokens == 6 + 4 * 20
    await house.assert_empty()


async def test_without_a_seed_every_request_draws_anew(house):
    await answers(house, request())
    await answers(house, request())
    first, second = (sent.params.seed for sent in house.engine.requests)
    assert first != second


async def test_adapters_are_asked_for_by_version(house):
    admitted, _, _ = await answers(house, request(model="tiny:captain"))
    version = house.adapters.records["pirate"].version
    assert house.engine.requests[0].adapter_hash == version
    assert version[:10] in admitted.fingerprint
    assert admitted.model == "tiny:captain"
    assert house.watcher.records[0].adapter_hash == version


async def test_chats_go_through_the_template(house):
    await answers(house, request(Chat(({"role": "user", "content": "hi"},))))
    prompt = house.gateway.tokenizer.decode(house.engine.requests[0].prompt_ids, skip_special=False)
    assert prompt == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
async def test_a_stop_string_ends_the_answer_and_the_work(house, tokens_per_event):
    house.engine.tokens_per_event = tokens_per_event
    _, [answer], usage = await answers(house, request(stop=("wor", "zzz")))
    assert (answer.text, answer.finish_reason) == ("Hello, ", "stop")
    assert answer.token_ids == ids_of("Hello, wor")
    assert usage.completion == len(answer.token_ids)
    if tokens_per_event < 100:
        assert list(house.engine.ends.values()) == ["aborted"]
    await house.assert_empty()


async def test_stop_strings_wait_for_min_tokens(house):
    wanted = request(stop=("l",), sampling=SamplingParams(min_tokens=5))
    _, [answer], _ = await answers(house, wanted)
    assert answer.text == "Hello, wor"


async def test_text_held_back_comes_out_at_the_end(house):
    _, [answer], _ = await answers(house, request(stop=("!?",)))
    assert (answer.text, answer.finish_reason) == ("Hello, world!", "stop")


async def test_a_stop_token_counts_but_has_no_text(house):
    wanted = request(sampling=SamplingParams(stop_token_ids=ids_of("o")))
    first = len(ids_of("Hello"))
    house.engine.last_words = TokenEvent("x", ids_of("Hello"), finish_reason=FinishReason.STOP)
    _, [answer], usage = await answers(house, wanted)
    assert (answer.text, usage.completion) == ("Hell", first)


async def test_lanes_are_the_tenants_at_most(house):
    batch_only = Principal(replace(ACME, default_lane=Lane.BATCH, highest_lane=Lane.BATCH), "key")
    admitted, _, _ = await answers(house, request(lane=Lane.INTERACTIVE), batch_only)
    assert admitted.lane is Lane.BATCH
    assert house.engine.requests[0].lane is Lane.BATCH
    record = house.watcher.records[0]
    assert (record.lane_asked, record.lane) == (Lane.INTERACTIVE, Lane.BATCH)


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
async def test_senseless_requests_cost_nothing(house, wanted, param):
    error = await refusal(house, wanted)
    assert (error.http_status, error.param) == (400, param)
    assert house.limiter.reserved == []


@pytest.mark.parametrize(("prompt", "max_tokens"), [("x" * 256, 1), ("x" * 256, None), ("x" * 300, None)])
async def test_a_context_too_long_is_told_with_numbers(house, prompt, max_tokens):
    error = await refusal(house, request(prompt, max_tokens=max_tokens))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert str(len(prompt) + (max_tokens or 1)) in error.message
    assert str(CONTEXT) in error.message
    assert house.limiter.reserved == []


async def test_limits_refuse_before_the_engine_hears_of_it(house):
    error = await refusal(house, request(model="pirate", max_tokens=250 - 9), principal("sk-globex"))
    assert error.code == "insufficient_quota"
    assert house.engine.requests == []
    assert house.watcher.records[0].status == 429


@pytest.mark.parametrize("how", ["not ready", "before the first event", "in the middle"])
async def test_an_engine_that_is_gone_is_503_and_free(house, how):
    house.engine.ready = how != "not ready"
    house.engine.fail_after = {"before the first event": 0, "in the middle": 3}.get(how)
    error = await refusal(house, request())
    assert (error.http_status, error.code) == (503, "engine_unavailable")
    assert error.retry_after is not None
    assert settled(house) == ([] if how == "not ready" else [[None]])


async def test_one_lost_answer_of_several_ends_all(house):
    house.engine.fail_after = 3
    error = await refusal(house, request(n=3))
    assert error.code == "engine_unavailable"
    assert settled(house) == [[None]]


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
async def test_what_the_engine_refuses_is_free(house, event, status, code):
    if isinstance(event, FinishReason):
        house.engine.last_words = TokenEvent("x", finish_reason=event)
    else:
        house.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=Refusal(event, "because"))
    error = await refusal(house, request())
    assert (error.http_status, error.code) == (status, code)
    assert settled(house) == [[None]]


@pytest.mark.parametrize("wait", [0.0, 12.5, None])
async def test_the_engine_knows_when_to_ask_again(house, wait):
    refused = Refusal(ErrorCode.QUEUE_TIMEOUT, "too long a queue", wait)
    house.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refused)
    assert (await refusal(house, request())).retry_after == wait


async def test_a_tenants_name_and_weight_reach_the_engine(house):
    heavy = Principal(replace(ACME, name="heavy", weight=4.0), "key")
    await house.limiter.configure([heavy.tenant])
    await answers(house, request(), heavy)
    await answers(house, request())
    assert [(sent.tenant, sent.weight) for sent in house.engine.requests] == [("heavy", 4.0), ("acme", 1.0)]


async def test_batch_work_carries_what_is_left_of_its_deadline(house):
    house.limiter.delay = 0.02
    await answers(house, request(lane=Lane.BATCH, deadline=60.0))
    await answers(house, request(lane=Lane.BATCH))
    await answers(house, request(lane=Lane.INTERACTIVE, deadline=60.0))
    left, *others = [sent.deadline for sent in house.engine.requests]
    assert others == [None, None]
    assert 0 < left <= 60.0 - 0.04


async def test_goals_of_its_own_reach_the_engine(house):
    await answers(house, request(ttft=0.25, itl=0.05, n=2))
    await answers(house, request())
    goals = [(sent.ttft, sent.itl) for sent in house.engine.requests]
    assert goals == [(0.25, 0.05), (0.25, 0.05), (None, None)]


@pytest.mark.parametrize("order", [(0, 8), (8, 0)])
async def test_a_prompts_cached_tokens_are_those_of_its_first_answer_to_run(house, order):
    house.engine.cached = lambda sent: len(sent.prompt_ids) + order[int(sent.id[-1]) % 2]
    _, _, usage = await answers(house, request(["aa", "bbbb"], n=2))
    assert (usage.prompt, usage.cached) == (6, 6)


async def test_an_adapter_that_did_not_survive_a_restart_is_unavailable(house):
    house.engine.rejected = "files are gone"
    await house.adapters.restore()
    error = await refusal(house, request(model="pirate"))
    assert error.code == "engine_unavailable"


async def test_a_deadline_that_has_passed_reserves_nothing(house):
    error = await refusal(house, request(deadline=0.0))
    assert (error.http_status, error.code) == (504, "deadline_exceeded")
    assert house.limiter.reserved == []


@pytest.mark.parametrize(
    ("settings", "deadline"),
    [
        (ServiceSettings(request_timeout=0.05), None),
        (ServiceSettings(first_token_timeout=0.05), None),
        (ServiceSettings(request_timeout=None, first_token_timeout=None), 0.05),
    ],
)
async def test_waiting_ends_with_the_deadline(tmp_path, settings, deadline):
    house = await build_house(tmp_path, settings)
    house.engine.admit = asyncio.Event()
    error = await refusal(house, request(deadline=deadline))
    assert (error.code, error.message) == ("deadline_exceeded", "there was no token before the deadline")
    assert settled(house) == [[len(ids_of("Say hello"))]]


async def test_an_answer_that_takes_too_long_is_charged_for_what_it_was(tmp_path):
    house = await build_house(tmp_path, ServiceSettings(request_timeout=0.5))
    house.engine.go_on = asyncio.Event()
    error = await refusal(house, request())
    assert (error.code, error.message) == ("deadline_exceeded", "there was no complete answer before the deadline")
    assert settled(house) == [[len(ids_of("Say hello")) + 1]]
    assert list(house.engine.ends.values()) == ["aborted"]


async def test_the_first_token_has_a_deadline_of_its_own_in_the_interactive_lane(tmp_path):
    house = await build_house(tmp_path, ServiceSettings(first_token_timeout=0.5))
    house.engine.go_on = asyncio.Event()
    asyncio.get_running_loop().call_later(0.7, house.engine.go_on.set)
    _, [answer], _ = await answers(house, request())
    assert answer.text == "Hello, world!"
    house.engine.admit = asyncio.Event()
    asyncio.get_running_loop().call_later(0.7, house.engine.admit.set)
    _, [answer], _ = await answers(house, request(lane=Lane.BATCH))
    assert answer.text == "Hello, world!"


async def test_a_full_lane_is_503_and_the_other_lane_is_not(tmp_path):
    house = await build_house(tmp_path, ServiceSettings(lane_capacity={Lane.INTERACTIVE: 1, Lane.BATCH: 1}))
    async with house.gateway.generate(principal(), request()):
        with pytest.raises(ApiError) as caught:
            await answers(house, request())
        assert (caught.value.http_status, caught.value.code) == (503, "lane_queue_full")
        await answers(house, request(lane=Lane.BATCH))
    await answers(house, request())
    await house.assert_empty()


async def test_a_tenant_that_fills_a_lane_leaves_its_neighbour_a_share(tmp_path):
    """1,500 requests of four answers in a lane of 400: the neighbour is admitted at once, the greedy one refused."""
    house = await build_house(tmp_path, ServiceSettings(lane_capacity={Lane.INTERACTIVE: 400}))
    house.engine.go_on = asyncio.Event()
    attack = [asyncio.create_task(answers(house, request(n=4))) for _ in range(1500)]
    while sum(task.done() for task in attack) < 1400:
        await asyncio.sleep(0)
    neighbour = Principal(Tenant("initech"), "key")
    neighbours = [asyncio.create_task(answers(house, request(), neighbour)) for _ in range(200)]
    while sum(record.tenant == "initech" for record in house.gateway.live.values()) < 200:
        await asyncio.sleep(0)
    assert not any(task.done() for task in neighbours)
    with pytest.raises(ApiError) as caught:
        await answers(house, request(), neighbour)
    assert (caught.value.code, caught.value.http_status) == ("lane_queue_full", 503)
    house.engine.go_on.set()
    refused = [error for error in await asyncio.gather(*attack, return_exceptions=True) if isinstance(error, ApiError)]
    assert len(refused) == 1400 and {error.code for error in refused} == {"lane_queue_full"}
    assert {answer.text for _, [answer], _ in await asyncio.gather(*neighbours)} == {"Hello, world!"}
    await house.assert_empty()


async def test_a_tenant_that_has_nothing_in_a_full_lane_gets_one_request_in(tmp_path):
    """Its weight gives it a share of less than one answer, and its request has more answers than the lane."""
    house = await build_house(tmp_path, ServiceSettings(lane_capacity={Lane.INTERACTIVE: 4}))
    house.engine.go_on = asyncio.Event()
    heavy, light = Principal(Tenant("heavy", weight=1000.0), "key"), Principal(Tenant("light", weight=0.001), "key")
    running = [asyncio.create_task(answers(house, request(), heavy)) for _ in range(4)]
    running.append(asyncio.create_task(answers(house, request(n=8), light)))
    while len(house.gateway.live) < 5:
        await asyncio.sleep(0)
    for tenant in (heavy, light):
        with pytest.raises(ApiError) as caught:
            await answers(house, request(), tenant)
        assert caught.value.code == "lane_queue_full"
    house.engine.go_on.set()
    assert [len(texts) for _, texts, _ in await asyncio.gather(*running)] == [1, 1, 1, 1, 8]
    await house.assert_empty()


async def test_the_live_table_shows_what_runs(house):
    async with house.gateway.generate(principal(), request(model="poet")) as generation:
        [record] = house.gateway.live.values()
        assert (record.id, record.adapter, record.tenant) == (generation.admitted.id, "poet", "acme")
        assert house.gateway.active == 1
    await house.assert_empty()


async def test_leaving_early_aborts_and_charges_what_was_made(house):
    async with house.gateway.generate(principal(), request()) as generation:
        async for chunk in generation:
            if chunk.text:
                break
    assert list(house.engine.ends.values()) == ["aborted"]
    assert settled(house) == [[len(ids_of("Say hello")) + 1]]
    record = house.watcher.records[0]
    assert (record.finish, record.status) == ("cancelled", 499)
    await house.assert_empty()


async def test_a_bug_in_the_consumer_still_leaves_an_empty_house(house):
    with pytest.raises(ZeroDivisionError):
        async with house.gateway.generate(principal(), request()):
            raise ZeroDivisionError
    assert house.watcher.records[0].status == 500
    await house.assert_empty()


async def test_leaving_while_the_limiter_is_asked_gives_the_reservation_back(house):
    house.limiter.delay = 0.05
    task = asyncio.create_task(answers(house, request()))
    await asyncio.sleep(0.07)
    task.cancel()
    await asyncio.wait([task])
    await house.assert_empty()
    assert settled(house) == [[None]]
    assert house.engine.requests == []


async def test_two_cancellations_settle_once(house):
    house.engine.go_on = asyncio.Event()
    house.limiter.delay = 0.02
    task = asyncio.create_task(answers(house, request()))
    while not house.engine.open:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    await house.assert_empty()


async def test_any_number_of_cancellations_leaves_an_empty_house(house):
    rng = random.Random(7)
    house.engine.pause, house.limiter.delay = 0.002, 0.003

    async def visit(number: int) -> None:
        task = asyncio.create_task(answers(house, request(n=rng.choice([1, 1, 3]), stop=("wor",))))
        await asyncio.sleep(rng.uniform(0, 0.3))
        for _ in range(number % 3):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])

    await asyncio.gather(*[visit(number) for number in range(200)])
    await house.assert_empty()
    assert len(house.watcher.records) == 200
    assert {record.finish for record in house.watcher.records} == {"cancelled", "stop"}


async def test_an_error_while_settling_does_not_spoil_the_answer(house, monkeypatch):
    async def broken(grant, actual_tokens):
        raise RuntimeError("the books are gone")

    monkeypatch.setattr(house.limiter, "settle", broken)
    _, [answer], _ = await answers(house, request())
    assert answer.text == "Hello, world!"
    assert house.gateway.active == 0


async def test_merge_closes_every_stream_it_was_given():
    closed = []

    async def stream(name):
        try:
            while True:
                yield name
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    merged = merge([stream("a"), stream("b")])
    assert {await anext(merged) for _ in range(6)} == {"a", "b"}
    await merged.aclose()
    assert sorted(closed) == ["a", "b"]
