"""Compiles chat templates and runs them in Jinja's sandbox, with what Hugging Face documents for them:

https://huggingface.co/docs/transformers/chat_templating_writing. Models bring their templates, so that a template is
code of a stranger: it sees only data of JSON's types, and may change none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message in which callers send its reasoning. Templates read the first or, as gpt-oss's, the second."""
OPEN_END = "[the answer continues here] "
"""Stands at the end of the message that is continued while the template runs, to find that place in the text. It ends
with a space, which shows whether the template strips the message."""


def run_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Return the text that a chat template makes of messages, as transformers' `apply_chat_template` does.

    Args:
        source: the template.
        messages: fields whose value is None are left out.
        tools: in the format of the OpenAI API. Without tools, the template's `tools` is none.
        variables: further variables of the template, such as `bos_token`.
        add_generation_prompt: end the text with the beginning of an assistant's message.
        continue_final_message: end the text with the content of the last message, which stays open.

    Raises:
        ValueError: there are no messages, or the last one cannot be continued.
        Exception: whatever the template raises, which includes jinja2's TemplateError.
    """
    chat = [_readable(message) for message in messages]
    if not chat:
        raise ValueError("a chat needs at least one message")
    last = _mark_end(chat[-1]) if continue_final_message else ""
    text = compile_template(source).render(
        messages=chat,
        tools=_plain(tools) or None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **_plain(variables or {}),
    )
    return _up_to_mark(text, last) if continue_final_message else text


@lru_cache
def compile_template(source: str) -> Template:
    """Compile a chat template, and replace the `ChainMap` of its globals by a `dict`: Jinja copies the globals for each
    rendering, which takes 9 of the 30 us of a short chat with a `ChainMap`, and a tenth of that with a `dict`. Raises
    jinja2's TemplateError if the template is not valid."""
    compiled = _environment().from_string(source)
    compiled.globals = dict(compiled.globals)
    return compiled


def _readable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message as templates read it: without fields that are None, and with its reasoning in the
    fields that templates read it from."""
    fields: dict[str, Any] = {name: _plain(value) for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return a copy of a value in which every mapping is a dict and every sequence a list. Raises TypeError if a part
    is of none of JSON's types: a template could call its methods."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    raise TypeError(f"a chat template cannot read a {type(value).__name__}")


def _mark_end(message: dict[str, Any]) -> str:
    """Append `OPEN_END` to the text of a message, or to its last part that is text. Returns that text without the mark.
    Raises ValueError if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + OPEN_END
        return content
    for part in reversed(content or ()):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + OPEN_END
            return text
    raise ValueError("the last message has no text that could be continued")


def _up_to_mark(text: str, last: str) -> str:
    """Return a rendered text up to `OPEN_END`. If the template has stripped the message `last`, which ended there, the
    text is stripped, too. Raises ValueError if the template has left out the message or its end."""
    at = text.rfind(OPEN_END.strip())
    if at < 0 or last.strip() not in text:
        raise ValueError("the template leaves out the message that is to be continued")
    return text[:at] if text.startswith(OPEN_END, at) else text[:at].rstrip()


class _Generation(Extension):
    """The block `generation`, which marks an assistant's words for trainers and is rendered like its content."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """The template's `dict`: makes dicts, and is not the type itself, whose other attributes it hides."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, names: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


class _Namespace(Namespace):
    """The template's `namespace`, which refuses attributes that begin with an underscore: Python's own do."""

    def __init__(self, /, *items: Any, **named: Any) -> None:
        attributes = dict(*items, **named)
        for name in attributes:
            _check_attribute(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot have the attribute {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON. Jinja's own `tojson` would escape what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment
