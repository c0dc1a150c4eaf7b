"""Generation over a real channel: answers, metadata, refusals, and leaving early."""

import asyncio

import grpc
import pytest
from fakes import KEYS
from grpc_app import NIGHT, as_key, ask, open_grpc_app, refused, until

from engine.core.messages.requests import ErrorCode, FinishReason, Refusal, TokenEvent
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Principal
from gateway.pb import adapters_pb2
from gateway.pb import generation_pb2 as pb
from gateway.requests.answer.crash_trial import MOST_MOVES
from gateway.rpc.calls import RpcCall
from gateway.rpc.generation import REQUESTS, GenerationService
from gateway.rpc.wire import RANGES


@pytest.fixture
async def api(tmp_path):
    async with open_grpc_app(tmp_path) as opened:
        yield opened
        await opened.assert_empty()


async def test_a_stream_says_what_the_unary_call_says(api):
    whole = await api.generation.Generate(ask(), metadata=as_key())
    chunks = [chunk async for chunk in api.generation.GenerateStream(ask(), metadata=as_key())]
    assert whole.choices[0].text == "".join(chunk.choice.text for chunk in chunks) == "Hello"
    assert list(whole.choices[0].token_ids) == [token_id for chunk in chunks for token_id in chunk.choice.token_ids]
    assert [chunk.choice.finish_reason for chunk in chunks] == [pb.FINISH_REASON_UNSPECIFIED] * 4 + [
        pb.FINISH_REASON_LENGTH
    ]
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * 4 + [True]
    assert whole.usage == chunks[-1].usage == pb.Usage(prompt_tokens=5, completion_tokens=5)
    assert whole.system_fingerprint == chunks[0].system_fingerprint != ""
    assert len({chunk.id for chunk in chunks} | {whole.id}) == 2


async def test_inputs_and_sampling_reach_the_engine(api):
    chat = pb.Chat(messages=[pb.ChatMessage(role="developer", content="x"), pb.ChatMessage(role="user", content="y")])
    sampling = {"max_tokens": 4, "temperature": 0.0, "seed": 7, "logit_bias": {30: -1.0}, "stop_token_ids": [9]}
    await api.generation.Generate(ask(chat=chat, sampling=sampling, priority=-2), metadata=as_key())
    await api.generation.Generate(ask(prompt_ids=pb.TokenIds(ids=[11, 12])), metadata=as_key())
    chatted, continued = api.gateway_app.engine.requests
    decoded = api.gateway_app.gateway.models.default.tokenizer.decode(chatted.prompt_ids, skip_special=False)
    assert decoded == "<|system|>x<|end|><|user|>y<|end|><|assistant|>"
    assert continued.prompt_ids == (11, 12)
    assert (chatted.params.temperature, chatted.params.seed, chatted.priority) == (0.0, 7, -2)
    assert (chatted.params.logit_bias, chatted.params.stop_token_ids) == (((30, -1.0),), (9,))


async def test_goals_and_a_batch_deadline_reach_the_engine(api):
    await api.generation.Generate(ask(slo=pb.Slo(ttft_ms=250.0)), metadata=as_key())
    batch = ask(lane=pb.LANE_BATCH, slo=pb.Slo(itl_ms=40.0))
    assert [chunk async for chunk in api.generation.GenerateStream(batch, metadata=as_key(), timeout=60)]
    unary, streamed = api.gateway_app.engine.requests
    assert (unary.ttft, unary.itl, unary.deadline) == (0.25, None, None)
    assert (streamed.ttft, streamed.itl) == (None, 0.04)
    assert 30 < streamed.deadline < 61  # gRPC rounds timeouts up


async def test_a_salt_reaches_the_engine(api):
    with pytest.raises(grpc.RpcError, match="request_class"):
        await api.generation.Generate(ask(request_class="gold"), metadata=as_key())
    await api.generation.Generate(ask(cache_salt="s"), metadata=as_key())
    assert [sent.cache_salt for sent in api.gateway_app.engine.requests] == ["s"]


async def test_speculation_is_left_out_on_demand(api):
    for speculation in ("off", "auto"):
        await api.generation.Generate(ask(speculation=speculation), metadata=as_key())
    assert [sent.params.speculates for sent in api.gateway_app.engine.requests] == [False, True]


async def test_a_stall_ends_the_call(api):
    api.gateway_app.engine.go_on = asyncio.Event()
    refusal = await refused(api.generation.Generate(ask(stall_timeout=0.2), metadata=as_key()))
    assert (refusal.code, refusal.message) == ("DEADLINE_EXCEEDED", "there was no token for 0.2 s")


