"""Tools that have to be called, and calls that follow their schemas: the grammars, and what clients see of them."""

import json

import pytest
from fakes import BASE, build_gateway_app, tiny_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from gateway.text.tools.dialects import DIALECTS, Hermes, Llama3
from gateway.text.tools.grammar import arguments_schema, tool_grammar
from gateway.text.tools.parser import ToolParser
from gateway.text.tools.rule import ToolRule
from tests.grammar_walk import follows, walk
from tests.schemas import check

LOOK = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "<sky>", 'a "b"']}, "far": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["at"],
    "additionalProperties": False,
}
COUNT = {"properties": {"to": {"$ref": "#/$defs/few"}}, "required": ["to"], "$defs": {"few": {"enum": [1, 2]}}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"look": LOOK, "count_it": {**COUNT, "additionalProperties": False}, "wait": NOTHING}


def tool(name, **more):
    parameters = {} if SCHEMAS[name] is NOTHING else {"parameters": SCHEMAS[name]}
    return {"type": "function", "function": {"name": name, **parameters, **more}}


TOOLS = [tool(name) for name in SCHEMAS]
SHOWN = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 1500}
PLAIN = tiny_tokenizer()._backend


def with_marks():
    """A vocabulary that has a token for each mark, as Qwen's has."""
    backend = Backend.from_str(PLAIN.to_str())
    backend.add_tokens([AddedToken(mark, special=False) for mark in (Hermes.OPENING, Hermes.CLOSING)])
    return backend


BACKENDS = {"plain": PLAIN, "marks": with_marks()}


def read(dialect, answer):
    """An answer's text and its calls, as clients get them."""
    parser = ToolParser(dialect, SCHEMAS)
    parts = parser.push(answer) + parser.flush()
    calls = [["", ""] for _ in range(parser.num_calls)]
    for part in parts:
        if not isinstance(part, str):
            calls[part.index][0] += part.name
            calls[part.index][1] += part.arguments
    return "".join(part for part in parts if isinstance(part, str)), calls


def check_calls(calls, schemas=SCHEMAS):
    for name, arguments in calls:
        check(arguments, schemas[name])


MUST = [ToolRule(required=True), ToolRule(required=True, parallel=False), ToolRule(named="look")]


@pytest.mark.parametrize("name", sorted(DIALECTS.keys() - {"hermes", "llama3"}))
@pytest.mark.parametrize("rule", MUST, ids=["required", "required once", "named"])
def test_no_answer_breaks_the_rule_in_any_dialect(name, rule):
    test_no_answer_breaks_the_rule(DIALECTS[name]("[ARGS]"), rule, "plain")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dialect", [Hermes(), Llama3()], ids=["hermes", "llama3"])
@pytest.mark.parametrize(
    "rule",
    [
        *MUST,
        ToolRule(strict=frozenset(SCHEMAS)),
        ToolRule(strict=frozenset({"wait"}), parallel=False),
    ],
    ids=["required", "required once", "named", "strict", "strict once"],
)
def test_no_answer_breaks_the_rule(dialect, rule, backend):
    backend = BACKENDS[backend]
    grammar = tool_grammar(dialect.frame, SHOWN, rule, backend.token_to_id)
    answers = [read(dialect, walk(grammar, backend, seed)) for seed in range(12)]
    for text, calls in answers:
        assert (not text and calls) or not rule.must_call
        assert len(calls) <= 1 or rule.several
        assert {name for name, _ in calls} <= ({rule.named} if rule.named else set(SCHEMAS))
        check_calls([call for call in calls if rule.binds(call[0])])
    if rule.must_call:
        can_repeat = dialect.frame.separator is not None or dialect.frame.gap is not None
        assert any(len(calls) > 1 for _, calls in answers) == (rule.several and can_repeat)
    else:
        assert any(text for text, _ in answers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_text_and_calls_may_alternate_and_calls_are_still_bound(backend):
    backend = BACKENDS[backend]
    rule = ToolRule(strict=frozenset({"look"}))
    grammar = tool_grammar(Hermes().frame, SHOWN, rule, backend.token_to_id)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    loose = '<tool_call>\n{"name": "count_it", "arguments": {"any": [1]}}\n</tool_call>'
    for answer in ("a < b", f"Let me see. {call} And: {loose}", f"{call}\n{call}", "<tool_cal>"):
        assert follows(grammar, backend, answer), answer
    for answer in (call.replace("sea", "see"), call.replace("look", "lock"), f"Well: {loose.replace('[1]}', ']')}"):
        assert not follows(grammar, backend, answer), answer


@pytest.fixture
async def gateway_app(tmp_path):
    opened = await build_gateway_app(tmp_path)
    opened.engine.info.max_model_len = 8192
    opened.engine.tokens_per_event = 3
    opened.engine.reply = lambda sent: walk(sent.params.grammar, PLAIN, sent.params.seed)
    yield opened
    await opened.assert_empty()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "names", "several"),
    [
        ({"tool_choice": "required"}, set(SCHEMAS), True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, set(SCHEMAS), False),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, {"look"}, False),
    ],
    ids=["required", "required once", "named"],
)
async def test_clients_get_the_calls_they_require(gateway_app, options, names, several, stream):
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(**CHAT, **options, n=12, seed=5, stream=stream)
        answers = await collected(answer) if stream else whole(answer)
    assert {text for text, _, _ in answers} <= {"", None}
    assert {finish for _, _, finish in answers} == {"tool_calls"}
    assert {name for _, calls, _ in answers for name, _ in calls} == names
    assert any(len(calls) > 1 for _, calls, _ in answers) == several
    for _, calls, _ in answers:
        assert calls
        check_calls(calls)
    assert len({sent.params.grammar for sent in gateway_app.engine.requests}) == 1


