"""The dialects in which models write tool calls: what is read, what is text, and what grammars let models write."""

import json

import pytest
from fakes import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.tools.dialects import DIALECTS, choose_dialect
from gateway.text.tools.grammar import UnwritableTool, tool_grammar
from gateway.text.tools.literals import python_to_json
from gateway.text.tools.parser import ToolParser
from gateway.text.tools.rule import ToolRule
from gateway.text.tools.schemas import Schema
from tests.examples import examples
from tests.grammar_walk import follows

WHEN = {"type": "object", "properties": {"day": {"type": "string"}, "sharp": {"type": "boolean"}}, "required": ["day"]}
LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "when": {"$ref": "#/$defs/when"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "since": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"when": WHEN},
}
TOOLS = {"look": LOOK, "wait": {"type": "object", "properties": {}, "additionalProperties": False}}
SHOWN = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]

MISTRAL = DIALECTS["mistral"]()
MISTRAL_11 = DIALECTS["mistral"]("'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]'")
MISTRAL_13 = DIALECTS["mistral"]("'[TOOL_CALLS]' + name + '[ARGS]'")
QWEN = DIALECTS["qwen3_coder"]()
PYTHONIC = DIALECTS["pythonic"]()
DEEPSEEK = DIALECTS["deepseek"]()
DEEPSEEK_R1 = DIALECTS["deepseek"]("```json")
SPOKEN = {
    "mistral": MISTRAL,
    "mistral 11": MISTRAL_11,
    "mistral 13": MISTRAL_13,
    "qwen": QWEN,
    "pythonic": PYTHONIC,
    "deepseek": DEEPSEEK,
    "deepseek r1": DEEPSEEK_R1,
}

R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{0}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def xml(name, **values):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def read(dialect, pieces):
    """An answer's text, and each call's name and arguments."""
    parser = ToolParser(dialect, TOOLS)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [["", ""] for _ in range(parser.num_calls)]
    for call in parts:
        if not isinstance(call, str):
            assert not call.name or not calls[call.index][1]  # the name comes first
            calls[call.index][0] += call.name
            calls[call.index][1] += call.arguments
    return text, [tuple(call) for call in calls]


