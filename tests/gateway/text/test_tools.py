"""Calls of tools in what models write, and as OpenAI's clients see them."""

import json

import pytest
from fakes import BASE, GatewayApp, build_gateway_app, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.chat_template import render
from gateway.text.tools.dialects import Hermes, Llama3, choose_dialect
from gateway.text.tools.parser import ToolParser

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WAIT = {"type": "function", "function": {"name": "wait", "description": "Does nothing."}}
USER = {"role": "user", "content": "hi"}
CHAT = {"model": BASE, "messages": [USER], "tools": [LOOK, WAIT], "max_tokens": 200}
TWO_CALLS = (
    "Let me see.\n<tool_call>\n"
    '{"name": "look", "arguments": {"place": "the \\"sea\\" } €", "deep": [1, {"two": null}]}}\n</tool_call>\n'
    '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
)
ARGUMENTS = {"place": 'the "sea" } €', "deep": [1, {"two": None}]}


def read(dialect, pieces, names=("look", "wait")):
    """An answer's text, and each call's name and arguments."""
    parser = ToolParser(dialect, {name: {} for name in names})
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [["", ""] for _ in range(parser.num_calls)]
    for call in parts:
        if not isinstance(call, str):
            calls[call.index][0] += call.name
            calls[call.index][1] += call.arguments
    return text, [tuple(call) for call in calls]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("dialect", "answer", "text", "calls"),
    [
        (Hermes(), "Hello <b>you</b>\n", "Hello <b>you</b>\n", []),
        (Hermes(), '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (Hermes(), '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        (Hermes(), '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        (Hermes(), '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
        (Hermes(), '<tool_call>{"name": "f", "arguments": 1 }</tool_call> ok', "ok", [("f", "1")]),
        (Hermes(), '<tool_call>{"name": "f", "arguments": {}, oops', "oops", [("f", "{}")]),
        (Hermes(), '<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
        (Hermes(), '<tool_call>{"name": "f", "arguments": {}}</tool_call> 1 <', "1 <", [("f", "{}")]),
        (Hermes(), "a <tool_call>f()</tool_call> b", "a <tool_call>f()</tool_call> b", []),
        (Hermes(), '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        (Hermes(), '<tool_call>{"name"', '<tool_call>{"name"', []),
        (Hermes(), "a <tool_c", "a <tool_c", []),
        (Llama3(), ' {"name": "look", "parameters": {"a": 1}}\n', "", [("look", '{"a": 1}')]),
        (
            Llama3(),
            '{"type": "function", "name": "look", "parameters": {}}; {"name": "wait", "parameters": {"s": 2}}',
            "",
            [("look", "{}"), ("wait", '{"s": 2}')],
        ),
        (Llama3(), '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        (Llama3(), '{"age": 36}', '{"age": 36}', []),
        (Llama3(), 'I say {"name": "look", "parameters": {}}', 'I say {"name": "look", "parameters": {}}', []),
        (Llama3(), '{"name": "look", "parameters": {}} Done.', "Done.", [("look", "{}")]),
    ],
)
def test_calls_are_told_from_text_however_it_comes(dialect, answer, text, calls, size):
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    assert read(dialect, pieces) == (text, calls)


@given(
    st.lists(st.sampled_from(['"', "\\", "{", "}", "[", ",", " ", "a", '"name"', ":", "<tool_call>", "</tool_call>"]))
)
def test_what_is_said_does_not_depend_on_the_pieces(tokens):
    answer = '<tool_call>{"name": "look", "arguments": {"a": 1' + "".join(tokens)
    for dialect in (Hermes(), Llama3()):
        for tail in (answer, answer.removeprefix("<tool_call>"), "".join(tokens)):
            assert read(dialect, list(tail)) == read(dialect, [tail])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.integers(1, 9), st.booleans())
def test_arguments_arrive_as_they_were_meant(arguments, size, ascii_only):
    call = json.dumps({"name": "look", "arguments": arguments}, ensure_ascii=ascii_only)
    answer = f"<tool_call>{call}</tool_call>"
    text, [(name, written)] = read(Hermes(), [answer[at : at + size] for at in range(0, len(answer), size)])
    assert (text, name, json.loads(written)) == ("", "look", arguments)


def test_a_models_template_says_how_it_calls():
    hermes, llama3 = "{{ tools }} <tool_call>", '{{ tools }} "parameters" ipython'
    assert isinstance(choose_dialect("auto", hermes), Hermes)
    assert isinstance(choose_dialect("auto", llama3), Llama3)
    assert isinstance(choose_dialect("llama3", hermes), Llama3)
    for name, template in [("auto", "{{ tools }}"), ("hermes", ""), ("none", hermes)]:
        assert choose_dialect(name, template) is None


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def test_the_model_is_shown_the_tools_and_earlier_calls(gateway_app):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "sea"}'}}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    gateway_app.engine.info.max_model_len = 4096
    async with gateway_app.openai() as client:
        await client.chat.completions.create(**CHAT | {"messages": messages, "tools": [LOOK]})
    prompt = tiny_tokenizer().decode(gateway_app.engine.requests[0].prompt_ids, skip_special=False)
    assert json.loads(prompt.partition(": ")[2].partition("<|end|>")[0]) == [LOOK]
    assert '{"name": "look", "arguments": {"place": "sea"}}<|end|><|tool|>blue' in prompt.replace("&#34;", '"')


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_tools_reach_the_template_as_the_caller_wrote_them(gateway_app, path):
    tool = {
        "function": {"strict": False, "parameters": {"type": "object", "x-note": 1}, "name": "look", "returns": {}},
        "type": "function",
        "defer_loading": True,
    }
    gateway_app.engine.info.max_model_len = 4096
    async with gateway_app.client() as client:
        response = await client.post(path, json=CHAT | {"tools": [tool, WAIT]})
    ids = response.json()["tokens"] if path == "/tokenize" else gateway_app.engine.requests[0].prompt_ids
    prompt = tiny_tokenizer().decode(ids, skip_special=False).replace("&#34;", '"')
    shown = prompt.partition(": ")[2].partition("<|end|>")[0]
    assert shown == json.dumps([tool, WAIT])


def test_a_template_that_needs_a_description_and_parameters_gets_them():
    def apply(messages, tools, options):
        return "".join(tool["function"]["description"] + tool["function"]["parameters"]["type"] for tool in tools)

    tools = [{"type": "function", "function": {"name": "wait"}}]
    assert render(apply, [USER], tools) == "object"


async def test_whole_answers_hold_calls(gateway_app):
    gateway_app.engine.info.max_model_len = 4096
    gateway_app.engine.reply = lambda sent: TWO_CALLS
    async with gateway_app.openai() as client:
        [choice] = (await client.chat.completions.create(**CHAT)).choices
        [one] = (await client.chat.completions.create(**CHAT, parallel_tool_calls=False)).choices
        [text] = (await client.chat.completions.create(**CHAT, tool_choice="none")).choices
    first, second = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert (first.function.name, json.loads(first.function.arguments), first.type) == ("look", ARGUMENTS, "function")
    assert (second.function.name, second.function.arguments) == ("wait", "{}")
    assert len({call.id for call in (first, second)}) == 2
    assert [call.function.name for call in one.message.tool_calls] == ["look"]
    assert (text.message.content, text.message.tool_calls, text.finish_reason) == (TWO_CALLS, None, "stop")


@pytest.mark.parametrize("tokens_per_event", [1, 7, 500])
async def test_streams_hold_calls_piece_by_piece(gateway_app, tokens_per_event):
    gateway_app.engine.info.max_model_len = 4096
    gateway_app.engine.tokens_per_event = tokens_per_event
    gateway_app.engine.reply = lambda sent: TWO_CALLS
    async with gateway_app.openai() as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, n=2, stream=True)]
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
        pieces = [piece for choice in choices for piece in choice.delta.tool_calls or []]
        look = [piece for piece in pieces if piece.index == 0]
        assert (look[0].function.name, look[0].type) == ("look", "function")
        assert [piece.id for piece in look[1:]] == [None] * (len(look) - 1)
        assert json.loads("".join(piece.function.arguments for piece in look)) == ARGUMENTS
        assert len(look) > 10 or tokens_per_event > 1
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_an_answer_cut_off_in_a_call_says_so(gateway_app):
    gateway_app.engine.info.max_model_len = 4096
    gateway_app.engine.reply = lambda sent: TWO_CALLS
    async with gateway_app.openai() as client:
        [choice] = (await client.chat.completions.create(**CHAT | {"max_tokens": 75})).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith(call.function.arguments)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_tools_are_refused_where_the_template_knows_none(gateway_app, path, monkeypatch):
    template = tiny_tokenizer()._template
    monkeypatch.setattr(template, "chat_template", "{{ messages[0].content }}")
    gateway_app.open_again()
    async with gateway_app.client() as client:
        response = await client.post(path, json=CHAT)
        told = await client.post(
            path, json={"model": BASE, "messages": [{"role": "tool", "tool_call_id": "x", "content": "x"}]}
        )
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "tools")
    assert told.json()["error"]["param"] == "messages"
    assert gateway_app.engine.requests == []


@pytest.mark.parametrize("dialect", [Hermes(), Llama3()])
def test_endless_white_space_is_not_held_back(dialect):
    parser = ToolParser(dialect, {"go": {}})
    shown = [part for _ in range(100) for part in parser.push(" " * 64)]
    assert len("".join(shown)) > 90 * 64
    assert "".join(shown + parser.flush()) == " " * 6400
