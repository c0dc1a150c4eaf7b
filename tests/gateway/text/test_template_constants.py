"""Chat templates whose constants would take too long to compile."""

import pytest
from fakes import tiny_tokenizer

from gateway.core.errors import ApiError
from gateway.serve.launch import StartError
from gateway.serve.models import load_tokenizer
from gateway.text import tokenizer as tokenizer_module
from gateway.text.compiled_template import ChatTemplate

COSTLY = {
    "{{ 9 ** 9 ** 9 }}": "operator Pow",
    "{% if x %}{{ x + [9 ** 9 ** 9, x] }}{% endif %}": "operator Pow",
    "{{ 'a' * 100000000 }}": "operator Mul",
    "{{ [x] + ['a'] * (10000 * 10000) }}": "operator Mul",
    "{{ 'a' * ('999999999'|int) }}": "operator Mul",
    "{{ '%999999999d' % 1 }}": "operator Mod",
    "{{ '%999999999d'|format(1) }}": "filter format",
    "{{ '%*d' % (999999999, 1) }}": "operator Mod",
    "{{ ('%9999' ~ '99999d') % 1 }}": "operator Mod",
    "{{ '%s%s' % ('a' * 1000000, 'a') }}": "operator Mod",
    "{{ '%(a)s' * 1000 % {'a': 'a' * 10000} }}": "operator Mod",
    "{{ 2 ** (2 ** 9) }}": "operator Pow",
    "{{ (10 ** 11 * 10 ** 11) ** 2 }}": "operator Pow",
    "{{ 'a' * ((1 / 0.0000000001)|int) }}": "operator Mul",
    "{{ 'a' * ((0.1 ** -10)|int) }}": "operator Pow",
    "{{ 'a'|center(999999999) }}": "filter center",
    "{{ 'a'|center(width=999999999) }}": "filter center",
    "{{ 1|round(999999999, 'ceil') }}": "filter round",
    "{{ '" + "a" * 9000 + "'|join('" + "b" * 9000 + "') }}": "filter join",
    "{{ '\"'" + "|tojson" * 40 + " }}": "filter tojson",
    "{{ 'a' * 2500000 }}{% if x %}{{ 'a' * 2500000 ~ x }}{% endif %}": "operator Mul",
    "{{ [1] * 50000" + " + [1]" * 50 + " }}": "operator Add",
    "{{ 'a' * ('9e9'|int) }}": "operator Mul",
    "{{ 'a' * ('zzzzzz'|int(0, 36)) }}": "operator Mul",
    "{{ 'a' * (8 // 0.0000001)|int }}": "operator Mul",
    "{{ " + "[" * 16 + "'\\\\'" + "] ~ ''" * 16 + " }}": "operator Concat",
    "{{ " + "[" * 20 + "1" + "]" * 20 + "|tojson(indent=100000) }}": "filter tojson",
}
USUAL = (
    "{{ '-' * 80 ~ '\\n' * 2 }}{{ 1024 * 1024 }}{{ ' a '|trim|upper }}{{ ['a', 'b']|join(', ') }}"
    "{{ {'a': 1}|tojson(4) }}"
    "{{ 2 ** 10 }}{{ 10 ** 11 }}{{ 1024 * 1024 * 1024 * 4 }}{{ 10 % 3 }}{{ -7 % 4 * 2 ** 3 }}"
    "{{ '-' * (8 // 2) }}{{ (3 / 2)|round }}{{ '-' * ('12'|int) }}{{ ('4.5'|float) * 3 }}{{ 1 / 3 }}"
    "{{ 'a' * 3 ~ 5 ~ 0.5 ~ true ~ none }}{{ [100000000, 1700000000] }}{{ m > 10 ** 11 }}{{ 'abcdef'[1:100000000] }}"
    "{{ '%02d' % 5 }}{{ '%.2f'|format(3.14159) }}{{ '%s: %s' % ('a', 'b') }}{{ '%(a)s'|format(a='b') }}"
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ 'a' * m }}{{ m ** 2 }}{% generation %}{{ m }}{% endgeneration %}"
    "{% if m %}{% continue %}{% endif %}{% filter indent(9999999) %}{{ m }}{% endfilter %}{% endfor %}"
)


@pytest.mark.parametrize(("template", "what"), COSTLY.items(), ids=range(len(COSTLY)))
def test_a_template_that_would_take_too_long_is_refused_before_it_is_compiled(template, what):
    with pytest.raises(ValueError, match=f"line 1: the {what} of constants"):
        ChatTemplate(template)


def test_what_templates_usually_compute_is_accepted():
    ChatTemplate(USUAL)


async def test_a_models_template_that_would_take_too_long_stops_the_start(smollm2, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("a\n{{ 9 ** 9 ** 9 }}")
    with pytest.raises(StartError, match=r"chat\.jinja, line 2: the operator Pow"):
        await load_tokenizer(smollm2, path)


async def test_a_chat_of_an_adapter_that_has_one_already_is_refused():
    tokenizer = tiny_tokenizer().with_template("{{ 'a' * 100000000 }}")
    with pytest.raises(ApiError, match="cannot be used: line 1: the operator Mul"):
        await tokenizer.encode_chat("acme", [{"role": "user", "content": "hi"}])


async def test_a_refused_template_is_read_once_for_all_its_chats(monkeypatch):
    read = []

    def compile_template(source):
        read.append(source)
        return ChatTemplate(source)

    monkeypatch.setattr(tokenizer_module, "ChatTemplate", compile_template)
    tokenizer = tiny_tokenizer().with_template("{{ 'a' * 100000000 }}")
    read.clear()  # the template of the tiny tokenizer itself
    for _ in range(3):
        with pytest.raises(ApiError, match="cannot be used: line 1: the operator Mul"):
            await tokenizer.encode_chat("acme", [{"role": "user", "content": "hi"}])
    assert len(read) == 1