SEA = '{"city": "the \\"sea\\" }] € \\n"}'
CASES = [
    # Mistral: lists of objects, and names before arguments
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "look", "arguments": {SEA}, "id": "abc"}}]', "", [("look", SEA)]),
    (
        MISTRAL,
        'Well.\n[TOOL_CALLS][{"name": "look", "arguments": {"a": [1]}}, {"arguments": {}, "name": "wait"} ] Done.',
        "Well.Done.",
        [("look", '{"a": [1]}'), ("wait", "{}")],
    ),
    (MISTRAL, f"[TOOL_CALLS]look[ARGS]{SEA}[TOOL_CALLS]other[ARGS]{{}}", "", [("look", SEA), ("other", "{}")]),
    (MISTRAL, "[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{}", "", [("look", "{}")]),
    (MISTRAL, 'a [TOOL_CALLS] look {"a": {"b": 2}}', "a", [("look", '{"a": {"b": 2}}')]),
    (MISTRAL, '[TOOL_CALLS]look[ARGS]{"city": "Pa', "", [("look", '{"city": "Pa')]),
    (MISTRAL, "[TOOL_CALLS]look[ARGS]{} [AR", "", [("look", "{}")]),
    (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {}}, 5]', ", 5]", [("look", "{}")]),
    (MISTRAL, '[TOOL_CALLS][{"name": "look"}]], {"name": "wait"}', '], {"name": "wait"}', [("look", "{}")]),
    (MISTRAL, "[TOOL_CALLS]what is [ARGS]? {}", "what is ? {}", []),
    (MISTRAL, "[TOOL_CALLS][1, 2]", "[1, 2]", []),
    (MISTRAL, "[TOOL_CALLS]x [TOOL_CALLS][TOOL_CALLS]wait[ARGS]{}", "x ", [("wait", "{}")]),
    (MISTRAL, "[TOOL_CALLS]", "", []),
    (MISTRAL, "[TOOL_CAL", "[TOOL_CAL", []),
    (MISTRAL, '[{"name": "look"}] [/INST]', '[{"name": "look"}] [/INST]', []),
    # Qwen3-Coder: texts, typed by the schema
    (
        QWEN,
        "I look.\n" + xml("look", city='Zürich "1"\n</b>', days=3, exact="True") + "\n" + xml("wait"),
        "I look.",
        [("look", '{"city": "Zürich \\"1\\"\\n</b>", "days": 3, "exact": true}'), ("wait", "{}")],
    ),
    (QWEN, xml("look", city=5, days="two", note=5), "", [("look", '{"city": "5", "days": "two", "note": "5"}')]),
    (
        QWEN,
        xml("look", city="null", unit="None", note="null"),
        "",
        [("look", '{"city": "null", "unit": null, "note": null}')],
    ),
    (QWEN, xml("look", when="{'day': 'a', 'sharp': True}"), "", [("look", '{"when": {"day": "a", "sharp": true}}')]),
    (QWEN, xml("look", tags='["a"]', city="  a\n "), "", [("look", '{"tags": ["a"], "city": "  a\\n "}')]),
    (
        QWEN,
        xml("other", a='{"b": 1}', b='"c"', c="1e3", d="[1"),
        "",
        [("other", '{"a": {"b": 1}, "b": "\\"c\\"", "c": 1e3, "d": "[1"}')],
    ),
    (QWEN, "<function=look>\n<parameter=city></parameter>\n</function>ok", "ok", [("look", '{"city": ""}')]),
    (QWEN, "<tool_call>\n<function=look>\n</tool_call> ok", "ok", [("look", "{}")]),
    (QWEN, "<tool_call>\n<function=look>\n<parameter=city>\nPa", "", [("look", '{"city": "Pa')]),
    (QWEN, xml("look", city="a").removesuffix("_call>"), "", [("look", '{"city": "a"}')]),
    (QWEN, "<tool_call>\n<function=look>\nblah", "<tool_call>\n<function=look>\nblah", []),
    (QWEN, "<tool_call>{}</tool_call> <function= a>", "<tool_call>{}</tool_call> <function= a>", []),
    (QWEN, "<tool_call>\n<function=look>\n", "<tool_call>\n<function=look>\n", []),
    (QWEN, xml("look", city="a").replace("</function>", "<oops>"), "<oops>\n", [("look", '{"city": "a"')]),
    # pythonic: the whole answer is a list of calls
    (
        PYTHONIC,
        '[look(city="Paris", days=2, exact=True), wait()]',
        "",
        [("look", '{"city": "Paris", "days": 2, "exact": true}'), ("wait", "{}")],
    ),
    (
        PYTHONIC,
        " [ look( city = 'a\\'\"€' , tags=[ 'a',], when={'day': None} ) ]\n",
        "",
        [("look", '{"city": "a\'\\"€", "tags": ["a"], "when": {"day": null}}')],
    ),
    (
        PYTHONIC,
        "[look(n=[-1.5, +2, 1_000, .5, 0x1F, 1e9], s='\\x41\\u00e9\\ud83d\\ude00\\q\\n')]",
        "",
        [("look", '{"n": [-1.5, 2, 1000, 0.5, 31, 1e9], "s": "A\u00e9😀\\\\q\\n"}')],
    ),
    (PYTHONIC, '[look(city="Pa', "", [("look", '{"city": "Pa')]),
    (PYTHONIC, "[look(days=1", "", [("look", '{"days": ')]),
    (PYTHONIC, "[wait()] Done.", "Done.", [("wait", "{}")]),
    (PYTHONIC, "[wait()]], wait()]", "], wait()]", [("wait", "{}")]),
    (PYTHONIC, "[wait(), other()]", ", other()]", [("wait", "{}")]),
    (PYTHONIC, "[other(a=1)]", "[other(a=1)]", []),
    (PYTHONIC, "[look(at the sea)](http://x)", "[look(at the sea)](http://x)", []),
    (PYTHONIC, "[look('Paris')]", "[look('Paris')]", []),
    (PYTHONIC, "[look(a=1, a=2)]", "=2)]", [("look", '{"a": 1')]),
    (PYTHONIC, "[1, 2, look(a=1)]", "[1, 2, look(a=1)]", []),
    (PYTHONIC, "I call [wait()]", "I call [wait()]", []),
    (PYTHONIC, "[]", "[]", []),
    (PYTHONIC, "[look(a=__import__('os'))]", "('os'))]", [("look", '{"a": ')]),
    # DeepSeek: a list between marks
    (DEEPSEEK_R1, "So.\n" + R1.replace("{0}", SEA).replace("{{}}", "{}"), "So.", [("look", SEA), ("wait", "{}")]),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("look", '{"a": 1}'), ("wait", "{}")],
    ),
    (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look(1)", "look(1)", []),
    (DEEPSEEK, "```python\nx\n``` <｜tool▁ca", "```python\nx\n``` <｜tool▁ca", []),
]


