"""What a chat template computes while it renders is bounded, and an error names the template."""

import pytest
from fakes import byte_tokenizer

from gateway.core.errors import ApiError, Fault
from gateway.text.chat_template import DEFAULT_OPTIONS
from gateway.text.compiled_template import ChatTemplate
from gateway.text.template_bounds import TooCostly

USER = {"role": "user", "content": "hi"}
COSTLY = {
    "{% set n = 999 %}{{ n ** n ** n }}": "operator",
    "{% set ns = namespace(v=99999) %}{% for i in range(40) %}{% set ns.v = ns.v * ns.v %}{% endfor %}": "operator",
    "{% set n = 999999999 %}{{ 'a' * n }}": "text or list",
    "{% set n = 999999999 %}{{ n * [1] }}": "text or list",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}": "text or list",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}": "text or list",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}": (
        "text or list"
    ),
    "{% set n = 999999999 %}{{ 'a'.ljust(n) }}": "fills or indents",
    "{% set n = 999999999 %}{{ 'a'|center(n) }}": "fills or indents",
    "{% set n = 999999999 %}{{ 1.5|round(n) }}": "fills or indents",
    "{% set f = '%999999999d' %}{{ f % 1 }}": "formats a text",
    "{% set f = '{:999999999}' %}{{ f.format(1) }}": "formats a text",
    "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}": "text or list",
    "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}": "text or list",
    "{% set s = 'a' * 100000 %}{{ s|join(s) }}": "text or list",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "turns of loops",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": "turns of loops",
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}": "text or list",
}


@pytest.mark.parametrize(("source", "what"), COSTLY.items(), ids=range(len(COSTLY)))
def test_a_costly_template_ends_with_an_error_that_names_it(source, what):
    with pytest.raises(TooCostly) as caught:
        ChatTemplate(source).render({}, [USER], [], DEFAULT_OPTIONS)
    assert what in str(caught.value)
    assert f"the template that begins with {source[:60]!r}" in str(caught.value)


def test_the_caller_is_told_and_the_template_is_not_run_again():
    with pytest.raises(ApiError) as caught:
        byte_tokenizer("{% set n = 999 %}{{ n ** n ** n }}").render_chat([USER])
    assert caught.value.fault is Fault.INVALID_REQUEST
    assert "the operator ** makes a number" in caught.value.message
    assert "{% set n = 999 %}" in caught.value.message


def test_each_rendering_has_its_own_budget():
    template = ChatTemplate("{% for i in range(90000) %}{% for j in range(20) %}{% endfor %}{% endfor %}{{ 2 ** 10 }}")
    for _ in range(4):
        assert template.render({}, [USER], [], DEFAULT_OPTIONS) == "1024"


def test_usual_operations_read_as_before():
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} "
        "{{ m.content ~ 1 ~ none ~ missing }} {{ 'a' * 3 + 'b' }} {{ [1] + [2] }} {{ 7 % 4 }} {{ '%s-%d' % ('x', 2) }} "
        "{{ '{} {}'.format(1, 2) }} {{ m.content.replace('h', 'H') }} {{ ['a', 'b']|join(', ') }} "
        "{{ 1700000000|tojson }} {{ 2.345|round(1) }} {{ 'x'|center(3) }}{% else %}none{% endfor %}"
        "{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}"
        "{% for x in missing %}{{ x }}{% else %}!{% endfor %}"
        "{% for x in [1, 2]|map('string') %}{{ x }}{% endfor %}"
    )
    assert ChatTemplate(source).render({}, [USER], [], DEFAULT_OPTIONS) == (
        "1/1True hi1None aaab [1, 2] 3 x-2 1 2 Hi a, b 1700000000 2.3  x k1!12"
    )
