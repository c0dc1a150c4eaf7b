import json

import pytest
from fakes import BASE, CONTEXT, GatewayApp, build_gateway_app, ids_of
from httpx import Response
from structlog.testing import capture_logs

from engine.core.messages.requests import ErrorCode, FinishReason, Refusal, TokenEvent

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": BASE, "prompt": "Say hello", "max_tokens": 50}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def post(gateway_app, path, body, key="sk-acme", **headers) -> Response:
    async with gateway_app.client(key) as client:
        return await client.post(path, json=body, headers=headers)


def events(response: Response) -> list:
    """Data of a stream's events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.replace(": ping\n", "").removesuffix("\n\n").split("\n\n")
    assert all(frame.startswith("data: {") or frame == "data: [DONE]" for frame in frames)
    return [json.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]


async def test_openai_client_chat(gateway_app):
    gateway_app.engine.cached = lambda request: 3
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(**CHAT, service_tier="flex")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello, world!", "stop")
    assert (answer.model, answer.object, answer.service_tier) == (BASE, "chat.completion", "flex")
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    await gateway_app.assert_empty()


async def test_openai_client_chat_stream(gateway_app):
    async with gateway_app.openai() as client:
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    *parts, last, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world!"
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * len(parts)
    assert last.choices[0].finish_reason == "stop"
    assert (usage.choices, usage.usage.completion_tokens) == ([], len(ids_of("Hello, world!")) + 1)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    await gateway_app.assert_empty()


async def test_openai_client_completions(gateway_app):
    async with gateway_app.openai() as client:
        answer = await client.completions.create(model="pirate", prompt=["a", "b"], n=2, echo=True, max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["aHel", "aHel", "bHel", "bHel"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.model == "pirate"
    assert gateway_app.adapters.records["pirate"].version[:10] in answer.system_fingerprint


async def test_openai_client_completion_stream_with_two_answers(gateway_app):
    gateway_app.engine.reply = lambda sent: f"seed {sent.params.seed}"
    async with gateway_app.openai() as client:
        stream = await client.completions.create(**COMPLETION, n=2, seed=5, echo=True, stream=True)
        chunks = [chunk async for chunk in stream]
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == f"Say helloseed {5 + index}"
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    await gateway_app.assert_empty()


async def test_an_echo_of_too_many_ids_is_refused(gateway_app, monkeypatch):
    monkeypatch.setattr("gateway.openai.calls.MOST_ECHOED_IDS", 4)
    async with gateway_app.client() as client:
        for prompt, status in (([[5, 6], [7, 8]], 200), ([[5, 6], [7, 8, 9]], 400), (["a long text", "b"], 200)):
            body = {"model": BASE, "prompt": prompt, "echo": True, "max_tokens": 1}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
    assert response.json()["choices"][0]["text"].startswith("a long text")


async def test_an_echo_without_tokens_needs_no_engine(gateway_app):
    async with gateway_app.openai() as client:
        prompts = ["a", "x" * (CONTEXT - 1) + "b"]
        answer = await client.completions.create(model="pirate", prompt=prompts, n=2, echo=True, max_tokens=0)
    assert [choice.text for choice in answer.choices] == [prompt for prompt in prompts for _ in range(2)]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1 + CONTEXT, 0)
    assert gateway_app.engine.requests == []
    assert list(gateway_app.limiter.ends.values()) == [[1 + CONTEXT]]
    await gateway_app.assert_empty()


async def test_a_stream_of_an_echo_without_tokens(gateway_app):
    body = {**COMPLETION, "max_tokens": 0, "echo": True, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(await post(gateway_app, "/v1/completions", body))
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("Say hello", None),
        ("", "length"),
    ]
    assert usage["usage"]["completion_tokens"] == 0
    assert gateway_app.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_chat_logprobs(gateway_app, stream):
    gateway_app.engine.reply = lambda sent: "aé"
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, n=2, stream=stream)
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    entries = [
        entry for choice in choices if choice.index == 1 and choice.logprobs for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in entries] == ["a", r"\xc3", r"\xa9"]
    assert bytes(byte for entry in entries for byte in entry.bytes) == "aé".encode()
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [[-0.5, -1.5]] * 3
    assert entries[0].top_logprobs[0].token == "<|end|>"


async def test_logprobs_match_token_ids_where_both_are_asked_for(gateway_app):
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    [choice] = (await post(gateway_app, "/v1/chat/completions", body)).json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len("Hello, world!") + 1
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * len(choice["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_client_completion_logprobs(gateway_app, stream):
    gateway_app.engine.reply = lambda sent: "aéb"
    async with gateway_app.openai() as client:
        answer = await client.completions.create(**COMPLETION, logprobs=1, stream=stream)
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    assert tokens == ["a", r"bytes:\xc3", r"bytes:\xa9", "b", "<|end|>"]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 2, 3]
    assert [logprob for part in parts for logprob in part.token_logprobs] == [-0.5] * 5
    tops = [top for part in parts for top in part.top_logprobs]
    assert tops == [{"<|end|>": -0.5, token: -0.5} for token in tokens]


async def test_openai_client_models(gateway_app):
    async with gateway_app.openai("sk-globex") as client:
        models = {model.id: model async for model in client.models.list()}
        pirate = await client.models.retrieve("pirate")
    assert set(models) == {BASE, "pirate", "captain"}
    assert (pirate.id, pirate.object, pirate.owned_by) == ("pirate", "model", "loralane")
    assert (pirate.parent, pirate.max_model_len, models[BASE].parent) == (BASE, 256, None)
    assert pirate.weights == models[BASE].weights == "Q4_1"


async def test_a_chat_in_full(gateway_app):
    response = await post(gateway_app, "/v1/chat/completions", CHAT, **{"x-request-id": "mine-1"})
    body = response.json()
    assert set(body) == {"id", "object", "created", "model", "system_fingerprint", "service_tier", "choices", "usage"}
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert response.headers["x-loralane-lane"] == "interactive"
    assert response.headers["x-request-id"] == "mine-1"
    assert gateway_app.watcher.records[0].request_id == "mine-1"


async def test_a_stream_in_full(gateway_app):
    gateway_app.engine.tokens_per_event = 6
    response = await post(gateway_app, "/v1/chat/completions", {**CHAT, "stream": True})
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-loralane-lane"] == "interactive"
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    deltas = [event["choices"][0]["delta"] for event in events(response)]
    letters = [{"content": letter} for letter in "Hello, world!"]
    assert deltas == [{"role": "assistant", "content": ""}, *letters, {}], "a token each, however they come"
    assert "usage" not in events(response)[0]


async def test_token_ids_come_when_asked_for(gateway_app):
    body = {**COMPLETION, "return_token_ids": True}
    whole = (await post(gateway_app, "/v1/completions", body)).json()
    assert tuple(whole["choices"][0]["token_ids"]) == (*ids_of("Hello, world!"), 0)
    streamed = events(await post(gateway_app, "/v1/completions", {**body, "stream": True}))
    assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == whole["choices"][0][
        "token_ids"
    ]


async def test_a_stop_string_never_reaches_the_client(gateway_app):
    streamed = events(
        await post(gateway_app, "/v1/completions", {**COMPLETION, "stop": ["lo, w", "zz"], "stream": True})
    )
    assert "".join(event["choices"][0]["text"] for event in streamed) == "Hel"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(event["choices"][0]["text"] or event["choices"][0]["finish_reason"] for event in streamed)


@pytest.mark.parametrize("stream", [False, True])
async def test_rate_headers_tell_what_is_left(gateway_app, stream):
    body = {"model": "pirate", "prompt": "hi", "max_tokens": 10, "stream": stream}
    response = await post(gateway_app, "/v1/completions", body, "sk-globex")
    assert response.headers["x-ratelimit-limit-requests"] == "3"
    assert response.headers["x-ratelimit-remaining-requests"] == "2"
    assert response.headers["x-ratelimit-remaining-tokens"] == str(200 - 12)
    assert response.headers["x-ratelimit-reset-requests"] == "20s"


async def test_an_error_in_the_middle_of_a_stream_ends_it(gateway_app):
    gateway_app.engine.fail_after = 3
    response = await post(gateway_app, "/v1/chat/completions", {**CHAT, "stream": True})
    assert response.status_code == 200
    *_, last = events(response)
    assert last["error"]["code"] == "engine_unavailable"
    assert response.text.endswith("}\n\ndata: [DONE]\n\n") and response.text.count("[DONE]") == 1
    await gateway_app.assert_empty()


async def test_a_bug_in_the_middle_of_a_stream_tells_no_internals(gateway_app, monkeypatch):
    def broken(sent):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("gateway.openai.styles.ChatStyle.delta", broken)
    response = await post(gateway_app, "/v1/chat/completions", {**CHAT, "stream": True})
    *_, last = events(response)
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.text.endswith("}\n\ndata: [DONE]\n\n")
    await gateway_app.assert_empty()


async def test_a_grammar_that_fails_in_the_middle_of_a_stream_ends_it(gateway_app, monkeypatch):
    refusal = Refusal(ErrorCode.INVALID_GRAMMAR, "it became too much")
    gateway_app.engine._events = lambda request: [
        TokenEvent(request.id, ids_of("a")),
        TokenEvent(request.id, finish_reason=FinishReason.ERROR, refusal=refusal),
    ]
    body = {**CHAT, "stream": True, "guided_regex": "a+"}
    response = await post(gateway_app, "/v1/chat/completions", body)
    assert response.status_code == 200
    *_, last = events(response)
    assert last["error"]["param"] == "guided_regex" and "became too much" in last["error"]["message"]
    assert response.text.endswith("}\n\ndata: [DONE]\n\n")
    await gateway_app.assert_empty()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_an_output_that_is_nan_is_an_error_that_names_the_adapter_to_the_operator(gateway_app, path):
    refusal = Refusal(ErrorCode.MODEL_OUTPUT_INVALID, "the output is NaN")
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refusal)
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/embeddings": {"input": "a"}}
    with capture_logs() as logs:
        response = await post(gateway_app, path, {**bodies[path], "model": "captain"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (500, "model_output_invalid", "server_error")
    assert "NaN" in error["message"] and response.headers["x-should-retry"] == "false"
    [line] = [line for line in logs if line["event"] == "model_output_invalid"]
    assert (line["model"], line["adapter"], line["log_level"]) == (BASE, "pirate", "error")
    counted = [sample for family in gateway_app.metrics.collect() for sample in family.samples]
    [count] = [one for one in counted if one.name == "loralane_invalid_outputs_total"]
    assert (count.labels, count.value) == ({"model_name": BASE, "adapter": "pirate"}, 1)
    await gateway_app.assert_empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_status_waits_for_the_engine(gateway_app, stream):
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ABORT)
    response = await post(gateway_app, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "preempted")
    assert int(response.headers["retry-after"]) >= 1


async def test_a_silent_stream_is_kept_alive(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ping_seconds=0.02)
    gateway_app.engine.pause = 0.1
    response = await post(gateway_app, "/v1/completions", {**COMPLETION, "max_tokens": 2, "stream": True})
    assert ": ping\n" in response.text
    assert len(events(response)) == 3
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"max_tokens": 2}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 2}),
        ("/v1/responses", {"model": BASE, "input": "hi", "max_output_tokens": 2}),
    ],
)
async def test_a_ping_makes_no_event_of_its_own(tmp_path, path, body):
    """openai-go up to 3.42 parses the data of every event, also of one that has none, which an empty line ends."""
    gateway_app = await build_gateway_app(tmp_path, ping_seconds=0.02)
    gateway_app.engine.pause = 0.1
    response = await post(gateway_app, path, body | {"stream": True})
    assert ": ping\n" in response.text
    assert all("data: " in event for event in response.text.removesuffix("\n\n").split("\n\n"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True, "logprobs": 1}, {"stop": "world"}])
async def test_the_last_text_of_a_stream_and_its_finish_reason_are_apart(gateway_app, path, fields):
    if path == "/v1/chat/completions" and "logprobs" in fields:
        fields = fields | {"logprobs": True}
    told = events(await post(gateway_app, path, _least(path) | {"stream": True, **fields}))
    choices = [choice for chunk in told for choice in chunk["choices"]]
    *parts, last = choices
    assert [choice["finish_reason"] for choice in parts] == [None] * len(parts)
    assert (last.get("delta"), last.get("text")) in (({}, None), (None, ""))
    assert (last["finish_reason"], last["logprobs"], last.get("token_ids", [])) == ("stop", None, [])
    whole = (await post(gateway_app, path, _least(path) | fields)).json()["choices"][0]
    texts = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in parts]
    assert "".join(texts) == (whole["message"]["content"] if "message" in whole else whole["text"])
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert ids == whole.get("token_ids", [])


async def test_usage_so_far_is_told_with_every_chunk(gateway_app):
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = events(await post(gateway_app, "/v1/completions", COMPLETION | {"stream": True, "stream_options": options}))
    *before, last = [chunk["usage"] for chunk in told]
    counts = [usage["completion_tokens"] for usage in before]
    assert counts == sorted(counts) and counts[0] > 0
    assert (counts[-1], before[-1]["total_tokens"]) == (last["completion_tokens"], last["total_tokens"])
    assert {usage["prompt_tokens"] for usage in before} == {last["prompt_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_token_ids_are_those_of_the_prompt_too(gateway_app, path, stream):
    response = await post(gateway_app, path, _least(path) | {"return_token_ids": True, "stream": stream, "n": 2})
    prompt_ids = [*gateway_app.engine.requests[-1].prompt_ids]
    told = events(response) if stream else [response.json()]
    if path == "/v1/chat/completions":
        assert [chunk["prompt_token_ids"] for chunk in told if "prompt_token_ids" in chunk] == [prompt_ids]
    else:
        choices = [choice for chunk in told for choice in chunk["choices"] if "prompt_token_ids" in choice]
        assert [(choice["index"], choice["prompt_token_ids"]) for choice in choices] == [
            (0, prompt_ids),
            (1, prompt_ids),
        ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_stopped_an_answer_is_told(gateway_app, path, stream):
    async def reason(**fields):
        response = await post(gateway_app, path, _least(path) | {"stream": stream, **fields})
        chunk = events(response)[-1] if stream else response.json()
        return chunk["choices"][0]["stop_reason"]

    assert await reason() is None
    assert await reason(stop=["never", "world"]) == "world"
    assert await reason(max_tokens=2) is None
    ids = ids_of("Hey!")
    gateway_app.engine.last_words = TokenEvent("", ids, finish_reason=FinishReason.STOP)
    assert await reason(stop_token_ids=[ids[-1]]) == ids[-1]


def _least(path: str) -> dict:
    return COMPLETION if path == "/v1/completions" else CHAT


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(4)),
        ({"truncate_prompt_tokens": -1}, slice(-(CONTEXT - 50), None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0, "prompt_logprobs": 0}, slice(-CONTEXT, None)),
    ],
)
async def test_prompts_are_cut_where_that_is_asked_for(gateway_app, fields, kept):
    for prompt in ("a long text " * 50, list(ids_of("a long text " * 50))):
        answer = (await post(gateway_app, "/v1/completions", COMPLETION | {"prompt": prompt, **fields})).json()
        ids = ids_of("a long text " * 50)[kept]
        assert gateway_app.engine.requests[-1].prompt_ids == ids
        assert answer["usage"]["prompt_tokens"] == len(ids)


async def test_chats_are_cut_too_and_echoes_are_not(gateway_app):
    await post(gateway_app, "/v1/chat/completions", CHAT)
    await post(gateway_app, "/v1/chat/completions", CHAT | {"truncate_prompt_tokens": 2})
    whole, cut = (sent.prompt_ids for sent in gateway_app.engine.requests)
    assert cut == whole[-2:]
    for fields in ({"truncate_prompt_tokens": 2, "echo": True}, {"truncate_prompt_tokens": 0}):
        response = await post(gateway_app, "/v1/completions", COMPLETION | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    without_room = {"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}
    response = await post(gateway_app, "/v1/completions", COMPLETION | without_room)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