@pytest.mark.parametrize(("dialect", "answer", "text", "calls"), CASES)
def test_calls_are_told_from_text_wherever_the_answer_is_cut(dialect, answer, text, calls):
    assert read(dialect, [answer]) == (text, calls)
    assert read(dialect, list(answer)) == (text, calls)
    for cut in range(1, len(answer)):
        assert read(dialect, [answer[:cut], answer[cut:]]) == (text, calls), answer[:cut]


SOUP = [
    '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", " ", "\n", "a", "1", "look", "city", "name", "True",
    "u12", '"name": "look"', "look(", "a=",
    "<", "<tool_call>", "</tool_call>", "<function=", "<function=look>", "</function>",
    "<parameter=city>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```json", "```",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    " " * 300,
]  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(sorted(SPOKEN)), st.lists(st.sampled_from(SOUP), max_size=14), st.integers(1, 7))
def test_what_is_read_does_not_depend_on_the_pieces(name, soup, size):
    answer = "".join(soup)
    for begin in ("", "[TOOL_CALLS]look[ARGS]{", "<tool_call>\n<function=look>\n<parameter=city>\n", "[look(city="):
        whole = begin + answer
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert read(SPOKEN[name], pieces) == read(SPOKEN[name], [whole])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(60), deadline=None)
@given(values, st.integers(1, 9))
def test_python_literals_are_what_python_reads(value, size):
    literal = repr(value)
    assert json.loads(python_to_json(literal)) == value
    answer = f"[look(a={literal}, b={json.dumps(value)})]"
    text, [(_, written)] = read(PYTHONIC, [answer[at : at + size] for at in range(0, len(answer), size)])
    assert (text, json.loads(written)) == ("", {"a": value, "b": value})


@pytest.mark.parametrize(
    "text", ["", "[1", "{1: 2}", "{'a'}", "f''", "(1,)", "007", "nan", "1 2", "'a' 'b'", "[" * 200, "٣"]
)
def test_what_is_no_literal_is_refused(text):
    assert python_to_json(text) is None


@pytest.mark.parametrize("name", SPOKEN)
def test_endless_text_is_not_held_back(name):
    for filler in (" ", "\n", "[", "<"):
        parser = ToolParser(SPOKEN[name], TOOLS)
        shown = [part for _ in range(60) for part in parser.push(filler * 64)]
        assert len("".join(shown)) > 50 * 64
        assert "".join(shown + parser.flush()) == filler * 64 * 60


WRITTEN = {
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"city": "x"}}, {"name": "wait", "arguments": {}}]',
    "mistral 11": '[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{"city": "x"}[TOOL_CALLS]wait[CALL_ID]a1B2c3D4f[ARGS]{}',
    "mistral 13": '[TOOL_CALLS]look[ARGS]{"city": "x"}[TOOL_CALLS]wait[ARGS]{}',
    "qwen": f"{xml('look', city='x')}\n{xml('wait')}",
    "pythonic": '[look(city="x"), wait()]',
    "deepseek": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "x"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>wait<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek r1": R1.replace("{0}", '{"city": "x"}').replace("{{}}", "{}"),
}
BACKEND = tiny_tokenizer()._backend


def grammar(dialect, rule, tools=SHOWN):
    return tool_grammar(dialect.frame, tools, rule, BACKEND.token_to_id)


