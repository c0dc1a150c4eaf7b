"""What every client may count on, whichever it is, over HTTP and gRPC."""

import json

import openai
import pytest
from fakes import BASE, tiny_tokenizer

from engine.core.messages.requests import ErrorCode, FinishReason, Refusal, TokenEvent
from gateway.core.limits import Scope
from gateway.limiter.base import ReserveRequest
from tests.e2e.behaviour.grpc_client import Refused
from tests.grammar_walk import walk

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
PROMPT_TOKENS = 5
"""Counts the tokens of CHAT in the template's words: two letters and what is around them."""
HELLO = "Hello, world!"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 9}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
WAIT = {
    "type": "function",
    "function": {
        "name": "wait",
        "description": "Waits.",
        "parameters": {
            "type": "object",
            "properties": {"seconds": {"enum": [1, 2]}},
            "required": ["seconds"],
            "additionalProperties": False,
        },
    },
}
PARAMETERS = {"look": ["place"], "wait": ["seconds"]}
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"place": "the \\"sea\\""}}\n</tool_call>\n'
    '<tool_call>{"name": "look", "arguments": {"place": "sky"}}</tool_call>'
)


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


UNKNOWN_TOOL = {"type": "function", "function": {"name": "unknown"}}
NO_SETS = named({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
COLOR = named(
    {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    }
)

pytestmark = pytest.mark.parametrize("how", ["chat", "stream"])


async def test_chat_and_usage(setup, how):
    reply = await getattr(setup.client(), how)(**CHAT)
    assert (reply.only.text, reply.only.finish) == (HELLO, "stop")
    assert reply.usage == (PROMPT_TOKENS, len(HELLO) + 1)
    assert reply.pieces > len(HELLO) or how == "chat"


async def test_stop(setup, how):
    client = setup.client()
    field = {"stop": ["wor", "zzz"]}
    stopped = await getattr(client, how)(**CHAT, **(field if client.of_chats else {"extra_body": field}))
    assert (stopped.only.text, stopped.only.finish) == ("Hello, ", "stop")


async def assert_refused(client, how, name, value):
    """A field of chats that OpenAI's Responses API lacks is refused, with the route that has it."""
    with pytest.raises(openai.BadRequestError, match=f"{name} is not a field of /v1/responses; use /v1/chat/comp"):
        await getattr(client, how)(**CHAT, extra_body={name: value})


async def test_length(setup, how):
    cut = await getattr(setup.client(), how)(**CHAT, max_completion_tokens=4)
    assert (cut.only.text, cut.only.finish) == ("Hell", "length")


async def test_logprobs(setup, how):
    reply = await getattr(setup.client(), how)(**CHAT, logprobs=True, top_logprobs=2)
    assert reply.only.logprobs == [(character, 2) for character in HELLO]


async def test_several_answers(setup, how):
    client = setup.client()
    if not client.of_chats:
        await assert_refused(client, how, "n", 3)
        return
    setup.gateway.gateway_app.engine.reply = lambda sent: f"seed {sent.params.seed}"
    reply = await getattr(client, how)(**CHAT, n=3, seed=7)
    if how == "chat" or client.streams_several:
        texts = {index: choice.text for index, choice in reply.choices.items()}
        assert texts == {index: f"seed {7 + index}" for index in range(3)}
        assert {choice.finish for choice in reply.choices.values()} == {"stop"}
    assert reply.usage[1] == 3 * (len("seed 7") + 1)
    assert len(setup.gateway.gateway_app.limiter.reserved) == 1


async def test_tools(setup, how):
    setup.gateway.gateway_app.engine.reply = lambda sent: CALLS
    reply = await getattr(setup.client(), how)(**CHAT, tools=[LOOK], tool_choice="auto")
    assert (reply.only.text, reply.only.finish) == ("", "tool_calls")
    assert calls(reply) == [("look", {"place": 'the "sea"'}), ("look", {"place": "sky"})]


def calls(reply):
    """Some clients parse arguments themselves."""
    made = reply.only.calls.values()
    return [(name, args if isinstance(args, dict) else json.loads(args)) for name, args in made]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"tool_choice": "required"}, {"look", "wait"}),
        ({"tool_choice": {"type": "function", "function": {"name": "wait"}}, "parallel_tool_calls": False}, {"wait"}),
    ],
    ids=["required", "named"],
)
async def test_tools_that_have_to_be_called(setup, how, options, names):
    """The engine answers nonsense, as far as it is let."""
    nonsense(setup)
    for seed in range(4):
        reply = await getattr(setup.client(), how)(**CHAT, tools=[LOOK, WAIT], seed=seed, **options)
        assert (reply.only.text or "", reply.only.finish) == ("", "tool_calls")
        made = calls(reply)
        assert made and {name for name, _ in made} <= names
        assert [list(arguments) for _, arguments in made] == [PARAMETERS[name] for name, _ in made]


