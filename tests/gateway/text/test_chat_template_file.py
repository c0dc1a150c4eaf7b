"""A chat template from a file, and the demo's, which adds tools to the template of its model."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.demo import CHAT_TEMPLATE
from gateway.core.errors import ApiError
from gateway.serve.launch import StartError
from gateway.serve.models import load_tokenizer
from gateway.text.tokenizer import Tokenizer
from gateway.text.tools.dialects import Hermes, choose_dialect
from gateway.text.tools.parser import ToolParser
from tests.examples import examples

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather, é.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "wait", "description": "", "parameters": {"type": "object"}}},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
WAIT = {"id": "call_2", "type": "function", "function": {"name": "wait", "arguments": {}}}
QUESTION = {"role": "user", "content": "Weather in Zürich?"}


@pytest.fixture(scope="module")
def own(smollm2):
    """The tokenizer with the template that comes with the model."""
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def demo(smollm2):
    return Tokenizer.load(smollm2, CHAT_TEMPLATE)


messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(("system", "user", "assistant")),
    st.text()
    | st.sampled_from(("", " two words ", "a\n\n", "{{ x }}", "{% if %}", "<tools>", "<|im_end|>", "<tool_call>")),
)


def test_a_chat_without_tools_reads_as_the_models_own_template_writes_it(own, demo):
    @settings(max_examples=examples(150), deadline=None)
    @given(st.lists(messages, min_size=1, max_size=6))
    def check(chat):
        assert demo.render_chat(chat) == own.render_chat(chat)

    check()


def test_tools_are_described_in_the_system_prompt(demo):
    text = demo.render_chat([QUESTION], TOOLS)
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
    )
    described = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in described] == [tool["function"] for tool in TOOLS]
    assert rest == "<|im_start|>user\nWeather in Zürich?<|im_end|>\n<|im_start|>assistant\n"
    own_words = demo.render_chat([{"role": "system", "content": "Be brief."}, QUESTION], TOOLS)
    assert own_words.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert own_words.count("<|im_start|>system") == own_words.count("<tools>\n") == 1


def test_calls_and_results_are_written_in_the_hermes_form(demo):
    chat = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [CALL, WAIT]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": "done"},
        {"role": "assistant", "content": "Sunny."},
    ]
    assert demo.render_chat(chat, TOOLS).partition("Zürich?<|im_end|>\n")[2] == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSunny.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_the_template_writes_is_what_the_parser_reads(demo, size):
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, WAIT]}
    text = demo.render_chat([QUESTION, said], TOOLS).rpartition("Let me see.")[2].partition("<|im_end|>")[0]
    dialect = choose_dialect("auto", demo.tool_template)
    assert isinstance(dialect, Hermes)
    parser, calls = ToolParser(dialect, {"get_weather": {}, "wait": {}}), {}
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])] + parser.flush()
    for part in parts:
        name, arguments = calls.get(part.index, ("", ""))
        calls[part.index] = (name + part.name, arguments + part.arguments)
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == [
        ("get_weather", {"city": "Zürich"}),
        ("wait", {}),
    ]


def test_arguments_that_were_cut_off_stay_in_the_conversation(demo):
    cut = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zü'}}
    text = demo.render_chat([QUESTION, {"role": "assistant", "content": "", "tool_calls": [cut]}], TOOLS)
    assert '{"name": "get_weather", "arguments": {"city": "Zü}\n</tool_call><|im_end|>' in text


def test_the_models_own_template_refuses_tools_by_name(own):
    with pytest.raises(ApiError, match="knows no tools"):
        own.render_chat([QUESTION], TOOLS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b"{% if %}", "line 1"), (b"a\n{{ b }\n", "line 2"), (b"\xff", "no UTF-8")],
)
async def test_a_template_that_cannot_be_used_stops_the_start(smollm2, tmp_path, content, problem):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartError, match=problem) as caught:
        await load_tokenizer(smollm2, path)
    assert str(caught.value).startswith("model.chat_template: ")
    assert str(path) in str(caught.value)


async def test_a_template_that_refuses_some_messages_is_valid(smollm2, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}ok")
    tokenizer = Tokenizer.load(smollm2, path)
    assert tokenizer.render_chat([{"role": "system", "content": ""}]) == "ok"
    with pytest.raises(ApiError, match="no system prompt"):
        tokenizer.render_chat([QUESTION])
