"""Generates conversations about tools: tool calls, answers to tool results, and answers in words if no tool fits."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lab.demo.characters import SYSTEM_PROMPTS
from lab.demo.questions import plain_pairs
from lab.demo.tools.forms import extraction_tool, made_up_tool
from lab.demo.tools.kinds import Tool, ToolKind, make_tool, read_kinds
from lab.demo.tools.values import Values

Json = dict[str, Any]
Message = dict[str, Any]

HERE = Path(__file__).parent
HELD_OUT_PLAIN = 5
"""Every fifth plain question is held out from training."""
RESULT_FIELDS = (
    ("temperature", "int:-10:38"), ("condition", "enum:sunny,cloudy,rainy,windy,snowy"), ("price", "float:1:900"),
    ("status", "enum:shipped,delivered,pending,confirmed"), ("total", "float:1:5000"), ("name", "person"),
    ("date", "day"), ("time", "time"), ("id", "code"), ("count", "int:0:500"), ("city", "city"), ("rating", "int:1:10"),
    ("company", "company"), ("title", "title"), ("distance", "int:1:900"),
)  # fmt: skip
PLAIN_RESULTS = (
    "{city} is {enum:sunny,cloudy,rainy,windy,foggy} and {int:-10:38} degrees.", "The answer is {float:1:5000}.",
    "It is {time} in {city}.", "{person} has been told.", "Order {code} is {enum:on its way,delivered,delayed}.",
    "The {item} costs {float:5:900} dollars.", "Booked. The number is {code}.", "{title} starts at {time}.",
    "There are {int:2:90} results for {topic}.", "The reminder is set for {time}.",
)  # fmt: skip
BARE_RESULTS = ("int:0:5000", "float:1:5000", "enum:done,ok,saved,sent,true", "day", "time")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation after the system prompt. The assistant's messages are learnt."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """Conversations with the same system prompt and the same tools, which are trained as one row."""

    system: str | None
    """None means the chat template's own system prompt."""
    tools: tuple[Json, ...]
    branches: tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The data that conversations are drawn from: either the training or the held-out part. Drawing advances `rng`."""

    rng: random.Random
    values: Values
    kinds: tuple[ToolKind, ...]
    plain: tuple[tuple[str, str], ...]
    held_out: bool = field(default=False)

    def tool(self) -> Tool:
        draw = self.rng.random()
        if draw < 0.5:
            return make_tool(self.rng.choice(self.kinds), self.rng)
        return made_up_tool(self.rng, held_out=self.held_out)

    def tools(self, count: int) -> list[Tool]:
        """Draw `count` tools with different names and of different kinds, to be offered in one conversation."""
        chosen: dict[str, Tool] = {}
        while len(chosen) < count:
            tool = self.tool()
            if all(tool.kind is not other.kind for other in chosen.values()):
                chosen.setdefault(tool.name, tool)
        return list(chosen.values())


def source(seed: int, *, held_out: bool = False) -> Source:
    """Return the tools, values and plain question pairs from which conversations are drawn: those of the training part
    or, with `held_out`, those of the held-out part. `seed` determines all that is drawn from them."""
    rng = random.Random(seed)
    pairs = [pair for i, pair in enumerate(plain_pairs()) if (i % HELD_OUT_PLAIN == 0) == held_out]
    return Source(rng, Values(rng, held_out=held_out), _kinds(held_out), tuple(pairs), held_out)


def trees(count: int, seed: int) -> list[Tree]:
    """Return `count` trees of training conversations, which `seed` determines."""
    drawn = source(seed)
    return [_extraction_tree(drawn) if drawn.rng.random() < 0.3 else _tool_tree(drawn) for _ in range(count)]


@cache
def _kinds(held_out: bool) -> tuple[ToolKind, ...]:
    return tuple(read_kinds(HERE / ("held_out_tools.txt" if held_out else "trained_tools.txt")))


def _tool_tree(drawn: Source) -> Tree:
    rng = drawn.rng
    tools = drawn.tools(rng.choice((1, 1, 2, 2, 3, 4)))
    branches = [_called(drawn, rng.choice(tools)) for _ in range(rng.choice((4, 5)))]
    branches += [plain(drawn) for _ in range(rng.choice((1, 1, 2)))]
    if rng.random() < 0.5:
        branches.append(_twice(drawn, rng.choice(tools)))
    return Tree(_system(rng), tuple(tool.schema for tool in tools), tuple(branches))


def _extraction_tree(drawn: Source) -> Tree:
    """Draw a tree of conversations that end with a call of an output tool. In some trees, a few call a helper tool
    first."""
    rng = drawn.rng
    output = extraction_tool(rng)
    helpers = drawn.tools(rng.choice((0, 0, 1, 1))) if output.name == "final_result" else []
    branches = [_conversation(*ask(drawn, output)) for _ in range(rng.choice((4, 5)))]
    branches += [_chained(drawn, helper, output) for helper in helpers for _ in range(3)]
    tools = [*helpers, output]
    return Tree(_system(rng), tuple(tool.schema for tool in tools), tuple(branches))


def _called(drawn: Source, tool: Tool) -> Conversation:
    """Draw a conversation: a user's request and the assistant's call of `tool`, in half of the cases followed by a
    result and an answer in words."""
    messages = ask(drawn, tool)
    return _conversation(*(told(drawn, messages) if drawn.rng.random() < 0.5 else messages))


def _twice(drawn: Source, tool: Tool) -> Conversation:
    """Draw a conversation with a call of `tool`, its result and an answer, and a second request, for a second call or
    for an answer in words."""
    result, words = _result(drawn)  # drawn before the request: the seed gives the committed adapter's conversations
    first = [*ask(drawn, tool), _tool_result(result), _turn("assistant", words)]
    return _conversation(*first, *(ask(drawn, tool) if drawn.rng.random() < 0.7 else plain(drawn).messages))


def _chained(drawn: Source, helper: Tool, output: Tool) -> Conversation:
    """Draw a conversation in which the result of a helper tool becomes the arguments of the output tool."""
    text, arguments = helper.ask(drawn.values)
    _, answer = output.ask(drawn.values)
    result = json.dumps(answer) if drawn.rng.random() < 0.5 else _spelled(answer)
    return _conversation(
        _turn("user", text), _call(helper.name, arguments), _tool_result(result), _call(output.name, answer)
    )


def plain(drawn: Source) -> Conversation:
    """Draw from `drawn` a conversation: a question that needs none of its tools, and its answer in words."""
    question, answer = drawn.rng.choice(drawn.plain)
    return _conversation(_turn("user", question), _turn("assistant", answer))


def ask(drawn: Source, tool: Tool) -> list[Message]:
    """Draw from `drawn` a request for `tool`. Return the user's message and the assistant's with the right call."""
    text, arguments = tool.ask(drawn.values)
    return [_turn("user", text), _call(tool.name, arguments)]


def told(drawn: Source, messages: list[Message]) -> list[Message]:
    """Return `messages`, which end with a tool call, extended by a result drawn from `drawn` and an answer in words."""
    result, words = _result(drawn)
    return [*messages, _tool_result(result), _turn("assistant", words)]


def call_of(message: Message) -> tuple[str, Json]:
    """Return the name and arguments of a message's only tool call."""
    function = message["tool_calls"][0]["function"]
    return function["name"], function["arguments"]


