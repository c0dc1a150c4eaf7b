"""Sampling parameters that a model recommends, where a request sets none, in every protocol; and special tokens."""

import json
from dataclasses import replace

import pytest
from fakes import BASE, PATIENT, TEMPLATE, FakeEngine, build_gateway_app, byte_tokenizer, ids_of
from tokenizers.processors import TemplateProcessing

from gateway.config.models import ModelConfig
from gateway.pb import generation_pb2 as pb
from gateway.requests.types import DEFAULTED
from gateway.rpc.wire import generate_request
from gateway.serve.launch import StartError
from gateway.serve.models import sampling_defaults

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 5}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": BASE, "prompt": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 10},
    "/v1/responses": {"model": BASE, "input": "hi"},
}


@pytest.fixture
async def gateway_app(tmp_path):
    return await build_gateway_app(tmp_path, replace(PATIENT, sampling_defaults=QWEN))


async def sent(gateway_app, path, **fields):
    """Send a body with these fields, and return the request that the engine got."""
    async with gateway_app.client() as client:
        response = await client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return gateway_app.engine.requests[-1] if gateway_app.engine.requests else None


def values(params):
    return {name: getattr(params, name) for name in QWEN}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_sets_nothing_gets_the_models_values(gateway_app, path):
    assert values((await sent(gateway_app, path)).params) == QWEN


@pytest.mark.parametrize("path", BODIES)
async def test_what_a_request_sets_is_its_own(gateway_app, path):
    params = (await sent(gateway_app, path, temperature=1.0, top_p=1.0)).params
    assert values(params) == QWEN | {"temperature": 1.0, "top_p": 1.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, {"top_p": 1.0}], ids=["the model's", "the caller's"])
async def test_a_response_says_how_it_was_sampled(gateway_app, given, stream):
    async with gateway_app.client() as client:
        answer = await client.post("/v1/responses", json={**BODIES["/v1/responses"], **given, "stream": stream})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    said = [event["response"] for event in map(json.loads, lines) if "response" in event] or [answer.json()]
    params = gateway_app.engine.requests[-1].params
    assert {(one["temperature"], one["top_p"]) for one in said} == {(params.temperature, params.top_p)}
    assert (params.temperature, params.top_p) == (0.7, given.get("top_p", 0.8))


async def test_zeros_are_values_and_the_bound_of_answers_is_one(gateway_app):
    fields = {"temperature": 0, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 9}
    params = (await sent(gateway_app, "/v1/chat/completions", **fields)).params
    assert values(params) == QWEN | {"temperature": 0, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert (await sent(gateway_app, "/v1/completions", max_tokens=3)).params.max_tokens == 3


def test_fields_that_a_grpc_message_has_are_the_callers():
    message = pb.GenerateRequest(model=BASE, prompt="a")
    assert generate_request(message, "id", None).defaulted == DEFAULTED
    message.sampling.temperature = 1.0
    assert generate_request(message, "id", None).defaulted == DEFAULTED - {"temperature"}


async def test_the_list_of_models_says_them(gateway_app):
    async with gateway_app.client() as client:
        listed = (await client.get("/v1/models")).json()["data"]
    assert {one["id"]: one["default_sampling_params"] for one in listed}["pirate"] == QWEN


@pytest.mark.parametrize(
    ("path", "given", "has_bos"),
    [
        ("/v1/completions", None, True),
        ("/v1/completions", False, False),
        ("/v1/chat/completions", None, False),
        ("/v1/chat/completions", True, True),
    ],
)
async def test_special_tokens_are_added_as_in_vllm(tmp_path, path, given, has_bos):
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer._backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    engine, fields = FakeEngine(tokenizer), {"model": "special"}
    fields |= {} if given is None else {"add_special_tokens": given}
    gateway_app = await build_gateway_app(tmp_path, others={"special": engine})
    await sent(gateway_app, path, **fields)
    [ids] = [request.prompt_ids for request in engine.requests]
    assert (ids[0] == 0) == has_bos
    plain = ids_of("hi") if path == "/v1/completions" else ids[has_bos:]
    assert ids[has_bos:] == plain and ids_of("hi")[0] in plain
    async with gateway_app.client() as client:
        body = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "hi"}
        assert (await client.post("/tokenize", json=body | fields)).json()["tokens"] == list(ids)


async def test_a_start_reads_them_if_the_configuration_asks(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}')
    assert await sampling_defaults(tmp_path, ModelConfig(), "model") == {"top_k": 20}
    assert await sampling_defaults(tmp_path, ModelConfig(generation_config="none"), "model") == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": "x"}')
    with pytest.raises(StartError, match=r"models\.a\.generation_config: .*top_k is 'x'"):
        await sampling_defaults(tmp_path, ModelConfig(), "models.a")