async def test_json_schema(setup, how):
    nonsense(setup)
    replies = [await getattr(setup.client(), how)(**CHAT, seed=seed, response_format=COLOR) for seed in range(4)]
    assert {reply.only.finish for reply in replies} == {"stop"}
    assert all(json.loads(reply.only.text)["color"] in ("red", "green") for reply in replies)


def nonsense(setup):
    backend = tiny_tokenizer()._backend
    setup.gateway.gateway_app.engine.reply = lambda sent: walk(sent.params.grammar, backend, sent.params.seed)


async def test_a_call_is_answered_and_the_chat_goes_on(setup, how):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "sea"}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
    ]
    reply = await getattr(setup.client(), how)(model=BASE, messages=messages, tools=[LOOK])
    assert (reply.only.text, reply.only.finish) == (HELLO, "stop")
    [sent] = setup.gateway.gateway_app.engine.requests
    assert "<|tool|>blue" in setup.gateway.gateway_app.gateway.models.default.tokenizer.decode(
        sent.prompt_ids, skip_special=False
    )


@pytest.mark.parametrize(
    ("key", "change", "error", "status"),
    [
        ("sk-wrong-key", {}, openai.AuthenticationError, 401),
        ("sk-acme", {"model": "unknown"}, openai.NotFoundError, 404),
        ("sk-acme", {"temperature": 5.0}, openai.BadRequestError, 400),
        ("sk-acme", {"tools": [LOOK], "tool_choice": UNKNOWN_TOOL}, openai.BadRequestError, 400),
        ("sk-acme", {"response_format": NO_SETS}, openai.BadRequestError, 400),
        ("sk-globex", {"model": "pirate", "max_tokens": 1000}, openai.RateLimitError, 429),
    ],
)
async def test_what_trying_again_cannot_help_is_tried_once(setup, how, key, change, error, status):
    with pytest.raises((error, Refused)) as caught:
        await getattr(setup.client(key, retries=2), how)(**CHAT | change)
    assert caught.value.status_code == status
    assert setup.answered == [status]


async def test_a_full_lane_is_tried_again(setup, how, monkeypatch):
    gateway_app = setup.gateway.gateway_app
    refusal = Refusal(ErrorCode.LANE_QUEUE_FULL, "too many are waiting", 0.05)
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refusal)
    events = gateway_app.engine._events

    def once(request):
        answer = events(request)
        gateway_app.engine.last_words = None
        return answer

    monkeypatch.setattr(gateway_app.engine, "_events", once)
    reply = await getattr(setup.client(retries=2), how)(**CHAT)
    assert (reply.only.text, setup.answered) == (HELLO, [503, 200])


async def test_a_tenants_limit_is_waited_for(setup, how):
    await getattr(setup.client(), how)(**CHAT)  # a library's first request may take longer than the debt lasts
    setup.answered.clear()
    setup.gateway.run(use_up(setup.gateway.gateway_app.limiter))
    reply = await getattr(setup.client("sk-globex", retries=2), how)(**CHAT, max_tokens=20)
    assert (reply.only.text, setup.answered) == (HELLO, [429, 200])


async def use_up(limiter):
    """Leaves globex half a second of its tokens in debt."""
    await limiter.set_limits(Scope("globex"), {"tokens_per_minute": 60_000})
    grant = await limiter.reserve(ReserveRequest("before", "globex", "key", 60_000, BASE))
    await limiter.settle(grant, 60_500)