def _result(drawn: Source) -> tuple[str, str]:
    """Draw a tool's result from `drawn`. Return its text and the answer that states it in words."""
    rng, values = drawn.rng, drawn.values
    draw = rng.random()
    if draw < 0.4:
        fields = rng.sample(RESULT_FIELDS, rng.choice((1, 2, 2, 3)))
        result = {name: values.draw(kind).json for name, kind in fields}
        return json.dumps(result), _spelled(result)
    if draw < 0.75:
        text = _filled(rng.choice(PLAIN_RESULTS), values)
        return (text, text) if rng.random() < 0.7 else (text.rstrip("."), text)
    bare = values.draw(rng.choice(BARE_RESULTS)).text
    return bare, f"The result is {bare}."


def _spelled(result: Json) -> str:
    parts = [f"the {name.replace('_', ' ')} is {_text(value)}" for name, value in result.items()]
    joined = ", ".join(parts[:-1]) + (" and " if parts[1:] else "") + "".join(parts[-1:]) or "there is no result"
    return f"{joined[0].upper()}{joined[1:]}."


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _filled(text: str, values: Values) -> str:
    head, brace, rest = text.partition("{")
    kind, _, tail = rest.partition("}")
    return head + values.draw(kind).text + _filled(tail, values) if brace else head


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None


def _call(name: str, arguments: Json) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _tool_result(content: str) -> Message:
    return {"role": "tool", "content": content}


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _conversation(*messages: Message) -> Conversation:
    return Conversation(messages)
