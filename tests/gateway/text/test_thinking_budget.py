"""Reasoning that a budget ends: over every protocol, and in engines that continue it after a move."""

import asyncio
from contextlib import aclosing

import pytest
from fakes import BASE, TEMPLATE, build_gateway_app, tiny_tokenizer
from grpc_app import as_key, open_grpc_app, refused
from grpc_app import ask as grpc_ask
from local_engines import Engines, ask, until

from engine.core.messages.requests import FinishReason, ProposalCount, SamplingParams
from engine.executor.fake import FakeExecutor, fake_token
from gateway.pb import generation_pb2 as pb
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import Waits
from gateway.requests.answer.thinking import ThinkingBudget
from gateway.requests.submission import answer_stream
from gateway.text.reasoning.parser import MARKS, Thinking

CLOSING = "</think>"
R1 = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
QWEN = TEMPLATE + "{# <think> #}"
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
BUDGET = 10


def thinker(opening=""):
    """Return replies that reason for as long as they may, and answer once the reasoning has ended."""

    def reply(request):
        written = tiny_tokenizer().decode(request.produced)
        return written + "Hi!" if CLOSING in written else opening + "a" * 80

    return reply


@pytest.fixture
async def gateway_app(tmp_path, monkeypatch):
    gateway_app = await build_gateway_app(tmp_path)
    template = gateway_app.gateway.models.default.tokenizer._template
    monkeypatch.setattr(template, "chat_template", R1)
    gateway_app.set_template = lambda text: monkeypatch.setattr(template, "chat_template", text)
    yield gateway_app
    await gateway_app.assert_empty()


async def post(gateway_app, path, **body):
    async with gateway_app.client() as client:
        return await client.post(path, json={"model": BASE, **body})


async def chat(gateway_app, **options):
    options = {"thinking_token_budget": BUDGET, "max_tokens": 100} | options
    answer = await post(gateway_app, "/v1/chat/completions", messages=CHAT["messages"], **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("template", "opening"), [(R1, ""), (QWEN, "<think>")])
async def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(gateway_app, template, opening):
    gateway_app.set_template(template)
    gateway_app.engine.reply = thinker(opening)
    gateway_app.engine.proposals = (ProposalCount("prediction", 3, 2),)
    answer = await chat(gateway_app, logprobs=True)
    [choice], usage = answer["choices"], answer["usage"]
    thought = "a" * (BUDGET - len(opening))
    assert choice["message"]["reasoning_content"] == thought
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi!", "stop")
    details = {"reasoning_tokens": BUDGET + len(CLOSING)}
    details |= {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    assert usage["completion_tokens_details"] == details
    assert len(choice["logprobs"]["content"]) == BUDGET + len(CLOSING) + len("Hi!")
    assert usage["completion_tokens"] == len(choice["logprobs"]["content"]) + 1, "the EOS counts, too"
    first, second = gateway_app.engine.requests
    assert first.params.max_tokens == BUDGET and second.params.max_tokens == 100
    assert len(second.produced) == BUDGET + len(CLOSING) and first.id != second.id


@pytest.mark.parametrize("tokens_per_event", [1, 4, 100])
async def test_streams_and_several_answers_have_it_each(gateway_app, tokens_per_event):
    gateway_app.engine.reply, gateway_app.engine.tokens_per_event = thinker(), tokens_per_event
    async with gateway_app.openai() as client:
        options = {"thinking_token_budget": BUDGET}
        stream = await client.chat.completions.create(**CHAT, max_tokens=100, n=2, stream=True, extra_body=options)
        choices = [choice async for chunk in stream for choice in chunk.choices]
    for index in range(2):
        deltas = [choice.delta for choice in choices if choice.index == index]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "a" * BUDGET
        assert "".join(delta.content or "" for delta in deltas) == "Hi!"
    assert len([choice for choice in choices if choice.finish_reason]) == 2


@pytest.mark.parametrize(
    ("template", "text", "options"),
    [
        (R1, "Hm</think>Hello there, all of you", {}),
        (QWEN, "Hello there, all of you", {}),
        (R1, "a" * 30, {"max_tokens": 8}),
        (R1, "a" * 30, {"max_tokens": BUDGET}),
        (R1, "m</think>", {}),
    ],
)
async def test_other_answers_are_as_without_a_budget(gateway_app, template, text, options):
    gateway_app.set_template(template)
    gateway_app.engine.reply = lambda request: text
    limited = await chat(gateway_app, **options)
    free = await chat(gateway_app, **options, thinking_token_budget=None)
    assert (limited["choices"], limited["usage"]) == (free["choices"], free["usage"])


async def test_every_protocol_has_a_field_for_it(gateway_app, tmp_path):
    gateway_app.engine.reply = thinker()
    thinking = {"type": "enabled", "budget_tokens": BUDGET}
    message = await post(gateway_app, "/v1/messages", messages=CHAT["messages"], max_tokens=100, thinking=thinking)
    assert [block.get("thinking") or block["text"] for block in message.json()["content"]] == ["a" * BUDGET, "Hi!"]
    response = await post(gateway_app, "/v1/responses", input="hi", thinking_token_budget=BUDGET)
    assert [item["content"][0]["text"] for item in response.json()["output"]] == ["a" * BUDGET, "Hi!"]


async def test_grpc_has_a_field_for_it(tmp_path, monkeypatch):
    async with open_grpc_app(tmp_path) as opened:
        template = opened.gateway_app.gateway.models.default.tokenizer._template
        monkeypatch.setattr(template, "chat_template", R1)
        opened.gateway_app.engine.reply = thinker()
        asked = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], thinking_token_budget=BUDGET)
        sampling = {"max_tokens": 100}
        answer = await opened.generation.Generate(grpc_ask(sampling=sampling, chat=asked), metadata=as_key())
        assert (answer.choices[0].reasoning_content, answer.choices[0].text) == ("a" * BUDGET, "Hi!")
        asked.thinking_token_budget = 0
        refusal = await refused(opened.generation.Generate(grpc_ask(chat=asked), metadata=as_key()))
        assert refusal.fields == ["thinking_token_budget"]


