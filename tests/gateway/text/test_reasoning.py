"""Reasoning apart from text: how answers are split, which prompts begin within reasoning, grammars that begin after it,
and what clients send and get."""

import json

import pytest
from fakes import BASE, TEMPLATE, build_gateway_app, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.core.messages.grammar import Grammar, GrammarKind
from gateway.text.chat_template import EFFORTS
from gateway.text.marks import MOST_WHITE
from gateway.text.reasoning.grammar import after_reasoning
from gateway.text.reasoning.parser import MARKS, ReasoningParser, Thinking, choose_marks
from gateway.text.tools.dialects import Hermes
from gateway.text.tools.grammar import tool_grammar
from gateway.text.tools.rule import ToolRule
from tests.grammar_walk import follows

THINK = MARKS["think"]
QWEN = TEMPLATE + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
"""A template by which the model decides to think, unless it is told not to, as Qwen 3's."""
R1 = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
"""A template by which every answer begins with reasoning, as DeepSeek R1's."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
PLAIN = tiny_tokenizer()._backend


def with_marks():
    backend = Backend.from_str(PLAIN.to_str())
    backend.add_tokens([AddedToken(mark, special=False) for mark in (THINK.opening, THINK.closing)])
    return backend


BACKENDS = {"plain": PLAIN, "marks": with_marks()}


def split(answer, size=1, *, begun=False, marks=THINK):
    """The reasoning and the text of an answer that comes in pieces of a size, and the number of reasoning tokens."""
    parser = ReasoningParser(marks, begun=begun)
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    shown = [parser.push(piece, len(piece)) for piece in pieces] + [parser.flush()]
    return "".join(one.reasoning for one in shown), "".join(one.text for one in shown), parser.num_tokens


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "begun", "reasoning", "text"),
    [
        ("<think>\nIs a < b? \n\nYes.\n</think>\n\nIt is.", False, "Is a < b? \n\nYes.", "It is."),
        (" \n<think>one</think>two</think>", False, "one", "two</think>"),
        ("<think></think>Hi", False, "", "Hi"),
        ("Hi <think>no</think>", False, "", "Hi <think>no</think>"),
        ("<thin air", False, "", "<thin air"),
        ("<thi", False, "", "<thi"),
        (" \n", False, "", " \n"),
        ("Hm.\n</think>\n\nYes ", True, "Hm.", "Yes "),
        ("never ends </thin", True, "never ends </thin", ""),
        ("<think>cut off ", False, "cut off", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_told_from_text_however_it_comes(answer, begun, reasoning, text, size):
    assert split(answer, size, begun=begun)[:2] == (reasoning, text)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", " ", "\n", "a", "</"]), max_size=12), st.booleans())
def test_the_split_does_not_depend_on_the_pieces(parts, begun):
    answer = "".join(parts)
    whole = split(answer, max(1, len(answer)), begun=begun)
    for size in (1, 2, 5):
        assert split(answer, size, begun=begun)[:2] == whole[:2]


def test_every_token_up_to_the_closing_mark_is_reasoning():
    assert split("<think>abc</think>de")[2] == len("<think>abc</think>")
    assert split("abc</think>de", begun=True)[2] == len("abc</think>")
    assert split("<thin air")[2] == 0
    assert split("<thi")[2] == 0
    assert split("abc", begun=True)[2] == 3


@pytest.mark.parametrize("begun", [False, True])
def test_endless_white_space_is_not_held_back(begun):
    parser, shown = ReasoningParser(THINK, begun=begun), ""
    for _ in range(100):
        one = parser.push("x" if begun and not shown else " " * 64, 1)
        shown += one.reasoning if begun else one.text
        assert len(parser._held) <= MOST_WHITE + 64
    assert len(shown) > 90 * 64 and not shown.strip(" x")
    assert parser.ended is not begun


def test_a_models_template_says_which_marks_it_uses():
    assert choose_marks("auto", TEMPLATE) is None
    assert choose_marks("auto", QWEN) is choose_marks("auto", R1) is THINK
    assert choose_marks("auto", "... [THINK] ...") is choose_marks("mistral", "") is MARKS["mistral"]
    assert choose_marks("none", R1) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("begun", [False, True])
def test_a_grammar_begins_after_the_reasoning(backend, begun):
    backend, thinking = BACKENDS[backend], Thinking(THINK, begun)
    opening = "" if begun else THINK.opening
    schema = after_reasoning(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), thinking, backend.token_to_id)
    regex = after_reasoning(Grammar(GrammarKind.REGEX, "a/b|c\nd"), thinking, backend.token_to_id)
    frame, tool = Hermes().frame, {"function": {"name": "go", "parameters": SCHEMA}}
    calls = tool_grammar(frame, [tool], ToolRule(required=True), backend.token_to_id, thinking=thinking)
    call = '<tool_call>\n{"name": "go", "arguments": {"a": 1}}\n</tool_call>'
    for grammar, right, wrong in ((schema, '{"a": 1}', '{"a": 3}'), (regex, "a/b", "ab"), (calls, call, "no")):
        assert follows(grammar, backend, f"{opening}Is it <1>? {wrong}\n{THINK.closing}\n\n{right}")
        assert follows(grammar, backend, f"{opening}{THINK.closing}{right}")
        assert not follows(grammar, backend, f"{opening}Hm.{THINK.closing}{wrong}")
        assert not follows(grammar, backend, f"Hm.{right}")
        assert follows(grammar, backend, right) is not begun


@pytest.mark.parametrize(
    ("regex", "right", "wrong"),
    [
        (r"https?:\/\/[a-z\/]+", "https://a/b", "https:"),
        (r'a\/ | "b" # the rest', "a/ ", "b"),
        ("a\\\n", "a\n", "a\\n"),
        ("a\\", "a", "a/"),
        (r"(?x) a / b", "a/b", "a / b"),
    ],
)
def test_a_regex_after_reasoning_cannot_end_early(regex, right, wrong):
    grammar = after_reasoning(Grammar(GrammarKind.REGEX, regex), Thinking(THINK, True), PLAIN.token_to_id)
    assert follows(grammar, PLAIN, f"Hm.{THINK.closing}{right}")
    assert not follows(grammar, PLAIN, f"Hm.{THINK.closing}{wrong}")


@pytest.fixture
async def reasoner(tmp_path, monkeypatch):
    """A function that opens a gateway whose model has a chat template."""
    opened = []

    async def open_with(template):
        gateway_app = await build_gateway_app(tmp_path)
        monkeypatch.setattr(gateway_app.gateway.models.default.tokenizer._template, "chat_template", template)
        opened.append(gateway_app)
        return gateway_app

    yield open_with
    for gateway_app in opened:
        await gateway_app.assert_empty()


async def post(gateway_app, body):
    async with gateway_app.client() as client:
        return await client.post("/v1/chat/completions", json=body)


CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


@pytest.mark.parametrize("tokens_per_event", [1, 5, 100])
@pytest.mark.parametrize("stop", [None, ["!", "Hm", "think"]])
@pytest.mark.parametrize(
    ("template", "answer"), [(QWEN, "<think>\nHm.\n</think>\n\nHi!"), (R1, "Hm.\n</think>\n\nHi!")]
)
async def test_answers_have_reasoning_apart_from_text(reasoner, template, answer, stop, tokens_per_event):
    gateway_app = await reasoner(template)
    gateway_app.engine.reply, gateway_app.engine.tokens_per_event = lambda request: answer, tokens_per_event
    text, reasoning_tokens = "Hi" if stop else "Hi!", len(answer.partition("</think>")[0]) + len("</think>")
    async with gateway_app.openai() as client:
        whole = await client.chat.completions.create(**CHAT, stop=stop)
        message = whole.choices[0].message
        assert (message.content, message.reasoning_content, message.reasoning) == (text, "Hm.", "Hm.")
        assert whole.usage.completion_tokens_details.reasoning_tokens == reasoning_tokens
        stream = await client.chat.completions.create(
            **CHAT, stop=stop, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage == whole.usage
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == text
    kinds = ["reasoning" if getattr(delta, "reasoning_content", None) else "text" for delta in deltas[1:]]
    assert kinds == sorted(kinds)


async def test_without_marks_in_its_template_a_models_answers_are_text(reasoner):
    gateway_app = await reasoner(TEMPLATE)
    gateway_app.engine.reply = lambda request: "<think>a</think>b"
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(**CHAT)
        completion = await client.completions.create(model=BASE, prompt="<think>", max_tokens=50)
    assert answer.choices[0].message.content == completion.choices[0].text == "<think>a</think>b"
    assert answer.usage.completion_tokens_details is None


@pytest.mark.parametrize("effort", EFFORTS)
async def test_the_effort_switches_reasoning_off_and_on(reasoner, effort):
    gateway_app = await reasoner(QWEN)
    async with gateway_app.openai() as client:
        await client.chat.completions.create(**CHAT, reasoning_effort=effort)
        own = {"chat_template_kwargs": {"enable_thinking": True}}
        await client.chat.completions.create(**CHAT, reasoning_effort=effort, extra_body=own)
    asked, overruled = (gateway_app.engine.tokenizer.decode(sent.prompt_ids) for sent in gateway_app.engine.requests)
    assert asked.endswith("</think>\n\n") == (effort == "none")
    assert not overruled.endswith("</think>\n\n")


async def test_an_unknown_effort_is_refused(reasoner):
    gateway_app = await reasoner(QWEN)
    answer = await post(gateway_app, {**CHAT, "reasoning_effort": "enormous"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_of_earlier_answers_reaches_the_template(reasoner, name):
    gateway_app = await reasoner(
        R1.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")
    )
    messages = [*CHAT["messages"], {"role": "assistant", "content": "b", name: "a"}, *CHAT["messages"]]
    await post(gateway_app, {**CHAT, "messages": messages})
    [sent] = gateway_app.engine.requests
    assert "<|assistant|>ab<|end|>" in gateway_app.engine.tokenizer.decode(sent.prompt_ids, skip_special=False)


async def test_a_message_that_is_continued_may_end_within_reasoning(reasoner):
    gateway_app = await reasoner(TEMPLATE + "{# <think> #}")
    gateway_app.engine.reply = lambda request: " b</think>c"
    for begin, reasoning, text in (("<think>a", "b", "c"), ("<think>a</think>", None, " b</think>c")):
        messages = [*CHAT["messages"], {"role": "assistant", "content": begin}]
        body = {**CHAT, "messages": messages, "continue_final_message": True}
        message = (await post(gateway_app, body)).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, text)


@pytest.mark.parametrize("tokens_per_event", [1, 5, 100])
async def test_reasoning_is_an_item_of_a_response(reasoner, tokens_per_event):
    shown = "{{ message.reasoning_content }}.{{ message.content }}"
    gateway_app = await reasoner(QWEN.replace("{{ message.content }}", shown))
    gateway_app.engine.reply, gateway_app.engine.tokens_per_event = (
        lambda request: "<think>a</think>b",
        tokens_per_event,
    )
    body = {"model": BASE, "input": "hi", "max_output_tokens": 50, "reasoning": {"effort": "low"}}
    body["include"] = ["message.output_text.logprobs"]
    async with gateway_app.openai() as client:
        whole = await client.responses.create(**body)
        events = [event async for event in await client.responses.create(**body, stream=True)]
        items = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in whole.output)]
        again = await client.responses.create(**body | {"input": items})
    for response in (whole, events[-1].response):
        reasoning, message = response.output
        assert (reasoning.type, [part.text for part in reasoning.content], reasoning.summary) == (
            "reasoning",
            ["a"],
            [],
        )
        assert (message.type, response.output_text) == ("message", "b")
        assert [entry.token for entry in message.content[0].logprobs] == ["b"]
        assert response.usage.output_tokens_details.reasoning_tokens == len("<think>a</think>")
        assert response.reasoning.effort == "low"
    deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == "a"
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert "<|assistant|>a.b<|end|>" in gateway_app.engine.tokenizer.decode(
        gateway_app.engine.requests[-1].prompt_ids, skip_special=False
    )
    assert again.output_text == "b"


async def test_a_callers_own_grammar_leaves_no_room_for_reasoning(reasoner):
    gateway_app = await reasoner(R1)
    gateway_app.engine.reply = lambda request: "yes"
    body = {**CHAT, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = await post(gateway_app, body)
    assert answer.json()["choices"][0]["message"]["content"] == "yes"
    formatted = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    gateway_app.engine.reply = lambda request: 'Hm.</think>{"a": 1}'
    answer = await post(gateway_app, {**CHAT, **formatted})
    assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    assert follows(gateway_app.engine.requests[-1].params.grammar, PLAIN, 'Hm.</think>{"a": 1}')