async def test_without_a_maximum_the_answer_ends_by_itself(api):
    whole = await api.generation.Generate(ask(sampling={}), metadata=as_key())
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello, world!", pb.FINISH_REASON_STOP)


async def test_stop_strings_end_the_answer(api):
    whole = await api.generation.Generate(ask(sampling={"max_tokens": 13, "stop": ["wo"]}), metadata=as_key())
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello, ", pb.FINISH_REASON_STOP)
    assert list(api.gateway_app.engine.ends.values()) == ["aborted"]


async def test_logprobs(api):
    whole = await api.generation.Generate(ask(sampling={"max_tokens": 2, "logprobs": 2}), metadata=as_key())
    assert [(entry.token, entry.logprob) for entry in whole.choices[0].logprobs] == [("H", -0.5), ("e", -0.5)]
    tops = [(top.token_id, top.token, top.logprob) for top in whole.choices[0].logprobs[1].top]
    assert tops == [(0, "<|end|>", -0.5), (1, "<|user|>", -1.5)]


async def test_log_probabilities_of_the_prompt(api):
    request = ask(prompt="abc", sampling={"max_tokens": 0, "prompt_logprobs": 1})
    whole = await api.generation.Generate(request, metadata=as_key())
    found = whole.choices[0].prompt_logprobs
    assert [(entry.token, entry.rank, [top.token for top in entry.top]) for entry in found] == [
        ("b", 1, ["b"]),
        ("c", 1, ["c"]),
    ]
    assert all(entry.logprob == entry.top[0].logprob < 0 for entry in found)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 0)
    streamed = [chunk.choice async for chunk in api.generation.GenerateStream(request, metadata=as_key())]
    assert [entry for choice in streamed for entry in choice.prompt_logprobs] == list(found)


async def test_several_answers_share_a_prompt_and_a_reservation(api):
    api.gateway_app.engine.reply = lambda sent: f"seed {sent.params.seed}"
    request = ask(n=3, sampling={"seed": 7})
    whole = await api.generation.Generate(request, metadata=as_key())
    assert [(choice.index, choice.text) for choice in whole.choices] == [(i, f"seed {7 + i}") for i in range(3)]
    assert whole.usage == pb.Usage(prompt_tokens=5, completion_tokens=3 * 7)
    texts, usages = ["", "", ""], []
    async for chunk in api.generation.GenerateStream(request, metadata=as_key()):
        texts[chunk.choice.index] += chunk.choice.text
        usages.append(chunk.HasField("usage"))
    assert texts == ["seed 7", "seed 8", "seed 9"]
    assert usages == [False] * (len(usages) - 1) + [True]
    assert len(api.gateway_app.limiter.reserved) == 2


LOOK = pb.Tool(name="look", description="Looks.", parameters='{"type": "object", "properties": {"at": {"enum": [1]}}}')
CALLED = pb.ToolCall(id="call_1", name="look", arguments='{"at": 1}')


def tools_chat(*messages, **more):
    return pb.Chat(messages=[pb.ChatMessage(role="user", content="hi"), *messages], tools=[LOOK], **more)


async def test_tools_are_shown_called_and_answered(api):
    api.gateway_app.engine.info.max_model_len = 4096
    api.gateway_app.engine.reply = lambda sent: 'So: <tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    told = pb.ChatMessage(role="tool", tool_call_id="call_1", content="blue")
    chat = tools_chat(pb.ChatMessage(role="assistant", tool_calls=[CALLED]), told)
    whole = await api.generation.Generate(ask(chat=chat, sampling={}), metadata=as_key())
    [choice] = whole.choices
    [call] = choice.tool_calls
    assert (choice.text, choice.finish_reason) == ("So:", pb.FINISH_REASON_TOOL_CALLS)
    assert (call.index, call.name, call.arguments) == (0, "look", '{"at": 1}')
    prompt = api.gateway_app.gateway.models.default.tokenizer.decode(
        api.gateway_app.engine.requests[0].prompt_ids, skip_special=False
    )
    assert "Looks." in prompt and prompt.endswith("<|tool|>blue<|end|><|assistant|>")
    chunks = api.generation.GenerateStream(ask(chat=chat, sampling={}), metadata=as_key())
    news = [call async for chunk in chunks for call in chunk.choice.tool_calls]
    assert [bool(call.id) for call in news] == [True] + [False] * (len(news) - 1)
    assert "".join(call.arguments for call in news) == '{"at": 1}'


