"""What every client of OpenAI's may count on, whichever it is."""

import json

import openai
import pytest
from fakes import BASE

from engine.core.types import ErrorCode, FinishReason, Refusal, TokenEvent
from gateway.core.limits import Scope
from gateway.limiter.base import ReserveRequest

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
PROMPT_TOKENS = 5
"""Of CHAT in the template's words: two letters and what is around them."""
HELLO = "Hello, world!"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks somewhere.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALLS = (
    '<tool_call>\n{"name": "look", "arguments": {"place": "the \\"sea\\""}}\n</tool_call>\n'
    '<tool_call>{"name": "look", "arguments": {"place": "sky"}}</tool_call>'
)

pytestmark = pytest.mark.parametrize("how", ["chat", "stream"])


async def test_chat_and_usage(stage, how):
    reply = await getattr(stage.client(), how)(**CHAT)
    assert (reply.only.text, reply.only.finish) == (HELLO, "stop")
    assert reply.usage == (PROMPT_TOKENS, len(HELLO) + 1)
    assert reply.pieces > len(HELLO) or how == "chat"


async def test_stop_and_length(stage, how):
    stopped = await getattr(stage.client(), how)(**CHAT, stop=["wor", "zzz"])
    assert (stopped.only.text, stopped.only.finish) == ("Hello, ", "stop")
    cut = await getattr(stage.client(), how)(**CHAT, max_completion_tokens=4)
    assert (cut.only.text, cut.only.finish) == ("Hell", "length")


async def test_logprobs(stage, how):
    reply = await getattr(stage.client(), how)(**CHAT, logprobs=True, top_logprobs=2)
    assert reply.only.logprobs == [(character, 2) for character in HELLO]


async def test_several_answers(stage, how):
    client = stage.client()
    if how == "stream" and not client.streams_several:
        pytest.skip(f"{client.module} streams one answer at a time")
    stage.gateway.house.engine.reply = lambda sent: f"seed {sent.params.seed}"
    reply = await getattr(client, how)(**CHAT, n=3, seed=7)
    assert {index: choice.text for index, choice in reply.choices.items()} == {i: f"seed {7 + i}" for i in range(3)}
    assert {choice.finish for choice in reply.choices.values()} == {"stop"}
    assert reply.usage[1] == 3 * (len("seed 7") + 1)
    assert len(stage.gateway.house.limiter.reserved) == 1


async def test_tools(stage, how):
    stage.gateway.house.engine.reply = lambda sent: CALLS
    reply = await getattr(stage.client(), how)(**CHAT, tools=[LOOK], tool_choice="auto")
    assert (reply.only.text, reply.only.finish) == ("", "tool_calls")
    calls = [
        (called, args if isinstance(args, dict) else json.loads(args)) for called, args in reply.only.calls.values()
    ]
    assert calls == [("look", {"place": 'the "sea"'}), ("look", {"place": "sky"})]


async def test_a_call_is_answered_and_the_chat_goes_on(stage, how):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "sea"}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
    ]
    reply = await getattr(stage.client(), how)(model=BASE, messages=messages, tools=[LOOK])
    assert (reply.only.text, reply.only.finish) == (HELLO, "stop")
    [sent] = stage.gateway.house.engine.requests
    assert "<|tool|>blue" in stage.gateway.house.gateway.tokenizer.decode(sent.prompt, skip_special=False)


@pytest.mark.parametrize(
    ("key", "change", "error", "status"),
    [
        ("sk-wrong-key", {}, openai.AuthenticationError, 401),
        ("sk-acme", {"model": "nobody"}, openai.NotFoundError, 404),
        ("sk-acme", {"max_tokens": 5000}, openai.BadRequestError, 400),
        ("sk-acme", {"tools": [LOOK], "tool_choice": "required"}, openai.BadRequestError, 400),
        ("sk-globex", {"model": "pirate", "max_tokens": 1000}, openai.RateLimitError, 429),
    ],
)
async def test_what_trying_again_cannot_help_is_tried_once(stage, how, key, change, error, status):
    with pytest.raises(error) as caught:
        await getattr(stage.client(key, retries=2), how)(**CHAT | change)
    assert caught.value.status_code == status
    assert stage.answered == [status]


async def test_a_full_lane_is_tried_again(stage, how, monkeypatch):
    house = stage.gateway.house
    refusal = Refusal(ErrorCode.LANE_QUEUE_FULL, "too many are waiting", 0.05)
    house.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refusal)
    events = house.engine._events

    def once(request):
        answer = events(request)
        house.engine.last_words = None
        return answer

    monkeypatch.setattr(house.engine, "_events", once)
    reply = await getattr(stage.client(retries=2), how)(**CHAT)
    assert (reply.only.text, stage.answered) == (HELLO, [503, 200])


async def test_a_tenants_limit_is_waited_for(stage, how):
    stage.gateway.run(use_up(stage.gateway.house.limiter))
    reply = await getattr(stage.client("sk-globex", retries=2), how)(**CHAT, max_tokens=20)
    assert (reply.only.text, stage.answered) == (HELLO, [429, 200])


async def use_up(limiter):
    """Leaves globex half a second of its tokens in debt."""
    await limiter.set_limits(Scope("globex"), {"tokens_per_minute": 60_000})
    grant = await limiter.reserve(ReserveRequest("before", "globex", "key", 60_000, BASE))
    await limiter.settle(grant, 60_500)
