"""Lines of training files, agreement of answers, what a gateway is asked, and the curve."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest
from fakes import BASE, build_gateway_app

from engine.core.messages.requests import Pooling, PoolingKind
from engine.executor.fake import fake_vector
from lab.route_training import asking
from lab.route_training.asking import Asker, AskError, gather_all
from lab.route_training.collect import agree
from lab.route_training.curve import Arm, choose, curve
from lab.route_training.examples import Label, read_example, read_examples

CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is 7 > 5?"}]}


def example(**fields):
    return read_example(json.dumps(CHAT | fields).encode())


def test_a_line_is_a_body_or_has_one():
    assert example().facts.question == "Is 7 > 5?" and example().facts.system
    assert example(body={"prompt": "2 + 2 ="}).facts.question == "2 + 2 ="
    assert read_example(b'{"prompt": [5, 6, 7]}').facts.question == "x x x "
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    offered = example(tools=[tool, tool | {"function": {"name": "g"}}], response_format=None)
    assert (offered.facts.tools, offered.facts.schema) == (2, False)
    assert example(response_format={"type": "json_object"}).facts.schema


@pytest.mark.parametrize(
    ("labels", "label"),
    [
        ({}, None),
        ({"small_suffices": True}, Label(1, 1)),
        ({"small_suffices": False}, Label(0, 1)),
        ({"small_score": 2, "large_score": 3.5}, Label(2, 3.5)),
    ],
)
def test_labels(labels, label):
    assert example(**labels).label == label
    assert "small_score" not in example(**labels).body


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "no JSON object"),
        (b"[]", "no JSON object"),
        (b'{"messages": []}', "messages must not be empty"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', "unknown role"),
        (b'{"prompt": ["a", "b"]}', "one prompt"),
        (b'{"body": 5}', "body must be"),
        (b'{"prompt": "a", "small_suffices": 1}', "true or false"),
        (b'{"prompt": "a", "small_score": 1}', "both be numbers"),
        (b'{"prompt": "a", "small_score": 1, "large_score": 1' + b"0" * 400 + b"}", "float64"),
        (b'{"prompt": "a", "small_score": 1, "large_score": 2, "small_suffices": true}', "either"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"line 3: .*{message}"):
        read_examples(path)


def test_each_prompt_counts_once(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a", "small_suffices": true}\n{"prompt": "b"}\n{"prompt": "a", "temperature": 1}\n')
    assert [one.body["prompt"] for one in read_examples(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("small", "large", "same"),
    [
        ("Paris.", " paris", True),
        ("Paris", "Rome", False),
        ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True),
        ('{"a": 1}', '{"a": 2}', False),
        (None, "", True),
    ],
)
def test_answers_agree_apart_from_form(small, large, same):
    assert agree({"content": small}, {"content": large}) is same


def test_tool_calls_agree_by_their_arguments():
    def call(arguments, name="f"):
        return {"content": None, "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}

    assert agree(call('{"a": 1, "b": 2}'), call('{"b": 2, "a": 1}'))
    assert not agree(call("{}"), call("{}", "g")) and not agree(call("{}"), {"content": ""})


async def test_answers_are_asked_for_greedily_and_again_after_a_refusal_for_now(monkeypatch):
    asked, refusals = [], [httpx.Response(429, headers={"retry-after": "0"}), httpx.Response(503)]

    def handle(request):
        asked.append((request.url.path, json.loads(request.content)))
        answer = {"choices": [{"message": {"content": "Yes"}, "text": " 4"}]}
        return refusals.pop() if refusals else httpx.Response(200, json=answer)

    monkeypatch.setattr(asking, "_wait", lambda response, attempt: 0.0)
    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gateway") as http:
        chat = await Asker(http).answer(example(temperature=1, stream=True, model="route", max_tokens=5), "small")
        text = await Asker(http).answer(example(body={"prompt": "2 + 2 ="}), "large")
    assert (chat, text, len(asked)) == ({"content": "Yes"}, {"content": " 4"}, 4)
    path, body = asked[0]
    assert path == "/v1/chat/completions"
    assert {name: body[name] for name in ("model", "temperature", "stream", "max_tokens")} == {
        "model": "small", "temperature": 0, "stream": False, "max_tokens": 5
    }  # fmt: skip
    assert asked[-1][0] == "/v1/completions" and asked[-1][1]["max_tokens"] == asking.DEFAULT_TOKENS


async def test_a_refusal_for_good_is_told():
    refusal = httpx.Response(404, json={"error": {"message": "no model 'tiny'"}})
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: refusal), base_url="http://gateway") as http:
        with pytest.raises(AskError, match="no model 'tiny'"):
            await Asker(http).answer(example(), "tiny")


async def test_the_first_error_cancels_the_other_requests():
    async def work(number):
        if number == 2:
            raise AskError("gone")
        await asyncio.Event().wait()

    with pytest.raises(AskError, match="gone"):
        await gather_all(work, range(4), lambda: None)


async def test_the_vector_is_that_of_the_rendered_prompt(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client("sk-acme") as client:
        chat = await Asker(client).vector(example(), BASE, "mean")
        ids = (await client.post("/tokenize", json={"model": BASE, **CHAT})).json()["tokens"]
        given = await Asker(client).vector(read_example(b'{"prompt": [5, 6, 7]}'), BASE, "last")
    mean, last = Pooling(PoolingKind.MEAN), Pooling(PoolingKind.LAST)
    assert chat.tobytes() == fake_vector(None, mean, ids) and given.tobytes() == fake_vector(None, last, [5, 6, 7])


CHANCES = np.array([0.9, 0.8, 0.8, 0.3])
SMALL, LARGE = Arm(np.array([1.0, 1.0, 0.0, 0.0]), np.full(4, 2.0)), Arm(np.ones(4), np.full(4, 20.0))


def test_the_curve_takes_prompts_of_one_probability_together():
    points = curve(CHANCES, SMALL, LARGE, unit=20.0, bounds=(-1.0, 2.0))
    assert [round(point.small_share * 4) for point in points] == [4, 3, 1, 0]
    assert [point.quality for point in points] == [0.5, 0.75, 1.0, 1.0]
    assert [point.cost for point in points] == pytest.approx([0.1, 0.325, 0.775, 1.0])
    assert [point.threshold for point in points] == pytest.approx([-1.0, 0.55, 0.85, 2.0])


@pytest.mark.parametrize(
    ("max_loss", "max_cost", "threshold"), [(0.0, None, 0.85), (0.25, None, 0.55), (None, 0.5, 0.55), (None, 1, 0.85)]
)
def test_the_threshold_is_the_cheapest_within_the_loss_or_the_best_within_the_cost(max_loss, max_cost, threshold):
    points = curve(CHANCES, SMALL, LARGE, unit=20.0)
    assert choose(points, max_loss, max_cost).threshold == pytest.approx(threshold)


def test_a_cost_below_that_of_small_alone_is_refused():
    with pytest.raises(ValueError, match=r"small member alone costs 0\.1"):
        choose(curve(CHANCES, SMALL, LARGE, unit=20.0), None, 0.05)