async def test_it_has_no_effect_on_a_model_that_does_not_reason(gateway_app):
    gateway_app.set_template(TEMPLATE)
    gateway_app.engine.reply = lambda request: "Hello there, all of you"
    assert (await chat(gateway_app))["choices"][0]["message"]["content"] == "Hello there, all of you"
    assert len(gateway_app.engine.requests) == 1


class LetterTokens:
    """A tokenizer for which every token is a letter: the engine's ids have no text of their own."""

    def decode(self, token_ids, *, skip_special=True):
        return "a" * len(token_ids)


@pytest.mark.parametrize("parts_before", [4, 30])
async def test_both_parts_survive_an_engine_that_drains(tmp_path, parts_before):
    """The move comes in the first part or in the second."""
    engines, closing, tokens, moves = Engines(tmp_path), (9, 8, 7), 20, []
    try:
        pool = await engines.pool("a", "b")
        request = ask("r", length=600)
        budget = ThinkingBudget(tokens, Thinking(MARKS["think"], begun=True), closing, LetterTokens())
        trial = CrashTrial(pool, False)
        stream = answer_stream(
            pool, request, trial, Waits(30.0, 30.0), moves.append, lambda placed: None, budget=budget
        )
        told = []

        async def read():
            async with aclosing(stream):
                async for events in stream:
                    told.extend(events)

        task = asyncio.create_task(read())
        await until(lambda: sum(len(event.tokens) for event in told) > parts_before)
        await pool.drain(next(name for name in ("a", "b") if engines.running[name].engine.state.has_work), True)
        await asyncio.wait_for(task, 60)
    finally:
        await engines.close()
    known = list(request.prompt_ids)
    while len(known) < len(request.prompt_ids) + request.params.max_tokens:
        forced = len(known) == len(request.prompt_ids) + tokens
        known += closing if forced else [fake_token(None, 7, known, FakeExecutor().vocab_size)]
    assert [token for event in told for token in event.tokens] == known[len(request.prompt_ids) :]
    assert [event.finish_reason for event in told if event.finish_reason] == [FinishReason.LENGTH]
    assert len(moves) == 1
    assert [event.device_seconds for event in told] == sorted(event.device_seconds for event in told)
    assert request.params == SamplingParams(max_tokens=600, ignore_eos=True, seed=7)
