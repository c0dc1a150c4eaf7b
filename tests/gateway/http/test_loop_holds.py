"""No body holds up the event loop: the longest single callback of a request, in CPU time of the loop's thread."""

import asyncio.events
import json
import time

import pytest
from fakes import BASE, GatewayApp, build_gateway_app

from gateway.core.json_bounds import INTEGERS_PER_VALUE, MOST_VALUES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MOST_SECONDS = 0.06
"""The goal is 20 ms on an idle machine. Without the bounds, each of these bodies holds the loop for 0.2 to 4 s."""


def filled(path: str, text: str, **fields: object) -> tuple[str, bytes]:
    """Return the path and the body, in which `text` replaces the word HERE."""
    body = json.dumps({"model": BASE, "max_tokens": 1, **fields}).replace('"HERE"', text)
    return path, body.encode()


def many(member: str, count: int) -> str:
    return f"[{','.join([member] * count)}]"


def chat(text: str, **fields: object) -> tuple[str, bytes]:
    return filled(CHAT, text, **({"messages": [{"role": "user", "content": "hi"}]} | fields))


def calling(arguments: str, count: int = 1) -> tuple[str, bytes]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "HERE"}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call] * count}]
    return chat(json.dumps(arguments), messages=history)


MESSAGE, TOOL = '{"role":"user","content":""}', '{"type":"function","function":{"name":"f%d"}}'
MOST = MOST_VALUES - 100
BODIES = {
    "arguments of millions of lists": lambda: calling(f'{{"a":{many("[]", 2_500_000)}}}'),
    "arguments of many calls": lambda: calling(f'{{"a":{many("[]", MOST // 2)}}}', 100),
    "an enum of objects": lambda: chat(many('{"a":1}', 900_000), guided_json={"enum": "HERE"}),
    "a schema as text": lambda: chat(json.dumps(many("[]", 2_500_000)), guided_json="HERE"),
    "template variables": lambda: chat(many("[]", 2_500_000), chat_template_kwargs={"a": "HERE"}),
    "a wrong type": lambda: chat(many("[]", 2_500_000), timeout="HERE"),
    "as many messages as allowed": lambda: chat(many(MESSAGE, MOST // 3), messages="HERE"),
    "as many tools as allowed": lambda: chat(f"[{','.join(TOOL % i for i in range(MOST // 4))}]", tools="HERE"),
    "hashes that collide": lambda: chat(
        json.dumps({str((2**61 - 1) * (i + 1)): 1 for i in range(25_000)}), logit_bias="HERE"
    ),
    "as many ids as allowed": lambda: filled(COMPLETION, many("65", MOST * INTEGERS_PER_VALUE), prompt="HERE"),
    "a long text": lambda: filled(COMPLETION, json.dumps("a " * 4_000_000), prompt="HERE"),
    "long numbers": lambda: chat(many("9" * 4000, 2000), stop_token_ids="HERE"),
    "a long role": lambda: chat(json.dumps("r" * 8_000_000), messages=[{"role": "HERE", "content": ""}]),
    "as many items as allowed": lambda: filled("/v1/responses", many(MESSAGE, MOST // 3), input="HERE"),
    "as many blocks as allowed": lambda: filled("/v1/messages", many(MESSAGE, MOST // 3), messages="HERE"),
    "an object for messages": lambda: filled(
        "/tokenize", json.dumps(dict.fromkeys(map(str, range(600_000)), 0)), messages="HERE"
    ),
    "ids to decode": lambda: filled("/detokenize", many("65", MOST * INTEGERS_PER_VALUE), tokens="HERE"),
}
"""Makes each body, of megabytes, when its test runs: all test processes collect this file."""


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


@pytest.fixture
def holds(monkeypatch) -> list[float]:
    """CPU seconds of each callback of the event loop."""
    run, found = asyncio.events.Handle._run, []

    def timed(handle: asyncio.events.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        found.append(time.thread_time() - begun)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    return found


@pytest.fixture
def sent(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    """Return the path and the body of a request, made before the loop runs."""
    return BODIES[request.param]()


@pytest.mark.parametrize("sent", BODIES, indirect=True)
async def test_no_body_holds_up_the_loop(gateway_app, sent, holds):
    path, body = sent
    async with gateway_app.client() as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text
    assert max(holds) < MOST_SECONDS