@pytest.mark.parametrize(
    ("choice", "bound"),
    [
        (None, False),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE), False),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED), True),
        (pb.ToolChoice(name="look"), True),
    ],
)
async def test_calls_can_be_required(api, choice, bound):
    api.gateway_app.engine.info.max_model_len = 4096
    chat = tools_chat(tool_choice=choice, parallel_tool_calls=False)
    await api.generation.Generate(ask(chat=chat), metadata=as_key())
    assert (api.gateway_app.engine.requests[0].params.grammar is not None) == bound


async def test_metadata_carry_id_lane_rates_and_usage(api):
    api.gateway_app.engine.cached = lambda request: 3
    call = api.generation.Generate(ask(), metadata=as_key("globex", x_request_id="mine-1"))
    initial = dict(await call.initial_metadata())
    assert (initial["x-request-id"], initial["x-loralane-lane"]) == ("mine-1", "interactive")
    assert (initial["x-ratelimit-limit-requests"], initial["x-ratelimit-remaining-requests"]) == ("3", "2")
    assert (initial["x-ratelimit-limit-tokens"], initial["x-ratelimit-remaining-tokens"]) == ("200", "190")
    names = ("prompt", "cached", "completion")
    trailing = dict(await call.trailing_metadata())
    assert [trailing[f"x-loralane-{name}-tokens"] for name in names] == ["5", "3", "5"]


async def test_initial_metadata_wait_for_admission(api):
    api.gateway_app.engine.admit = asyncio.Event()
    call = api.generation.GenerateStream(ask(), metadata=as_key())
    headers = asyncio.create_task(call.initial_metadata())
    await until(lambda: api.gateway_app.engine.open == 1)
    assert not headers.done()
    api.gateway_app.engine.admit.set()
    assert dict(await headers)["x-loralane-lane"] == "interactive"
    assert "".join([chunk.choice.text async for chunk in call]) == "Hello"


async def test_who_calls_follows_from_the_key_alone(api):
    await api.generation.Generate(ask(), metadata=as_key(x_tenant_id="globex", x_request_id="not sane"))
    (record,) = api.gateway_app.watcher.records
    assert record.caller.tenant == "acme"
    assert record.request_id.startswith("req-")


async def test_lanes_are_clamped_and_reported(api):
    call = api.generation.Generate(ask(lane=pb.LANE_INTERACTIVE), metadata=as_key(NIGHT.name))
    assert (await call).lane == pb.LANE_BATCH
    assert dict(await call.initial_metadata())["x-loralane-lane"] == "batch"
    assert (await api.generation.Generate(ask(), metadata=as_key())).lane == pb.LANE_INTERACTIVE


async def test_adapters_answer_under_their_names(api):
    answers = [await api.generation.Generate(ask(name), metadata=as_key()) for name in ("pirate", "tiny:pirate")]
    assert [answer.model for answer in answers] == ["pirate", "tiny:pirate"]
    version = api.gateway_app.adapters.records["pirate"].version
    assert [request.adapter_hash for request in api.gateway_app.engine.requests] == [version, version]


async def test_tokenize(api):
    answer = await api.generation.Tokenize(pb.TokenizeRequest(model="tiny", prompt="hi"), metadata=as_key())
    assert (api.gateway_app.gateway.models.default.tokenizer.decode(answer.ids), answer.max_model_len) == ("hi", 256)
    refusal = await refused(api.generation.Tokenize(pb.TokenizeRequest(model="tiny"), metadata=as_key()))
    assert (refusal.code, refusal.message) == ("INVALID_ARGUMENT", "one of chat, prompt is required")
    secret = pb.TokenizeRequest(model="poet", prompt="hi")
    assert (await refused(api.generation.Tokenize(secret, metadata=as_key("globex")))).code == "NOT_FOUND"