def whole(answer):
    messages = [(choice.message, choice.finish_reason) for choice in answer.choices]
    return [
        (message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls], finish)
        for message, finish in messages
    ]


async def collected(stream):
    answers = {}
    async for chunk in stream:
        [choice] = chunk.choices
        answer = answers.setdefault(choice.index, ["", {}, None])
        answer[0] += choice.delta.content or ""
        answer[2] = choice.finish_reason or answer[2]
        for piece in choice.delta.tool_calls or []:
            name, arguments = answer[1].get(piece.index, ("", ""))
            answer[1][piece.index] = name + (piece.function.name or ""), arguments + (piece.function.arguments or "")
    return [(text, list(calls.values()), finish) for text, calls, finish in answers.values()]


async def test_what_requires_nothing_binds_nothing(gateway_app):
    gateway_app.engine.reply = lambda sent: "free"
    async with gateway_app.openai() as client:
        for choice in ("auto", "none"):
            await client.chat.completions.create(**CHAT, tool_choice=choice)
        await client.chat.completions.create(**CHAT | {"tools": [tool("look", strict=True), tool("wait")]})
    free, silent, bound = (sent.params.grammar for sent in gateway_app.engine.requests)
    assert (free, silent) == (None, None)
    assert bound is not None


async def test_a_format_is_for_the_answer_and_tools_for_the_calls(gateway_app):
    """Either is made, whichever the model begins."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    once = CHAT | {"parallel_tool_calls": False, "tools": [tool("look", strict=True)]}
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(**once, response_format=wanted, n=12, seed=1)
    messages = [choice.message for choice in answer.choices]
    for message in messages:
        if message.tool_calls:
            check_calls([(call.function.name, call.function.arguments) for call in message.tool_calls])
        else:
            check(message.content, schema)
    assert 0 < sum(message.tool_calls is not None for message in messages) < 12


FORMAT = "response_format.json_schema.schema"
BAD = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [tool("look"), tool("wait", parameters=BAD)]}, "tools[1].function.parameters", None),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", None),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice", None),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", None),
        ({"ignore_eos": True}, "ignore_eos", None),
        (
            {"tool_choice": "auto", "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "unsupported_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format.json_schema.schema",
            None,
        ),
    ],
)
async def test_what_cannot_be_is_refused_before_tokens_are_reserved(gateway_app, change, param, code):
    async with gateway_app.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "tool_choice": "required", **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert not gateway_app.limiter.reserved_tokens
    assert ("uniqueItems" in error["message"]) == ("uniqueItems" in str(change))


async def test_a_tool_that_is_not_called_may_have_any_schema(gateway_app):
    tools = [tool("look"), tool("wait", parameters=BAD)]
    look = {"type": "function", "function": {"name": "look"}}
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(**CHAT | {"tools": tools}, tool_choice=look, seed=1)
    [call] = answer.choices[0].message.tool_calls
    check_calls([(call.function.name, call.function.arguments)])


def nested(levels, innermost):
    return {"x": nested(levels - 1, innermost)} if levels else innermost


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("response_format", lambda deep: {"response_format": named(deep)}),
        ("guided_json", lambda deep: {"guided_json": deep}),
        ("guided_json", lambda deep: {"guided_json": json.dumps(deep)}),
        ("tools", lambda deep: {"tools": [tool("look", parameters=deep)]}),
    ],
)
async def test_what_is_nested_too_deep_is_refused(gateway_app, place, change):
    gateway_app.engine.reply = lambda sent: "fine"
    async with gateway_app.client() as client:
        deep = await client.post("/v1/chat/completions", json={**CHAT, "tools": [], **change(nested(450, {}))})
        as_deep_as_allowed = await client.post("/v1/chat/completions", json={**CHAT, **change(nested(95, {}))})
    assert (deep.status_code, deep.json()["error"]["param"]) == (400, place)
    assert as_deep_as_allowed.status_code < 500 and "nested" not in as_deep_as_allowed.text


async def test_arguments_in_a_history_that_are_nested_too_deep_are_taken_as_text(gateway_app):
    async with gateway_app.client() as client:
        deep = await client.post(
            "/v1/chat/completions", json={**CHAT, "messages": [calling(json.dumps(nested(150, {})))]}
        )
    assert (deep.status_code, deep.json()["error"]["param"]) == (400, "messages"), deep.text
    assert "nested" not in deep.text  # it is the template that refuses this history, or the context that is too short


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def calling(arguments):
    """Templates that begin with a user are content with this."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("parameters", "is_closed"),
    [
        ({"type": "object", "properties": {}}, True),  # what LangChain sends for a function without arguments
        ({"properties": {"a": {}}, "required": ["a"], "title": "A"}, True),
        ({"properties": {}, "additionalProperties": {"type": "string"}}, False),
        ({"properties": {"a": {}}, "required": ["b"]}, False),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, False),
        ({"type": "object"}, False),
    ],
)
def test_a_function_takes_the_arguments_that_it_lists(parameters, is_closed):
    schema = arguments_schema({"function": {"name": "f", "parameters": parameters}}, ToolRule(required=True))
    assert (schema.get("additionalProperties") is False) == is_closed
    assert schema == {"type": "object"} | parameters | ({"additionalProperties": False} if is_closed else {})
