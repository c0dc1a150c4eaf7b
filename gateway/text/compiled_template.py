"""Compiles chat templates, which run in transformers' sandbox, and renders chats with them. Each model keeps its own:
transformers drops some of many and compiles them anew, in 8 to 70 ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from gateway.text.chat_template import REFUSALS, Message, TemplateOptions, ToolSchema
from gateway.text.counted_template import with_bounds
from gateway.text.template_bounds import BoundedEnvironment, bounded_environment
from gateway.text.template_budget import TooCostly
from gateway.text.template_constants import check_constants
from gateway.text.template_json import to_json

END = "loralane-end-of-the-last-message "
"""Marks where the last message ends in the text of a chat that continues it. Its space tells whether the template has
removed the white space there."""


BEGINNING = 60
"""Characters of a template by which messages name it."""


@cache
def _environment() -> BoundedEnvironment:
    """Return the environment in which transformers compiles templates, with bounds and a `tojson` that takes breaks."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # Imported here: it takes 0.7 s.

    environment = _compile_jinja_template.__wrapped__("").environment  # of this template alone
    environment.filters["tojson"] = to_json
    return bounded_environment(environment)


class ChatTemplate:
    """A chat template, compiled."""

    def __init__(self, source: str) -> None:
        """Compile a template, which takes milliseconds. Raises ValueError, which says where, if it is no valid Jinja or
        takes too long to compile."""
        try:
            check_constants(_environment(), source)
            self._compiled = _environment().from_string(with_bounds(_environment().parse(source)))
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        except (*REFUSALS, SyntaxError, MemoryError) as error:  # what Python cannot compile, such as too deep a nesting
            raise ValueError(str(error) or type(error).__name__) from error
        # Jinja copies the globals for each rendering, which takes 9 of the 30 us of a short chat with its `ChainMap`.
        self._compiled.globals = dict(self._compiled.globals)
        self._beginning = source[:BEGINNING]

    def render(
        self,
        tokens: Mapping[str, str],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        options: TemplateOptions,
    ) -> str:
        """Return the text of a chat, as transformers does. `tokens` are the special tokens that the template may write,
        such as `bos_token`. Raises one of REFUSALS if it cannot render the chat; TooCostly, which names the template,
        if that would take too long or too much memory."""
        if not messages:
            raise ValueError("there are no messages")
        chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
        tools = list(tools)
        write = self._writer(tools, options, tokens)
        try:
            with _environment().rendering(_parts(tools, chat)):
                return _continued(chat, write) if options.continue_final_message else write(chat)
        except TooCostly as error:
            message = f"{error}, in the template that begins with {self._beginning!r}"
        raise TooCostly(message)

    def _writer(
        self, tools: Sequence[ToolSchema], options: TemplateOptions, tokens: Mapping[str, str]
    ) -> Callable[[list[Message]], str]:
        """Return a function that renders messages with the other values that a template reads."""
        values = {**tokens, **options.variables}
        values |= {"tools": tools or None, "documents": None}
        values["add_generation_prompt"] = options.add_generation_prompt
        return lambda chat: str(self._compiled.render(messages=chat, **values))


def _parts(tools: Sequence[ToolSchema], chat: list[Message]) -> list[Any]:
    """Return the tools, the calls, and what templates write of them as JSON."""
    lists = [tools, *(message["tool_calls"] for message in chat if "tool_calls" in message)]
    several = [one for some in lists for one in some if isinstance(one, Mapping)]
    functions = [one["function"] for one in several if isinstance(one.get("function"), dict)]
    inner = [one[name] for one in functions for name in ("parameters", "arguments") if isinstance(one.get(name), dict)]
    return [*lists, *several, *functions, *inner]


def _continued(chat: list[Message], write: Callable[[list[Message]], str]) -> str:
    """Return the text of a chat up to the end of its last message. Raises ValueError if that message has no text, or
    the template changes it."""
    last = chat[-1]
    said = last.get("content")
    if not isinstance(said, str):
        raise ValueError("the last message has no text that could be continued")
    text, mark, after = write([*chat[:-1], {**last, "content": said + END}]).rpartition(END.strip())
    if not mark or said.strip() not in text:
        raise ValueError("the last message does not appear in the chat as it is, and so cannot be continued")
    return text if after.startswith(" ") else text.rstrip()