@pytest.mark.parametrize("name", SPOKEN)
def test_models_must_write_what_is_read(name):
    dialect, answer = SPOKEN[name], WRITTEN[name]
    assert read(dialect, [answer]) == ("", [("look", '{"city": "x"}'), ("wait", "{}")])
    required = grammar(dialect, ToolRule(required=True))
    assert follows(required, BACKEND, answer)
    for other in ("", "Hello.", answer.replace("look", "lock"), answer.replace("city", "town"), answer + "x"):
        assert not follows(required, BACKEND, other), other
    assert not follows(grammar(dialect, ToolRule(required=True, parallel=False)), BACKEND, answer)
    assert not follows(grammar(dialect, ToolRule(named="look")), BACKEND, answer)
    strict = grammar(dialect, ToolRule(strict=frozenset({"look"})))
    for other in (answer, "Hello.\n", "" if name == "pythonic" else f"Hello. {answer}"):
        assert follows(strict, BACKEND, other), other
    assert not follows(strict, BACKEND, answer.replace("city", "town"))
    assert not follows(strict, BACKEND, answer.replace("wait", "what"))


@pytest.mark.parametrize(
    ("dialect", "good", "bad"),
    [
        (
            QWEN,
            [{"city": "a\n</b>\n", "days": 3}, {"city": "", "when": '{"day": "x"}', "tags": "[]", "unit": "C"},
             {"city": "1", "exact": "True", "unit": "null", "note": "null"},
             {"city": "1", "since": "2026-11-26T12:00:00Z", "code": "a\n"}],
            [{"days": 3}, {"city": "a", "days": 10}, {"city": "a", "exact": "1"}, {"city": "a", "unit": "K"},
             {"city": "a", "tags": '["c"]'}, {"days": 3, "city": "a"}, {"city": "a</parameter>\n"},
             {"city": "a", "since": "today"}, {"city": "a", "code": "a"}, {"city": "a", "code": "abcd"}],
        ),
        (
            PYTHONIC,
            [{"city": '"a\\n]"', "days": 3}, {"city": '""', "when": '{"day": "x", "sharp": True}', "tags": "[]"},
             {"city": '"1"', "exact": "False", "unit": "None", "note": '"n"'}, {"city": '"1"', "tags": '["a", "b"]'}],
            [{"days": 3}, {"city": "a"}, {"city": '"a"', "days": 10}, {"city": '"a"', "exact": "1"},
             {"city": '"a"', "tags": '["a", "b", "a"]'}, {"city": '"a"', "when": "{}"}, {"city": '"a"', "unit": '"K"'}],
        ),
    ],
)  # fmt: skip
def test_arguments_that_are_no_json_object_follow_the_schema(dialect, good, bad):
    required = grammar(dialect, ToolRule(named="look"))
    for values in good:
        answer = call(dialect, values)
        assert follows(required, BACKEND, answer), answer
        text, [(name, written)] = read(dialect, [answer])
        assert (text, name, list(json.loads(written))) == ("", "look", list(values))
    for values in bad:
        assert not follows(required, BACKEND, call(dialect, values)), values


def call(dialect, values):
    return xml("look", **values) if dialect is QWEN else f"[look({', '.join(f'{k}={v}' for k, v in values.items())})]"


def test_arguments_without_a_schema_are_any():
    free = [{"function": {"name": "look", "parameters": {"type": "object"}}}]
    for dialect, answer in (
        (QWEN, xml("look", a="1", b_c="two\nlines")),
        (QWEN, xml("look")),
        (PYTHONIC, "[look(a=[1, {'b': None}], c=\"x\\n\")]"),
        (PYTHONIC, "[look()]"),
    ):
        assert follows(grammar(dialect, ToolRule(required=True), free), BACKEND, answer), answer


def doubled(levels):
    """A schema that refers twice to a schema that refers twice to a schema, and so on."""
    last = {"type": "integer"}
    rest = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2 + [{"type": "null"}]} for n in range(levels)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**rest, f"d{levels}": last}}


def nested(levels):
    inner = {"type": "integer"}
    for _ in range(levels):
        inner = {"type": "object", "properties": dict.fromkeys("abc", inner), "additionalProperties": False}
    return inner


