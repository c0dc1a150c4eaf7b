"""What the answers to a request must match: a grammar of its own, that of the calls it has to make, or of both."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.core.grammars import Grammar, GrammarKind
from engine.grammar_source import objection
from gateway.core.errors import invalid_request, unsupported_parameter
from gateway.generation import Chat, GenerateRequest
from gateway.tools.dialects import Dialect, Frame
from gateway.tools.grammar import TokenOf, arguments_schema, tool_grammar

KEPT = 256
"""Grammars that were found sound and are not looked at again."""
THREADS = 2
"""In which grammars are looked at. Of their own, so that nothing else waits for a hostile one, nor it for anything."""


class Constraints:
    """What is wrong with a grammar whatever the model is told here, before anything is reserved for the request."""

    def __init__(self, token_of: TokenOf) -> None:
        self._token_of = token_of
        self._sound: dict[Grammar, None] = {}
        """The one found longest ago first."""
        self._threads = ThreadPoolExecutor(THREADS, "grammar-check")

    async def settle(self, request: GenerateRequest, dialect: Dialect | None) -> GenerateRequest:
        """The request with the grammar that its answers follow.

        What only a model's tokens can tell, the engine refuses later, in the same words.

        Raises:
            ApiError: INVALID_REQUEST, UNSUPPORTED_PARAMETER.
        """
        if request.sampling.grammar is not None:
            await self._check(request.sampling.grammar, request.grammar_field or "")
        chat = request.offering
        if chat is not None and dialect is not None:
            request = await self._with_calls(request, chat, dialect.frame)
        if request.sampling.grammar and request.sampling.ignore_eos:
            message = f"{request.grammar_field} says where an answer ends: not with ignore_eos"
            raise invalid_request(message, "ignore_eos")
        return request

    async def _with_calls(self, request: GenerateRequest, chat: Chat, frame: Frame) -> GenerateRequest:
        """Text that has a grammar of its own, calls that are required, strict tools: each needs one for both."""
        rule, grammar = chat.rule, request.sampling.grammar
        answer = None if rule.must_call or grammar is None else _answer_schema(request, frame)
        if not (rule.must_call or rule.strict or answer):
            return request
        for number, tool in enumerate(chat.tools):
            if not rule.allows(tool["function"]["name"]):
                continue
            schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(arguments_schema(tool, rule)))
            await self._check(schema, f"tools[{number}].function.parameters")
        grammar = tool_grammar(frame, chat.tools, rule, self._token_of, answer)
        await self._check(grammar, "tools")
        return replace(request, sampling=request.sampling._replace(grammar=grammar), grammar_field="tools")

    async def _check(self, grammar: Grammar, field: str) -> None:
        if grammar in self._sound:
            return
        if why := await asyncio.get_running_loop().run_in_executor(self._threads, objection, grammar):
            raise invalid_request(f"{field} cannot be followed: {why}", field)
        self._sound[grammar] = None
        if len(self._sound) > KEPT:
            del self._sound[next(iter(self._sound))]


def _answer_schema(request: GenerateRequest, frame: Frame) -> dict[str, Any]:
    """Of an answer that makes no call. Raises ApiError: UNSUPPORTED_PARAMETER."""
    grammar, field = request.sampling.grammar, request.grammar_field or ""
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA or not frame.mark:
        raise unsupported_parameter(field, "is not supported together with tools that may be called")
    schema: dict[str, Any] = msgspec.json.decode(grammar.text)
    return schema
