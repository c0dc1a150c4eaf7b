"""What a chat template computes while it renders is bounded, and an error names the template."""

import pytest
from fakes import byte_tokenizer

from gateway.core.errors import ApiError, Fault
from gateway.text import template_bounds
from gateway.text.chat_template import DEFAULT_OPTIONS
from gateway.text.compiled_template import ChatTemplate
from gateway.text.template_budget import TooCostly

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
LISTS = "{% set ns = namespace(l=['a'], m=['a']) %}{% for i in range(32) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
EQUAL = "{% set ns.m = [['a'], ['a']] %}{% for i in range(31) %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
TUPLES = "{% set ns = namespace(l=('a',)) %}{% for i in range(32) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}"
CALLS = "{% macro f() %}{% set ns.l = varargs %}{% endmacro %}{% for i in range(32) %}{{ f(ns.l, ns.l) }}{% endfor %}"
TEXT = "{% set k = 60000000 %}{% set s = 'a' * k %}{% set t = 'a' * k %}{% for i in range(99999) %}"
COSTLY |= dict.fromkeys(
    (
        LISTS + "{{ ns.l }}",
        LISTS + "{{ ns.l ~ '' }}",
        LISTS + "{{ ns.l|string }}",
        LISTS + "{{ ns.l|tojson }}",
        LISTS + "{{ ns.l|upper }}",
        LISTS + "{{ ns.l|pprint }}",
        LISTS + "{{ [ns.l]|join }}",
        LISTS + "{{ '%s' % ns.l }}",
        LISTS + "{{ '%s' % (ns.l,) }}",
        LISTS + "{{ '%s'|format(ns.l) }}",
        LISTS + "{{ '{}'.format(ns.l) }}",
        LISTS + "{{ raise_exception(ns.l) }}",
        LISTS + "{{ ns.l is lower }}",
        LISTS + "{{ {}[ns.l] }}",
        LISTS + EQUAL + "{{ ns.l == ns.m }}",
        LISTS + EQUAL + "{{ ns.l < ns.m }}",
        LISTS + EQUAL + "{{ 0 < ns.l < ns.m }}",
        LISTS + EQUAL + "{{ ns.l in [ns.m] }}",
        LISTS + EQUAL + "{{ ns.l is eq(ns.m) }}",
        LISTS + EQUAL + "{{ [ns.l]|select('in', [ns.m])|list }}",
        LISTS + EQUAL + "{{ [ns.l, ns.m]|sort|length }}",
        LISTS + EQUAL + "{{ [ns.l].index(ns.m) }}",
        TUPLES + "{{ ns.l }}",
        TUPLES + "{{ {ns.l: 1}|length }}",
        TUPLES + "{{ {}[ns.l] }}",
        TUPLES + "{{ {}.get(ns.l) }}",
        TUPLES + "{{ ns.l in {} }}",
        TUPLES + CALLS + "{{ ns.l }}",
        "{% set ns = namespace(l=1) %}{% for i in range(32) %}{% set ns.l = {1: ns.l, 2: ns.l} %}{% endfor %}"
        "{{ ns.l }}",
        "{% set ns = namespace(l=1) %}{% for i in range(32) %}{% set ns.l = dict(a=ns.l, b=ns.l).values() %}"
        "{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=1) %}{% for i in range(9) %}{% set ns.l = [ns.l] * 999 %}{% endfor %}{{ ns.l }}",
        "{% for i in range(99999) %}{% set n = range(99999)|sum %}{% endfor %}",
        "{% for i in range(99999) %}{% set n = range(99999)|select('none')|list %}{% endfor %}",
        "{% for i in range(99999) %}{% set n = range(99999)|map('abs')|select|list %}{% endfor %}",
        "{% set l = range(99999)|list %}{% for i in range(99999) %}{% set n = l[1:] %}{% endfor %}",
        "{% set l = range(99999)|list %}{% for i in range(99999) %}{% set n = -1 in l %}{% endfor %}",
        "{% set k = 99999 %}{% set l = [[1] * 999] * k %}{{ l|sum(start=[])|length }}",
        TEXT + "{% set n = s == t %}{% endfor %}",
        TEXT + "{% set n = 'b' in s %}{% endfor %}",
        TEXT + "{% set n = s.count('b') %}{% endfor %}",
        TEXT + "{% set n = s[1:]|length %}{% endfor %}",
        "{% set k = 20000 %}{% set n = 3 ** k %}{% set k = 10000 %}{% set m = 7 ** k %}{% for i in range(99999) %}"
        "{% set q = n // m %}{% endfor %}",
    ),
    "",
)
COSTLY |= {
    "{% set s = 'z' * 9999 %}{{ s|int(0, 36) }}": "reads a number",
    "{% set s = 'a' * 9999 %}{{ (range(9999)|list)|tojson(indent=s) }}": "list whose text",
    "{% set s = 'a' * 9999 %}{{ (range(9999)|list)|tojson(separators=(s, s)) }}": "list whose text",
}


@pytest.mark.parametrize(("source", "what"), COSTLY.items(), ids=range(len(COSTLY)))
def test_a_costly_template_ends_with_an_error_that_names_it(source, what, monkeypatch):
    monkeypatch.setattr(template_bounds, "MOST_STEPS", 400_000)  # so that those that end after them end early
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


def test_namespaces_that_hold_each_other_are_written_without_their_values():
    source = "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = [b, b] %}{{ a }}{{ [b] }}"
    assert ChatTemplate(source).render({}, [USER], [], DEFAULT_OPTIONS) == "<Namespace>[<Namespace>]"


def test_comparisons_read_as_before():
    source = (
        "{{ 1 < 2 < 3 }} {{ 3 < 2 < missing.x }} {{ [1] == [1] }} {{ [1] != [1, 2] }} {{ 'i' in messages[0].content }} "
        "{{ 'role' in messages[0] }} {{ messages[0] in messages }} {{ 2 not in [1] }} {{ missing == none }} "
        "{{ [3, 1]|sort|first }} {{ [1, 2, 3]|select('gt', 1)|list }} {{ {(1, 2): 3}[(1, 2)] }} {{ messages[1:] }} "
        "{{ 'Ab' is upper }} {{ 2 is in([2]) }} {{ [[1], [2]]|sum(start=[]) }} {{ 7 // 2 }} {{ [2, 1]|map('abs')|max }}"
    )
    assert ChatTemplate(source).render({}, [USER], [], DEFAULT_OPTIONS) == (
        "True False True True True True True True False 1 [2, 3] 3 [] False True [1, 2] 3 2"
    )


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
