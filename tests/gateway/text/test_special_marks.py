"""Chat templates of the dialects: the calls that they write into a conversation are those that are read from answers,
also if the marks around them are special tokens."""

import json

import pytest
from fakes import FakeEngine, build_gateway_app, byte_tokenizer

from gateway.text.tools.dialects import DIALECTS, choose_dialect
from gateway.text.tools.parser import ToolParser
from tests.grammar_walk import walk

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
)
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
NINE = (
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
)
LOOP = "{% for call in message.tool_calls or [] %}"
TEMPLATES = {
    "mistral": (
        f"{HEAD}{{% if message.tool_calls %}}[TOOL_CALLS] [{LOOP}{NINE}"
        """{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ '' if loop.last else ', ' }}"""
        f"{{% endfor %}}]{{% endif %}}{TAIL}"
    ),
    "mistral 11": (
        f"{HEAD}{LOOP}{NINE}[TOOL_CALLS]{{{{ call.function.name }}}}[CALL_ID]{{{{ call.id }}}}[ARGS]"
        f"{{{{ call.function.arguments | tojson }}}}{{% endfor %}}{TAIL}"
    ),
    "mistral 13": (
        f"{HEAD}{LOOP}{{{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}}}"
        f"{{% endfor %}}{TAIL}"
    ),
    "qwen3_coder": (
        f"{HEAD}{LOOP}{{{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}}}"
        "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\\n' }}"
        "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
        f"{{{{ '\\n</parameter>\\n' }}}}{{% endfor %}}{{{{ '</function>\\n</tool_call>' }}}}{{% endfor %}}{TAIL}"
    ),
    "pythonic": (
        f"{HEAD}{{% if message.tool_calls %}}[{LOOP}{{{{ call.function.name }}}}("
        "{% for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}"
        "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}"
        f"{{% endfor %}}]{{% endif %}}{TAIL}{{# [func_name1(params_name1=params_value1)] #}}"
    ),
    "harmony": (
        f"{HEAD}{LOOP}{{{{ '<|channel|>commentary to=functions.' + call.function.name }}}}"
        "{{ ' <|constrain|>json<|message|>' + call.function.arguments | tojson + '<|call|>' }}"
        f"{{% endfor %}}{TAIL}"
    ),
    "deepseek": (
        f"{HEAD}{{% if message.tool_calls %}}<｜tool▁calls▁begin｜>{LOOP}"
        "{{ '<｜tool▁call▁begin｜>' + call.function.name }}"
        "<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>"
        f"{{% endfor %}}<｜tool▁calls▁end｜>{{% endif %}}{TAIL}"
    ),
    "deepseek r1": (
        f"{HEAD}{{% if message.tool_calls %}}<｜tool▁calls▁begin｜>{LOOP}{{{{ '<｜tool▁call▁begin｜>' + call.type }}}}"
        "{{ '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments }}"
        "{{ '\\n```<｜tool▁call▁end｜>' }}"
        f"{{% endfor %}}<｜tool▁calls▁end｜>{{% endif %}}{TAIL}"
    ),
}
TEMPLATES["magistral"] = TEMPLATES["mistral 13"] + "{# [THINK] [/THINK] #}"
MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
LOOK = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "Zürich\n"]}, "far": {"type": "integer", "minimum": 1, "maximum": 9},
                   "all": {"type": "boolean"}},
    "required": ["at"],
    "additionalProperties": False,
}  # fmt: skip
WAIT = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("look", LOOK), ("wait", WAIT))
]
USER = {"role": "user", "content": "hi"}
CALLED = [("look", {"at": "Zürich\n", "far": 3, "all": True}), ("wait", {})]
CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    for number, (name, arguments) in enumerate(CALLED)
]
CHAT = {"model": "other", "messages": [USER], "tools": TOOLS, "max_tokens": 500}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_what_is_read(name):
    tokenizer = byte_tokenizer(TEMPLATES[name])
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in CALLS
    ]
    text = tokenizer.render_chat([USER, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS)
    dialect = choose_dialect("auto", tokenizer.tool_template)
    assert type(dialect) is DIALECTS["mistral" if name == "magistral" else name.split()[0]]
    parser, read = ToolParser(dialect, {"look": LOOK, "wait": WAIT}), {}
    for part in parser.push(text.rpartition("<|assistant|>")[0].rpartition("<|assistant|>")[2].removesuffix("<|end|>")):
        tool, arguments = read.get(part.index, ("", ""))
        read[part.index] = (tool + part.name, arguments + part.arguments)
    assert [(tool, json.loads(arguments)) for tool, arguments in read.values()] == CALLED


def test_special_tokens_are_kept_for_those_who_read_them():
    tokenizer = byte_tokenizer(TEMPLATES["mistral"], MARKS)
    ids = tokenizer._encode("é<|user|>[THINK]a[/THINK][TOOL_CALLS]b[ARGS]", False)
    whole = "é[THINK]a[TOOL_CALLS]b"
    for size in range(1, len(ids) + 1):
        detokenizer = tokenizer.detokenizer(marks=("[THINK]", "[TOOL_CALLS]", "none"))
        pieces = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(pieces) + detokenizer.flush() == whole
    detokenizer = tokenizer.detokenizer(marks=MARKS)
    detokenizer.keep(("[ARGS]",))
    assert detokenizer.push(ids) == "éab[ARGS]"
    half = tokenizer.detokenizer(marks=MARKS)
    assert half.push([ids[0], *tokenizer._encode("[ARGS]x", False)]) == "\N{REPLACEMENT CHARACTER}[ARGS]x"


@pytest.fixture
async def opened(tmp_path):
    """A function that opens a gateway with a base model `other`, which has a chat template and special tokens."""
    gateways = []

    async def open_with(name, special=()):
        engine = FakeEngine(byte_tokenizer(TEMPLATES[name], special))
        engine.info.model, engine.info.max_model_len = "other", 8192
        gateways.append(await build_gateway_app(tmp_path, others={"other": engine}))
        return gateways[-1], engine

    yield open_with
    for gateway in gateways:
        await gateway.assert_empty()


async def test_special_tokens_begin_calls_and_reasoning_and_are_not_shown(opened):
    gateway_app, engine = await opened("magistral", MARKS)
    engine.reply = lambda sent: (
        '[THINK]Hm[ARGS]m.[/THINK]So [THINK]:[TOOL_CALLS]look[ARGS]{"at": "sea"}[TOOL_CALLS]wait[ARGS]{}'
    )
    async with gateway_app.openai() as client:
        [choice] = (await client.chat.completions.create(**CHAT)).choices
        chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
        [plain] = (await client.chat.completions.create(**CHAT, tool_choice="none")).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert (choice.message.reasoning_content, choice.message.content) == ("Hmm.", "So :")
    assert (choice.finish_reason, calls) == ("tool_calls", [("look", '{"at": "sea"}'), ("wait", "{}")])
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "So :"
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert "".join(piece.function.arguments for piece in pieces if piece.index == 0) == '{"at": "sea"}'
    assert plain.message.content == 'So :look{"at": "sea"}wait{}'


async def test_earlier_calls_may_have_any_ids(opened):
    gateway_app, engine = await opened("mistral 11")
    said = {"role": "assistant", "content": "", "tool_calls": CALLS}
    results = [{"role": "tool", "tool_call_id": f"call_{number}", "content": "x"} for number in range(2)]
    async with gateway_app.client() as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "messages": [USER, said, *results]})
    assert answer.status_code == 200, answer.text
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids, skip_special=False)
    assert prompt.count("[TOOL_CALLS]look[CALL_ID]") == 1
    assert "call_0" not in prompt


@pytest.mark.parametrize(
    ("name", "special"), [(name, ()) for name in TEMPLATES if name != "magistral"] + [("mistral 11", MARKS)]
)
async def test_required_calls_are_written_in_the_models_dialect(opened, name, special):
    gateway_app, engine = await opened(name, special)
    engine.reply = lambda sent: walk(sent.params.grammar, engine.tokenizer._backend, sent.params.seed)
    async with gateway_app.openai() as client:
        answer = await client.chat.completions.create(
            **CHAT | {"max_tokens": 4000}, tool_choice="required", n=6, seed=3
        )
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in ("look", "wait")
            assert call.function.name == "wait" or arguments["at"] in LOOK["properties"]["at"]["enum"]
            assert type(arguments.get("all", True)) is bool


async def test_a_schema_that_cannot_be_required_is_refused_by_name(opened):
    gateway_app, _ = await opened("qwen3_coder")
    bounded = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "b", "parameters": bounded}}]
    async with gateway_app.client() as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "tools": tools, "tool_choice": "required"})
        free = await client.post("/v1/chat/completions", json={**CHAT, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[1].function.parameters")
    assert "pattern" in answer.json()["error"]["message"]
    assert free.status_code == 200
