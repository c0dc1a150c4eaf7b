"""One line of a batch: the request that its body would be over HTTP, the same answer, and what comes of refusals."""

import asyncio
import json
import random

import pytest
from batch_cluster import CHAT, COMPLETION, KEY_ID, BatchCluster, Holders, pieces
from fakes import BASE, GatewayApp, build_gateway_app

from engine.core.messages.requests import Lane
from gateway.batches.answers import LineAnswer, LineName, completed_answer, failed_answer, unrun_answer
from gateway.batches.lease import Lease
from gateway.batches.line_reader import SMALL_BYTES, SPAN_BYTES, IndexEntry, LineReader
from gateway.batches.lines import UNHEARD_SECONDS, LineRunner
from gateway.batches.record import Batch, BatchLines, Tally
from gateway.batches.retry import FINAL, LONGEST_PAUSE_S, QUOTA_PAUSE_S, is_tenant_limit, next_utc_day, retry_delay
from gateway.core.errors import ApiError, Fault, internal, model_not_found, unavailable
from gateway.core.tenants import KeyLapse
from gateway.core.usage import DeferredUsage
from gateway.requests.settings import ServiceSettings
from gateway.requests.types import TokenUsage
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore

MESSAGES = [{"role": "user", "content": "Say hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
NAME = LineName("batch_1", 7, "mine")
NOON = 1_800_014_400.0
"""At noon in UTC."""
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


def lease(endpoint=CHAT, left=3600.0):
    batch = Batch("batch_1", "acme", KEY_ID, endpoint, "file-1", "1h", lines=BatchLines(1, shard_size=128))
    return Lease(batch, "shard", 1, left, 0, 0, 1)


def lines(gateway_app, endpoint=CHAT, left=3600.0, holders=None, age=0.0, responses=None):
    claimed = asyncio.get_running_loop().time() - age
    return LineRunner(gateway_app.gateway, holders or Holders(), lease(endpoint, left), claimed, responses)


async def run(gateway_app, body, endpoint=CHAT, **options) -> dict:
    begun = []
    answer = await lines(gateway_app, endpoint, **options).run(
        NAME, json.dumps(body).encode(), lambda: begun.append(1), DeferredUsage()
    )
    assert len(begun) == (answer.usage is not None)
    return json.loads(answer.text)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": MESSAGES, "stop": ["wor"], "return_token_ids": True, "max_completion_tokens": 9}),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "service_tier": "priority"}),
        (COMPLETION, {"prompt": "Say hello"}),
        (COMPLETION, {"prompt": ["a", "bb"], "n": 2, "echo": True, "max_tokens": 3}),
        (COMPLETION, {"prompt": [70, 71], "logprobs": 1}),
        (COMPLETION, {"prompt": ["ab", "cde"], "echo": True, "logprobs": 1, "max_tokens": 0}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1}),
        (CHAT, {"messages": MESSAGES, "cache_salt": "s"}),
    ],
)
async def test_a_line_is_answered_as_the_same_body_over_http(gateway_app, endpoint, body):
    if "tools" in body:
        gateway_app.engine.reply = lambda request: CALL
    body = {"model": "pirate", **body}
    async with gateway_app.client() as client:
        told = (await client.post(endpoint, json={**body, "service_tier": "flex"})).json()
    line = await run(gateway_app, body, endpoint)
    assert (line["custom_id"], line["error"]) == ("mine", None)
    assert line["response"]["status_code"] == 200
    assert line["response"]["request_id"] == "batch_1.7"
    mine = line["response"]["body"]
    for whole in (mine, told):
        del whole["id"], whole["created"]
        for choice in whole["choices"]:
            for call in choice.get("message", {}).get("tool_calls", ()):
                del call["id"]
    assert mine == told
    sent = [
        (each.params._replace(seed=0), each.prompt_ids, each.adapter_hash, each.lane)
        for each in gateway_app.engine.requests
    ]
    assert sent[: len(sent) // 2] == sent[len(sent) // 2 :]
    assert {lane for *_, lane in sent} == {Lane.BATCH}
    await gateway_app.assert_empty()


RESPONSE_TOOL = {"type": "function", **TOOL["function"]}


@pytest.mark.parametrize("more", [{}, {"tools": [RESPONSE_TOOL], "service_tier": "priority"}], ids=str)
async def test_a_line_of_responses_is_answered_as_over_http(gateway_app, more):
    gateway_app.engine.reply = lambda request: CALL if "tools" in more else "Hello"
    body = {"model": "pirate", "input": "hi", **more}
    async with gateway_app.client() as client:
        told = (await client.post(RESPONSES, json={**body, "service_tier": "flex"})).json()
    mine = (await run(gateway_app, body, RESPONSES))["response"]["body"]
    assert mine["id"].startswith("resp_") and mine["output"]
    for whole in (mine, told):
        for name in ("id", "created_at", "completed_at"):
            del whole[name]
        for item in whole["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert mine == told
    assert {sent.lane for sent in gateway_app.engine.requests} == {Lane.BATCH}
    await gateway_app.assert_empty()


async def test_a_line_of_embeddings_is_answered_as_over_http(gateway_app):
    body = {"model": "pirate", "input": ["hi", "ho"], "pooling": "mean", "dimensions": 4}
    async with gateway_app.client() as client:
        told = (await client.post(EMBEDDINGS, json=body)).json()
    mine = (await run(gateway_app, body, EMBEDDINGS))["response"]["body"]
    assert mine == told and len(mine["data"]) == 2
    assert [sent.lane for sent in gateway_app.engine.requests] == [Lane.INTERACTIVE] * 2 + [Lane.BATCH] * 2
    await gateway_app.assert_empty()
    with pytest.raises(ApiError) as caught:
        await run(gateway_app, {**body, "input": ["hi", ""]}, EMBEDDINGS)
    assert caught.value.param == "input[1]"


async def test_a_line_stores_its_response_and_continues_others(gateway_app, valkey):
    responses = Responses(ResponseStore(valkey))
    first = (await run(gateway_app, {"model": BASE, "input": "a", "store": True}, RESPONSES, responses=responses))[
        "response"
    ]
    body = {"model": BASE, "input": "b", "previous_response_id": first["body"]["id"]}
    second = (await run(gateway_app, body, RESPONSES, responses=responses))["response"]["body"]
    assert (await responses.get("acme", first["body"]["id"])) | {"output": 0} == first["body"] | {"output": 0}
    assert (second["store"], second["previous_response_id"]) == (False, first["body"]["id"])
    assert len(gateway_app.engine.requests[1].prompt_ids) > len(gateway_app.engine.requests[0].prompt_ids) + len("b")
    for more in ({"previous_response_id": "resp_0"}, {"store": True}):
        with pytest.raises(ApiError) as caught:
            await run(gateway_app, {**body, **more}, RESPONSES, responses=responses if "store" not in more else None)
        assert caught.value.http_status == 400


STORED = [
    ({"store": True}, "store", "in input"),
    ({"background": True}, "background", "in input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "in input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "send the item itself"),
]


@pytest.mark.parametrize(("fields", "param", "words"), STORED, ids=str)
async def test_a_line_without_a_store_of_responses_needs_none(gateway_app, fields, param, words):
    with pytest.raises(ApiError, match=words) as caught:
        await run(gateway_app, {"model": BASE, "input": "a", **fields}, RESPONSES)
    assert (caught.value.fault, caught.value.param) == (Fault.UNSUPPORTED_PARAMETER, param)


async def test_an_error_of_a_response_names_its_own_field(gateway_app):
    with pytest.raises(ApiError) as caught:
        await run(gateway_app, {"model": BASE, "input": "x" * 300}, RESPONSES)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_a_line_is_charged_to_the_key_that_asked_and_has_the_whole_window(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(request_timeout=0.0))
    await run(gateway_app, {"model": BASE, "messages": MESSAGES}, left=500.0)
    [reserved] = gateway_app.limiter.reserved
    assert (reserved.tenant, reserved.key_id, reserved.lane, reserved.request_id) == (
        *("acme", KEY_ID),
        *("batch", "batch_1.7"),
    )
    assert 490 < gateway_app.engine.requests[0].deadline <= 500


async def test_the_window_is_a_lines_only_time_limit(gateway_app):
    gateway_app.engine.go_on = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, gateway_app.engine.go_on.set)
    body = {"model": BASE, "messages": MESSAGES, "timeout": 0.05, "stall_timeout": 0.05}
    assert (await run(gateway_app, body, left=500.0))["response"]["status_code"] == 200
    assert 490 < gateway_app.engine.requests[0].deadline <= 500


async def test_what_the_gateway_refuses_is_raised_to_be_judged(gateway_app):
    with pytest.raises(ApiError) as caught:
        await run(gateway_app, {"model": "unknown", "messages": MESSAGES})
    assert caught.value.fault is Fault.MODEL_NOT_FOUND
    with pytest.raises(ApiError) as caught:
        await run(gateway_app, {"model": BASE, "messages": MESSAGES}, left=-1.0)
    assert caught.value.fault is Fault.DEADLINE_EXCEEDED
    await gateway_app.assert_empty()


@pytest.mark.parametrize(
    ("lapse", "code"),
    [
        (KeyLapse.TENANT_GONE, "tenant_gone"),
        (KeyLapse.TENANT_SUSPENDED, "tenant_suspended"),
        (KeyLapse.KEY_GONE, "key_revoked"),
        (KeyLapse.KEY_DISABLED, "key_revoked"),
    ],
)
async def test_lines_of_who_may_have_no_more_end_with_a_code(gateway_app, lapse, code):
    line = await run(gateway_app, {"model": BASE, "messages": MESSAGES}, holders=Holders({"acme": lapse}), age=60.0)
    assert (line["response"], line["error"]["code"]) == (None, code)
    assert gateway_app.engine.requests == []


async def test_a_key_that_was_not_heard_of_yet_is_waited_for(gateway_app):
    holders = Holders({"acme": KeyLapse.KEY_GONE})
    with pytest.raises(ApiError) as caught:
        await run(gateway_app, {"model": BASE, "messages": MESSAGES}, holders=holders, age=UNHEARD_SECONDS / 2)
    assert retry_delay(caught.value, 1, NOON, 60.0) is not None


def test_lines_that_were_not_answered_say_why():
    error = model_not_found("x")
    assert json.loads(failed_answer(NAME, error, DeferredUsage()).text) == {
        "id": NAME.answer_id,
        "custom_id": "mine",
        "response": {"status_code": 404, "request_id": "batch_1.7", "body": error.body()},
        "error": None,
    }
    told = json.loads(unrun_answer(NAME, "batch_expired", "too late").text)
    assert (told["response"], told["error"]) == (None, {"code": "batch_expired", "message": "too late"})
    assert failed_answer(NAME, error, DeferredUsage()).tally == Tally(failed=1)
    assert completed_answer(NAME, {}, TokenUsage(5, 7, 3), DeferredUsage()).tally == Tally(1, 0, 5, 3, 7)


def test_an_answer_has_one_id_for_ever_and_no_other_has_it():
    names = {LineName(batch, number, "x").answer_id for batch in ("batch_1", "batch_11") for number in range(1000)}
    assert len(names) == 2000
    assert LineName("batch_1", 7, "x").answer_id == NAME.answer_id
    assert LineAnswer(b"").suffix != LineAnswer(b"", TokenUsage(1, 1, 0)).suffix


OURS = [fault for fault in Fault if fault.row.http_status >= 500 and fault not in {Fault.INTERNAL, *FINAL}]
THEIRS = [
    fault
    for fault in Fault
    if fault.row.http_status < 500 and fault.row.http_status != 429 and fault is not Fault.MODEL_NOT_FOUND
]


@pytest.mark.parametrize("fault", OURS)
def test_what_is_ours_is_tried_again_for_as_long_as_the_window_lasts(fault):
    waits = [retry_delay(ApiError(fault, ""), tries, NOON, 60.0) for tries in (1, 2, 5, 100, 10_000)]
    assert all(wait is not None and 0 < wait <= LONGEST_PAUSE_S for wait in waits)
    assert waits[0] < 1.0
    assert retry_delay(unavailable(fault, "", retry_after=77.0), 1, NOON, 60.0) == 77.0
    assert not is_tenant_limit(ApiError(fault, ""))


@pytest.mark.parametrize("fault", [*THEIRS, *FINAL])
def test_what_no_wait_can_help_is_the_answer_at_once(fault):
    assert retry_delay(ApiError(fault, "", retry_after=1.0), 1, NOON, 60.0) is None


@pytest.mark.parametrize("error", [internal("x"), model_not_found("x")])
def test_what_may_pass_is_tried_a_few_times(error):
    waits = [retry_delay(error, tries, NOON, 60.0) for tries in range(1, 10)]
    assert waits[0] is not None and waits[2] is not None
    assert waits[-1] is None


def test_a_limit_is_waited_for_as_long_as_it_says():
    assert retry_delay(ApiError(Fault.RATE_LIMIT_EXCEEDED, "", retry_after=12.5), 99, NOON, 60.0) == 12.5
    assert is_tenant_limit(ApiError(Fault.RATE_LIMIT_EXCEEDED, ""))


def test_a_spent_day_is_waited_for_if_the_window_reaches_into_the_next():
    error = ApiError(Fault.INSUFFICIENT_QUOTA, "", metadata={"limit": "tokens_per_day", "renews": "00:00 UTC"})
    assert next_utc_day(NOON) == NOON + 43_200
    assert retry_delay(error, 1, NOON, 43_201.0) == QUOTA_PAUSE_S
    assert retry_delay(error, 1, NOON, 43_199.0) is None
    assert retry_delay(ApiError(Fault.INSUFFICIENT_QUOTA, ""), 1, NOON, 86_400.0) is None


@pytest.mark.parametrize("seed", range(5))
async def test_lines_that_lie_together_are_read_together(tmp_path, valkey, seed):
    rng, cluster = random.Random(seed), BatchCluster(tmp_path, valkey)
    texts = [b"x" * rng.choice([0, 5, 500, 3000, SMALL_BYTES, SMALL_BYTES + 1]) + b"%d" % n for n in range(200)]
    offsets = [sum(len(text) + 1 for text in texts[:number]) for number in range(200)]
    record = await cluster.files.create("acme", "in", "batch", pieces(b"\n".join(texts)))
    chosen = rng.sample(range(200), 128) if seed else range(128)
    entries = [IndexEntry(at, number + 1, offsets[number], len(texts[number])) for at, number in enumerate(chosen)]
    found, reads = LineReader(cluster.files, record), []
    read = found._read
    found._read = lambda start, length: reads.append(length) or read(start, length)
    await found.read_ahead(entries)
    assert len(reads) < 64 and max(reads) <= SPAN_BYTES
    assert [await found.get(entry) for entry in entries] == [texts[entry.line - 1] for entry in entries]
    large = sum(entry.length > SMALL_BYTES for entry in entries)
    assert [length > SMALL_BYTES for length in reads[-large:]] == [True] * large
    assert len(found._kept) == 128 - large


def test_an_answer_is_one_line_to_a_client_that_splits_a_text_into_lines():
    body = {"content": "a\u2028b\u2029c\x85d\x1ee\x0cf"}
    [line] = completed_answer(NAME, body, TokenUsage(1, 1, 0), DeferredUsage()).text.decode().splitlines()
    assert json.loads(line)["response"]["body"] == body
