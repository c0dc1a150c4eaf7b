"""What chat front ends send, by their documents, is answered as they expect: Open WebUI, LibreChat, Continue, Chatbox.

The bodies are written from the front ends' documents and settings; the front ends themselves are not run.
"""

import json

import pytest
from browser import chromium, pages
from fakes import BASE, build_gateway_app
from served import served

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
HI = {"role": "user", "content": "hi"}
HISTORY = [SYSTEM, HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And now?"}]
USAGE = {"include_usage": True}
SEARCH = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file of the workspace.",
        "parameters": {"type": "object", "required": ["filepath"], "properties": {"filepath": {"type": "string"}}},
    },
}
CALLED = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"filepath":"a.py"}'}}
]}  # fmt: skip
CHATS = {
    "Open WebUI, chat": {"stream": True, "model": BASE, "messages": [SYSTEM, HI], "stream_options": USAGE},
    "Open WebUI, settings of a chat": {
        "stream": True,
        "model": BASE,
        "messages": HISTORY,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 128,
        "frequency_penalty": 0.1,
        "repeat_penalty": 1.1,
        "seed": 42,
        "stop": ["</s>"],
        "logit_bias": {"5": 10},
    },
    "Open WebUI, title": {"model": BASE, "messages": [HI], "stream": False, "max_completion_tokens": 1000},
    "LibreChat, defaults": {
        "model": BASE,
        "temperature": 1,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "user": "65f1c0ffee",
        "stream": True,
        "messages": [{**SYSTEM, "name": "instructions"}, HI],
    },
    "LibreChat, agent": {
        "model": BASE,
        "user": "65f1c0ffee",
        "stream": True,
        "stream_options": USAGE,
        "parallel_tool_calls": True,
        "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": [SEARCH],
    },
    "LibreChat, title": {"model": BASE, "messages": [HI], "stream": False, "temperature": 0.2, "max_tokens": 16},
    "Continue, chat": {"messages": HISTORY, "model": BASE, "max_tokens": 2048, "stream": True},
    "Continue, agent": {
        "messages": [HI, CALLED, {"role": "tool", "content": "x = 1", "tool_call_id": "call_1"}],
        "model": BASE,
        "max_tokens": 2048,
        "stream": True,
        "stream_options": USAGE,
        "tools": [SEARCH],
        "parallel_tool_calls": False,
    },
    "Chatbox, chat": {
        "model": BASE,
        "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "temperature": 0.7,
        "top_p": 1,
        "stream": True,
        "stream_options": USAGE,
    },
    "Chatbox, connection check": {"model": BASE, "messages": [HI], "max_tokens": 1, "stream": False},
}
FILLING = {
    "prompt": "<|fim_prefix|>def f():\n<|fim_suffix|>\n<|fim_middle|>",
    "model": BASE,
    "max_tokens": 64,
    "temperature": 0.01,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": ["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>", "/src/", "```"],
    "stream": True,
}
"""What Continue completes code with."""


@pytest.fixture
async def gateway_app(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.info.max_model_len = 2**14
    yield gateway_app
    await gateway_app.assert_empty()


async def post(gateway_app, path, body):
    async with gateway_app.client() as client:
        return await client.post(path, json=body)


def events(text):
    """Return the chunks of a stream, which ends with [DONE]."""
    lines = [line for line in text.split("\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def check_stream(body, text):
    chunks = events(text)
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", BASE)}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant" and "".join(delta.get("content") or "" for delta in deltas)
    endings = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert endings in (["stop"], ["length"])
    if body.get("stream_options"):
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_is_answered(gateway_app, name):
    body = CHATS[name]
    answer = await post(gateway_app, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        check_stream(body, answer.text)
        return
    message = answer.json()["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"]
    assert answer.json()["usage"]["total_tokens"] > 0


async def test_code_is_completed(gateway_app):
    answer = await post(gateway_app, "/v1/completions", FILLING)
    assert answer.status_code == 200, answer.text
    chunks = events(answer.text)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_code_is_searched(gateway_app):
    """Continue embeds the pieces of a workspace, and ranks those that it finds."""
    vectors = await post(gateway_app, "/v1/embeddings", {"input": ["a = 1", "b = 2"], "model": BASE})
    assert [item["index"] for item in vectors.json()["data"]] == [0, 1]
    ranks = {"model": BASE, "query": "Where is a?", "documents": ["a = 1", "b = 2"]}
    assert len((await post(gateway_app, "/v1/rerank", ranks)).json()["results"]) == 2


async def test_models_are_listed(gateway_app):
    async with gateway_app.client() as client:
        listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list" and BASE in {model["id"] for model in listed["data"]}
    assert all({"id", "object", "created", "owned_by"} <= model.keys() for model in listed["data"])


SCRIPT = """async ([gateway, body]) => {
    const answer = await fetch(`${gateway}/v1/chat/completions`, {
        method: "POST",
        headers: {"authorization": "Bearer sk-acme", "content-type": "application/json"},
        body: JSON.stringify(body),
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parts = [];
    for (let part = await reader.read(); !part.done; part = await reader.read()) parts.push(part.value);
    return {status: answer.status, parts};
}"""


def test_a_page_of_another_origin_streams_what_they_stream(tmp_path):
    """Chatbox's and other front ends' pages ask the gateway themselves."""
    streamed = [body for body in CHATS.values() if body["stream"]]
    with chromium() as browser, pages() as port, served(tmp_path, cors_origins=("http://127.0.0.1:*",)) as gateway:
        gateway.gateway_app.engine.info.max_model_len = 2**14
        gateway.gateway_app.engine.pause = 0.01
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        for body in streamed:
            found = page.evaluate(SCRIPT, [gateway.url, body])
            assert found["status"] == 200, found
            assert len(found["parts"]) > 1, "the answer came at once"
            check_stream(body, "".join(found["parts"]))
        gateway.run(gateway.gateway_app.assert_empty())