USER = pb.ChatMessage(role="user", content="hi")
INVALID = {
    "sampling.temperature": ask(sampling={"temperature": 2.5}),
    "sampling.min_p": ask(sampling={"min_p": float("nan")}),
    "sampling.top_p": ask(sampling={"top_p": -0.1}),
    "sampling.logprobs": ask(sampling={"logprobs": 21}),
    "sampling.prompt_logprobs": ask(sampling={"prompt_logprobs": 21}),
    "sampling.max_tokens": ask(sampling={"max_tokens": 0}),
    "sampling.min_tokens": ask(sampling={"max_tokens": 2, "min_tokens": 3}),
    "sampling.repetition_penalty": ask(sampling={"repetition_penalty": -1.0}),
    "sampling.logit_bias": ask(sampling={"logit_bias": {1: 200.0}}),
    "sampling.stop_token_ids": ask(sampling={"stop_token_ids": [260]}),
    "sampling.stop": ask(sampling={"stop": [""]}),
    "chat.messages": ask(chat=pb.Chat()),
    "chat.messages[0].tool_call_id": ask(chat=pb.Chat(messages=[pb.ChatMessage(role="tool", content="x")])),
    "n": ask(n=129),
    "chat.tools[0].parameters": ask(chat=pb.Chat(messages=[USER], tools=[pb.Tool(name="f", parameters="{")])),
    "chat.tools[0].name": ask(chat=pb.Chat(messages=[USER], tools=[pb.Tool()])),
    "chat.tool_choice": ask(chat=pb.Chat(messages=[USER], tool_choice=pb.ToolChoice(name="f"))),
    "prompt": ask(prompt=""),
    "lane": ask(lane=9),
    "slo.ttft_ms": ask(slo=pb.Slo(ttft_ms=0.0)),
    "slo.itl_ms": ask(slo=pb.Slo(itl_ms=float("nan"))),
    "cache_salt": ask(cache_salt=""),
    "speculation": ask(speculation="always"),
    "stall_timeout": ask(stall_timeout=float("nan")),
    "model": ask(""),
    "input": pb.GenerateRequest(model="tiny"),
}


async def test_a_long_text_in_place_of_a_choice_is_not_quoted(api):
    refusal = await refused(api.generation.Generate(ask(speculation="always" * 1000), metadata=as_key()))
    assert "1,024 characters" in str(refusal.details) and "always" not in str(refusal.details)


@pytest.mark.parametrize("field", INVALID)
async def test_invalid_requests_name_the_field(api, field):
    for method in (api.generation.Generate, lambda *args, **more: api.generation.GenerateStream(*args, **more).read()):
        refusal = await refused(method(INVALID[field], metadata=as_key()))
        assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", [field])
        assert refusal.details["ErrorInfo"].domain == "loralane"
    assert not api.gateway_app.limiter.reserved_tokens


def test_every_sampling_field_has_the_range_http_has():
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) <= set(RANGES)


REFUSED = {
    "CONTEXT_LENGTH_EXCEEDED": ("INVALID_ARGUMENT", ask(prompt="x" * 256), "acme"),
    "INVALID_API_KEY": ("UNAUTHENTICATED", ask(), "unknown"),
    "MODEL_NOT_FOUND": ("NOT_FOUND", ask("pirate"), "night"),
    "INSUFFICIENT_QUOTA": ("RESOURCE_EXHAUSTED", ask(sampling={"max_tokens": 196}), "globex"),
}


@pytest.mark.parametrize("reason", REFUSED)
async def test_refusals_have_the_tables_code_and_reason(api, reason):
    code, request, caller = REFUSED[reason]
    refusal = await refused(api.generation.Generate(request, metadata=as_key(caller, x_request_id="mine-2")))
    assert (refusal.code, refusal.reason) == (code, reason)
    assert refusal.details["RequestInfo"].request_id == "mine-2"
    assert dict(refusal.error.initial_metadata())["x-request-id"] == "mine-2"
    assert "RetryInfo" not in refusal.details


@pytest.mark.parametrize("metadata", [(), (("authorization", "Basic sk-acme"),), (("authorization", "sk-acme"),)])
async def test_a_key_is_required_everywhere(api, metadata):
    calls = (
        api.generation.Generate(ask(), metadata=metadata),
        api.generation.GenerateStream(ask(), metadata=metadata).read(),
        api.generation.Tokenize(pb.TokenizeRequest(model="tiny", prompt="x"), metadata=metadata),
        api.generation.ListModels(pb.ListModelsRequest(), metadata=metadata),
        api.admin.List(adapters_pb2.ListAdaptersRequest(), metadata=metadata),
    )
    assert [(await refused(call)).code for call in calls] == ["UNAUTHENTICATED"] * 5


async def test_a_request_refused_after_tokenizing_counts(api):
    for _ in range(3):
        refusal = await refused(api.generation.Generate(ask(prompt="x" * 256), metadata=as_key("globex")))
        assert refusal.reason == "CONTEXT_LENGTH_EXCEEDED"
    refusal = await refused(api.generation.Generate(ask(), metadata=as_key("globex")))
    assert refusal.reason == "RATE_LIMIT_EXCEEDED"


async def test_an_exhausted_limit_tells_the_wait_and_the_rates(api):
    for _ in range(3):
        await api.generation.Generate(ask(), metadata=as_key("globex"))
    refusal = await refused(api.generation.Generate(ask(), metadata=as_key("globex")))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED")
    assert 0 < refusal.details["RetryInfo"].retry_delay.ToMilliseconds() <= 20_000
    (violation,) = refusal.details["QuotaFailure"].violations
    assert violation.subject == refusal.details["ErrorInfo"].metadata["scope"] == "tenant:globex"
    assert dict(refusal.error.initial_metadata())["x-ratelimit-remaining-requests"] == "0"