@pytest.mark.parametrize("dialect", [QWEN, PYTHONIC])
def test_schemas_that_multiply_cost_no_more_than_their_size(dialect):
    """Beyond what a grammar may have, they are refused."""
    for schema, answer in (
        (doubled(60), xml("look", a="1") if dialect is QWEN else "[look(a=1)]"),
        (nested(4), xml("look", b='{"c": {"a": {"a": 1}}}') if dialect is QWEN else '[look(b={"c": {"a": {"a": 1}}})]'),
    ):
        tools = [{"function": {"name": "look", "parameters": schema}}]
        assert follows(grammar(dialect, ToolRule(required=True), tools), BACKEND, answer)
        text, [(_, written)] = read_with(schema, dialect, answer)
        assert (text, json.loads(written)) in (("", {"a": 1}), ("", {"b": {"c": {"a": {"a": 1}}}}))
    long = {"properties": {"a": {"enum": ["x" * 34_000]}}}
    two = [{"function": {"name": name, "parameters": long}} for name in ("look", "listen")]
    with pytest.raises(UnwritableTool, match="characters"):
        grammar(dialect, ToolRule(required=True), two)
    many = {"properties": {f"a{number}": {"type": "integer"} for number in range(20_000)}}
    with pytest.raises(UnwritableTool, match="characters"):
        grammar(dialect, ToolRule(required=True), [{"function": {"name": "look", "parameters": many}}])


def read_with(schema, dialect, answer):
    parser = ToolParser(dialect, {"look": schema})
    parts = parser.push(answer) + parser.flush()
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [("look", "".join(part.arguments for part in parts if not isinstance(part, str)))]


@pytest.mark.parametrize("dialect", [QWEN, PYTHONIC])
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a b>": {}}}, "'a b>'"),
        ({"properties": {"a": {"type": "string"}}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, r"#/\$defs/b"),
        ({"properties": {}, "required": ["a"]}, "'a'"),
        ({"properties": {"a": False}}, "nothing"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, "itself"),
    ],
)  # fmt: skip
def test_schemas_that_a_dialect_cannot_follow_are_refused(dialect, schema, problem):
    with pytest.raises(UnwritableTool, match=problem) as caught:
        grammar(dialect, ToolRule(required=True), [SHOWN[1], {"function": {"name": "look", "parameters": schema}}])
    assert caught.value.number == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }} <tool_call>\n<function=", "qwen3_coder"),
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <｜tool▁call▁begin｜>", "deepseek"),
        ('{{ tools }} [func_name1(params_name1=params_value1) ipython "parameters"', "pythonic"),
        ('{{ tools }} ipython "parameters"', "llama3"),
    ],
)
def test_a_template_says_its_dialect(template, name):
    assert type(choose_dialect("auto", template)) is DIALECTS[name]
    assert type(choose_dialect(name, "{{ tools }}")) is DIALECTS[name]


def test_values_with_many_alternatives_are_looked_at_no_longer():
    """They would be looked at for each value that the model writes, and written into a grammar with all definitions."""
    few, many = ({"anyOf": [{"type": "integer", "minimum": n} for n in range(count)]} for count in (200, 300))
    assert Schema(few, few).kinds() == {"integer"} and not Schema(many, many).kinds()
    tools = [{"function": {"name": "look", "parameters": {"properties": {"a": many}}}}]
    for dialect in (QWEN, PYTHONIC):
        with pytest.raises(UnwritableTool, match="at most 256 alternatives"):
            grammar(dialect, ToolRule(required=True), tools)


@pytest.mark.parametrize("lengths", [{}, {"maxLength": 100}, {"maxLength": 5000}, {"minLength": 10}])
def test_long_texts_may_have_what_begins_like_the_end_mark(lengths):
    schema = {"properties": {"a": {"type": "string", **lengths}, "b": {"type": "string"}}, "required": ["a"]}
    required = grammar(QWEN, ToolRule(required=True), [{"function": {"name": "look", "parameters": schema}}])
    for text in ("<p>one</p>\n<<</parameter<</<", "é" * 60, "</parameters></paramete>r"):
        assert follows(required, BACKEND, xml("look", a=text)), text
        assert follows(required, BACKEND, xml("look", a=text, b="<")), text
    assert not follows(required, BACKEND, xml("look", a="longer </parameter> text"))
    assert follows(required, BACKEND, xml("look", a="x" * 101)) == (lengths.get("maxLength") != 100)
