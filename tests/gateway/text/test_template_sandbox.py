"""Chat templates are rendered as transformers renders them, and cannot reach what is not theirs."""

import pytest
from fakes import TEMPLATE, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from engine.demo import CHAT_TEMPLATE
from gateway.text.template_sandbox import run_template

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}, "note": "<é>"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
PARTS = (
    "{%- for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{{ part.text }}|{% endfor %}{% endif %}{%- endfor %}"
)
RICH = """{%- set ns = namespace(count=0, seen={}) -%}
{{ bos_token }}{{ eos_token }}{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 0) | tojson(indent=1) }}
  {% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}{% set inner = m.content %}[{{ m.role }}: {{ m.content }}]{% endgeneration %}{{ inner is defined }}
    {{ m.reasoning_content }} {{ m.thinking }} {{ m.tool_calls | tojson(sort_keys=true) }} {{ m.name is defined }}
  {% endfor %}
{{ ns.count }} {{ tools | tojson(separators=(',', ':')) if tools }} {{ documents is none }} {{ range(3) | list }}
{%- if add_generation_prompt %} go{% endif %}"""
TEMPLATES = {"tiny": TEMPLATE, "demo": CHAT_TEMPLATE.read_text(), "parts": PARTS, "rich": RICH}

texts = st.text(max_size=8) | st.sampled_from(("", " two words ", "a\n\n", "{{ x }}", "<tools>", "<|im_end|>", "é"))
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "user", "assistant", "tool")), "content": texts},
    optional={
        "reasoning_content": texts | st.none(),
        "thinking": texts,
        "reasoning": texts,
        "name": st.none(),
        "tool_calls": st.just([CALL]),
    },
)


def both(template, chat, tools=(), **options):
    """Return what is rendered, or "refused", here and by transformers."""
    theirs = byte_tokenizer(template)._template
    asked = [
        lambda: run_template(template, chat, tools, theirs.special_tokens_map, **options),
        lambda: theirs.apply_chat_template(chat, list(tools) or None, tokenize=False, **options),
    ]
    return [_rendered(ask) for ask in asked]


def _rendered(ask):
    try:
        return ask()
    except (TemplateError, TypeError, ValueError):
        return "refused"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chats_are_rendered_as_transformers_renders_them(template):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(messages, max_size=4), st.booleans(), st.sampled_from(((), (WEATHER,))))
    def check(chat, prompt, tools):
        ours, theirs = both(template, chat, tools, add_generation_prompt=prompt)
        assert ours == theirs

    check()


CONTINUED = [
    "Once upon",
    "Once upon ",
    " \n",
    [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon "}],
    [{"type": "image"}],
    None,
]


@pytest.mark.parametrize("content", CONTINUED)
@pytest.mark.parametrize("template", [*TEMPLATES.values(), "{{ messages | length }}"])
def test_the_last_message_is_continued_as_by_transformers(template, content):
    chat = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": content}]
    ours, theirs = both(template, chat, continue_final_message=True)
    assert ours == theirs
    assert chat[-1]["content"] == content, "the caller's own is left alone"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__.os }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_reaches_nothing_else(attack):
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises((TemplateError, OverflowError)):
        run_template(attack, chat)
    assert chat == [{"role": "user", "content": "hi"}]


def test_values_that_are_not_of_json_are_kept_from_templates():
    with pytest.raises(TypeError, match="cannot read a object"):
        run_template("{{ thing }}", [{"role": "user", "content": "hi"}], variables={"thing": object()})