async def test_a_long_name_in_an_error_does_not_break_the_metadata(api):
    refusal = await refused(api.generation.Generate(ask("\N{PILE OF POO}" * 20_000), metadata=as_key()))
    assert (refusal.code, len(refusal.message)) == ("NOT_FOUND", 300)


async def test_an_engine_that_is_away_is_worth_another_try(api):
    api.gateway_app.engine.ready = False
    refusal = await refused(api.generation.Generate(ask(), metadata=as_key()))
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "ENGINE_UNAVAILABLE")
    assert refusal.details["RetryInfo"].retry_delay.ToMilliseconds() == 1000


async def test_a_queue_too_long_tells_the_true_wait(api):
    refusal = Refusal(ErrorCode.QUEUE_TIMEOUT, "the queue is 8 s long", 7.0625)
    api.gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refusal)
    told = await refused(api.generation.Generate(ask(), metadata=as_key()))
    assert (told.code, told.reason, told.message) == ("UNAVAILABLE", "QUEUE_TIMEOUT", "the queue is 8 s long")
    assert told.details["RetryInfo"].retry_delay.ToMilliseconds() == 7063


async def test_an_engine_that_dies_ends_the_stream_and_refunds(api):
    api.gateway_app.engine.fail_after = 2
    call = api.generation.GenerateStream(ask(), metadata=as_key())
    texts = [(await call.read()).choice.text for _ in range(MOST_MOVES + 1)]
    assert "".join(texts) == "Hell"
    assert (await refused(call.read())).code == "UNAVAILABLE"
    assert list(api.gateway_app.limiter.ends.values()) == [[0]]


async def test_a_bug_is_internal_and_says_nothing_else(api):
    def reply(request):
        raise RuntimeError("a secret")

    api.gateway_app.engine.reply = reply
    refusal = await refused(api.generation.Generate(ask(), metadata=as_key(x_request_id="mine-3")))
    assert (refusal.code, refusal.message) == ("INTERNAL", "internal error; request id mine-3")
    assert "secret" not in repr(refusal.error)


async def test_a_deadline_that_passes_aborts(api):
    api.gateway_app.engine.go_on = asyncio.Event()
    call = api.generation.GenerateStream(ask(), metadata=as_key(), timeout=2.0)
    assert (await call.read()).choice.text == "H"
    assert (await refused(call.read())).code == "DEADLINE_EXCEEDED"
    await api.assert_empty()
    assert list(api.gateway_app.engine.ends.values()) == ["aborted"]
    assert list(api.gateway_app.limiter.ends.values()) == [[6]]


class ExpiredContext:
    """The context of a call whose deadline has passed on the way. gRPC would cancel a real call shortly afterwards."""

    def invocation_metadata(self):
        return as_key()

    def time_remaining(self):
        return 0.0


async def test_an_expired_deadline_is_refused_before_anything_is_reserved(api):
    call = RpcCall(ExpiredContext(), REQUESTS[0])
    call.identify(Principal(KEYS["sk-acme"], "1"), lambda call: None)
    with pytest.raises(ApiError) as caught:
        await GenerationService(api.gateway_app.gateway).Generate(ask(), call)
    assert caught.value.fault is Fault.DEADLINE_EXCEEDED
    assert not api.gateway_app.limiter.reserved


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_cancelling_aborts_and_settles_what_was_used(api, method):
    api.gateway_app.engine.go_on = asyncio.Event()
    call = getattr(api.generation, method)(ask(sampling={"max_tokens": 200}), metadata=as_key())
    running = api.gateway_app.gateway.live
    await until(lambda: any(record.times.first_token for record in running.values()))
    call.cancel()
    await api.assert_empty()
    (record,) = api.gateway_app.watcher.records
    assert (record.outcome.finish, record.outcome.status) == ("cancelled", 499)
    assert list(api.gateway_app.limiter.ends.values()) == [[6]]
    assert list(api.gateway_app.engine.ends.values()) == ["aborted"]


async def test_a_reader_that_stops_reading_and_leaves_holds_nothing(api):
    api.gateway_app.engine.reply = lambda request: "x" * 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        stream = channel.unary_stream(
            "/loralane.v1.Generation/GenerateStream", pb.GenerateRequest.SerializeToString, pb.GenerateChunk.FromString
        )(ask(sampling={"max_tokens": 200}), metadata=as_key())
        await stream.read()
    await api.assert_empty()
