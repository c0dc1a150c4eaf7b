"""Chats are rendered as transformers renders them, with templates that are compiled once, and in short calls."""

import json
import random
from functools import partial

import jinja2
import pytest
from fakes import byte_tokenizer, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import ApiError
from gateway.text import template_json
from gateway.text.chat_template import REFUSALS, TemplateOptions, with_thinking
from gateway.text.compiled_template import ChatTemplate
from gateway.text.template_json import PIECE, to_json
from tests.gateway.text.test_special_marks import CALLS, TEMPLATES, TOOLS, USER

ALL = (
    "{{ [eos_token, tools, documents, add_generation_prompt, enable_thinking]|tojson(indent=2) }}"
    "{% for message in messages %}{{ message.role }} {{ message.name is defined }} {{ message.reasoning_content }}"
    " {{ message.thinking }} {% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
)
TRIMMED = "{% for message in messages %}<|{{ message.role }}|>{{ message.content|trim }}<|end|>{% endfor %}"
CHATS = (
    [USER],
    [{"role": "system", "content": "Be brief.", "name": None}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "Hm."}],
    [USER, {"role": "assistant", "content": " Once upon \n"}],
    [USER, {"role": "assistant", "content": ""}],
)


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("source", [ALL, TRIMMED, *TEMPLATES.values()])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_chat_reads_as_transformers_writes_it(source, chat, resumes):
    tokenizer = byte_tokenizer(source)._template
    options = TemplateOptions(not resumes, resumes, {"enable_thinking": True})
    named = {"add_generation_prompt": not resumes, "continue_final_message": resumes, **options.variables}
    thought = [with_thinking(message, with_calls=True) for message in chat]
    for tools in (TOOLS, []):
        theirs = _outcome(partial(tokenizer.apply_chat_template, chat, tools or None, tokenize=False, **named))
        ours = _outcome(partial(ChatTemplate(source).render, tokenizer.special_tokens_map, thought, tools, options))
        assert ours == theirs
        assert isinstance(ours, str) or len(chat) > 1


def _outcome(write):
    try:
        return write()
    except REFUSALS as error:
        return type(error)


@pytest.mark.parametrize("source", ["{{ messages|length }}content", "{{ messages[-1].content|upper }}"])
def test_a_message_that_the_template_changes_is_not_continued(source):
    chat = [USER, {"role": "assistant", "content": "Once"}]
    with pytest.raises(ApiError, match="cannot be continued"):
        byte_tokenizer(source).render_chat(chat, options=TemplateOptions(False, True))


def test_a_chat_is_refused_where_there_is_no_template():
    tokenizer = byte_tokenizer(None)
    with pytest.raises(ApiError, match="no chat template"):
        tokenizer.render_chat([USER])


async def test_a_template_is_compiled_once_however_many_others_are_in_use(monkeypatch):
    compiled, compile_source = [], jinja2.Environment.compile

    def noted(self, source, *args, **options):
        compiled.append(source)
        return compile_source(self, source, *args, **options)

    base = tiny_tokenizer()
    monkeypatch.setattr(jinja2.Environment, "compile", noted)
    tokenizers = [base.with_template(f"{number}: {{{{ messages[0].content }}}}") for number in range(150)]
    for _ in range(2):
        for tokenizer in tokenizers:
            assert await tokenizer.encode_chat("acme", [USER])
    assert len(compiled) == len(set(compiled)) == 150


texts = st.text(max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(
    values,
    st.booleans(),
    st.sampled_from((None, 0, 2, "\t")),
    st.sampled_from((None, (",", ":"), (" , ", " = "))),
    st.booleans(),
)
def test_a_document_in_pieces_reads_as_one_that_is_written_at_once(value, ensure_ascii, indent, separators, sort_keys):
    wanted = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_json, "LARGE", random.Random(wanted).randrange(1, 5))
        patch.setattr(template_json, "PIECE", 3)
        assert to_json(value, ensure_ascii, indent, separators, sort_keys) == wanted


def test_keys_that_are_no_texts_are_written_as_json_does(monkeypatch):
    monkeypatch.setattr(template_json, "LARGE", 2)
    document = {1: [1, 2, 3], None: {}, False: 2, 2.5: "b"}
    assert to_json(document) == json.dumps(document)
    with pytest.raises(TypeError):
        to_json({(1, 2): [1, 2, 3]})


@pytest.mark.parametrize(
    "parameters",
    [
        {"description": "word " * 300_000},
        {"word " * 300_000: {}},
        {"enum": ["word"] * 60_000},
        {"properties": {f"field_{number}": {"type": "string"} for number in range(10_000)}},
    ],
    ids=["a text", "a name", "a list", "an object"],
)
def test_a_large_tool_is_written_in_many_short_calls(monkeypatch, parameters):
    calls, write = [], json.dumps

    def noted(*args, **options):
        calls.append(len(text := write(*args, **options)))
        return text

    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    monkeypatch.setattr(json, "dumps", noted)
    text = tiny_tokenizer().render_chat([USER], [tool])
    assert write([tool], ensure_ascii=False) in text
    assert max(calls) <= PIECE + 1000
