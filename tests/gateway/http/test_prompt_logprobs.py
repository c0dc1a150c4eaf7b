"""Log probabilities of prompts over HTTP: echoes as OpenAI has them, `prompt_logprobs` as vLLM has them, streams."""

import asyncio
import json
import math

import pytest
from fakes import BASE, CONTEXT, GatewayApp, build_gateway_app, ids_of

from engine.core.messages.prompt_logprobs import unpack
from engine.core.messages.requests import FinishReason, TokenEvent
from engine.executor.fake import fake_row
from gateway.requests.settings import ServiceSettings

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "aéb"
TOKENS = ["a", r"bytes:\xc3", r"bytes:\xa9", "b"]
SCORED = {"model": BASE, "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def post(gateway_app, path, body):
    async with gateway_app.client() as client:
        return await client.post(path, json=body)


async def choices_of(gateway_app, **fields):
    response = await post(gateway_app, COMPLETIONS, SCORED | fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def scores(text, width=1, adapter_hash=None):
    """What the fake engine says of each token of a text after the first."""
    ids = list(ids_of(text))
    return [next(unpack(fake_row(adapter_hash, ids[: end + 1], width), width)) for end in range(1, len(ids))]


async def test_an_echo_lists_the_prompts_tokens_before_the_answers(gateway_app):
    [choice] = await choices_of(gateway_app)
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT + "He"
    assert logprobs["tokens"] == [*TOKENS, "H", "e"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, *(values.logprob for _, values in scores(PROMPT)), -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {TOKENS[1]: scores(PROMPT)[0].values.logprob}
    assert logprobs["top_logprobs"][-1] == {"<|end|>": -0.5, "e": -0.5}
    await gateway_app.assert_empty()


async def test_an_echo_alone_is_scored_and_charged_as_a_prompt(gateway_app):
    response = (await post(gateway_app, COMPLETIONS, SCORED | {"max_tokens": 0, "logprobs": 0})).json()
    [choice] = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["tokens"] == TOKENS
    assert choice["logprobs"]["top_logprobs"][-1] == {"b": choice["logprobs"]["token_logprobs"][-1]}
    assert (response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"]) == (4, 0)
    assert list(gateway_app.limiter.ends.values()) == [[4]]
    [sent] = gateway_app.engine.requests
    assert (sent.params.max_tokens, sent.params.prompt_logprobs) == (0, 0)
    await gateway_app.assert_empty()


async def test_several_prompts_of_an_adapter_and_one_of_one_token(gateway_app):
    prompts = [list(ids_of(PROMPT)), list(ids_of("x")), list(ids_of("yz"))]
    choices = await choices_of(gateway_app, model="pirate", prompt=prompts, max_tokens=1)
    version = gateway_app.adapters.records["pirate"].version
    assert [choice["text"] for choice in choices] == [PROMPT + "H", "xH", "yzH"]
    for choice, text in zip(choices, (PROMPT, "x", "yz"), strict=True):
        own = [values.logprob for _, values in scores(text, 1, version)]
        assert choice["logprobs"]["token_logprobs"] == [None, *own, -0.5]
        assert len(choice["logprobs"]["tokens"]) == len(own) + 2


@pytest.mark.parametrize("per_event", [1, 3, 100])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_a_stream_tells_the_same(gateway_app, max_tokens, per_event):
    gateway_app.engine.tokens_per_event = per_event
    [whole] = await choices_of(gateway_app, max_tokens=max_tokens)
    response = await post(gateway_app, COMPLETIONS, SCORED | {"max_tokens": max_tokens, "stream": True})
    frames = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    choices = [frame["choices"][0] for frame in frames]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    ends = [len("".join(choice["text"] for choice in choices[:count])) for count in range(len(choices))]
    for choice, end in zip(choices, ends, strict=True):
        assert not choice["logprobs"] or choice["logprobs"]["text_offset"][0] == end, "they come with their text"
    for name, values in whole["logprobs"].items():
        assert [v for choice in choices if choice["logprobs"] for v in choice["logprobs"][name]] == values
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole["finish_reason"]]


async def test_prompt_logprobs_are_those_of_vllm(gateway_app):
    [choice] = await choices_of(gateway_app, echo=False, logprobs=None, prompt_logprobs=2, max_tokens=0)
    first, *others = choice["prompt_logprobs"]
    assert (choice["text"], choice["logprobs"], first) == ("", None, None)
    tokenizer = gateway_app.gateway.models.default.tokenizer
    for token_id, found, (rank, values) in zip(ids_of(PROMPT)[1:], others, scores(PROMPT, 2), strict=True):
        [(own, logprob), (other, lower)] = values.top
        assert own == token_id
        assert found[str(own)] == {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(own)}
        assert found[str(other)] == {"logprob": lower, "rank": 2, "decoded_token": tokenizer.token_text(other)}
    [both] = await choices_of(gateway_app, logprobs=0, prompt_logprobs=1)
    assert [len(top or ()) for top in both["logprobs"]["top_logprobs"]] == [0, 1, 1, 1, 1, 1]
    assert [len(found or ()) for found in both["prompt_logprobs"]] == [0, 1, 1, 1]


async def test_a_chats_prompt_logprobs_are_beside_its_choices(gateway_app):
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1, "max_tokens": 1}
    answer = (await post(gateway_app, CHATS, body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert [entry["decoded_token"] for entry in answer["prompt_logprobs"][1].values()] == ["h"]
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (COMPLETIONS, {"n": 2}, "n", "unsupported_parameter"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
        (CHATS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_parameter"),
        (CHATS, {"prompt_logprobs": 1, "n": 2}, "n", "unsupported_parameter"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "integer_above_max_value"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "integer_below_min_value"),
        (COMPLETIONS, {"prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
        (COMPLETIONS, {"max_tokens": 0, "echo": False}, "max_tokens", None),
        (COMPLETIONS, {"prompt": "x" * (CONTEXT + 1), "max_tokens": 0}, "prompt", "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(gateway_app, path, fields, param, code):
    chat = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
    response = await post(gateway_app, path, (SCORED if path == COMPLETIONS else chat) | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json()["error"]["code"] == code
    assert gateway_app.engine.requests == []


async def test_all_prompts_together_are_bounded(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(max_prompt_logprobs=60))
    await choices_of(gateway_app, prompt=["x" * 10, "y" * 10], logprobs=2)
    for fields in ({"logprobs": 3}, {"prompt_logprobs": 3}, {"prompt": ["x" * 10, "y" * 11], "logprobs": 2}):
        response = await post(gateway_app, COMPLETIONS, SCORED | {"prompt": ["x" * 10, "y" * 10]} | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    wanted = "a request may have 20 tokens for so many log probabilities; up to prompt it has 21"
    assert wanted in response.json()["error"]["message"]


async def test_a_long_prompt_does_not_hold_up_the_event_loop(gateway_app):
    gateway_app.engine.info.max_model_len = 20_000
    gateway_app.engine.tokens_per_event = 5_000
    text = "x" * 9_000
    [whole] = await choices_of(gateway_app, prompt=text, logprobs=5, max_tokens=0)
    assert len(whole["logprobs"]["tokens"]) == 9_000
    body = SCORED | {"prompt": text, "logprobs": 5, "max_tokens": 0, "stream": True}
    sent, turns = asyncio.create_task(post(gateway_app, COMPLETIONS, body)), 0
    while not sent.done():
        turns += 1
        await asyncio.sleep(0)
    frames = [line for line in sent.result().text.split("\n\n") if '"token_logprobs"' in line]
    assert len(frames) > 9_000 * 6 // 2048 and turns > len(frames)


async def test_a_special_token_that_the_author_wrote_is_part_of_the_text(gateway_app):
    [choice] = await choices_of(gateway_app, prompt="a<|end|>b", max_tokens=1)
    assert choice["text"] == "a<|end|>bH"
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9]
    [choice] = await choices_of(gateway_app, prompt=list(ids_of("a<|end|>b")), max_tokens=1)
    assert choice["text"] == "abH"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


async def test_an_engine_that_scores_no_prompts_is_an_error(gateway_app):
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.LENGTH)
    assert (await post(gateway_app, COMPLETIONS, SCORED)).status_code == 500


async def test_a_probability_of_zero_has_openais_value(gateway_app):
    ids = ids_of("ab")
    row = fake_row(None, list(ids), 1)
    rows = row.replace(row[:4], b"\x00\x00\x80\xff")
    assert next(unpack(rows, 1)).values.logprob == -math.inf
    gateway_app.engine._prompt_logprobs = lambda request: [TokenEvent(request.id, prompt_logprobs=rows)]
    [choice] = await choices_of(gateway_app, prompt="ab", max_tokens=0)
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0]
