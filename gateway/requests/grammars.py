"""Determines the grammar that answers must follow: the request's own, one for its tool calls, or one for both."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.job import Reason
from engine.grammar_check.pool import GrammarPool
from engine.grammar_check.source import MAX_CHARACTERS
from gateway.core.errors import ApiError, Fault, invalid_request, unavailable, unsupported_parameter
from gateway.requests.types import Chat, GenerateRequest
from gateway.text.reasoning.grammar import TokenOf, after_reasoning
from gateway.text.reasoning.parser import Thinking
from gateway.text.tools.dialect import Dialect
from gateway.text.tools.frame import CallFrame
from gateway.text.tools.grammar import UnwritableTool, arguments_schema, tool_grammar

RETRY_SECONDS = 1.0
"""Seconds after which a caller whose grammar could not be checked is told to retry."""


class Constraints:
    """Determines and checks the grammar of a request's answers, before the gateway reserves tokens for the request."""

    def __init__(self, token_of: TokenOf, pool: GrammarPool) -> None:
        """`token_of` returns the id of the token that equals a text, or None: grammars name the marks of reasoning and
        tool calls by their tokens. `pool` checks callers' grammars by compiling them in child processes; it is not
        closed here."""
        self._token_of = token_of
        self._pool = pool

    async def with_checked_grammar(
        self, tenant: str, request: GenerateRequest, dialect: Dialect | None, thinking: Thinking | None = None
    ) -> GenerateRequest:
        """Return the request with the grammar that its answers follow: its own, one for its tool calls in `dialect`, or
        one for both; no dialect means that tools need none. `thinking` says how the answers' reasoning begins, after
        which the grammar applies; None means that there is none.

        The engine checks the grammar again with the model's vocabulary. It refuses faults that only the vocabulary
        reveals, with the same message.

        Raises:
            ApiError: INVALID_REQUEST (a grammar is faulty, or comes with ignore_eos), UNSUPPORTED_PARAMETER (the own
                grammar and tool calls cannot be combined), RATE_LIMIT_EXCEEDED (the tenant has too many grammars
                waiting), ENGINE_UNAVAILABLE (the grammar could not be checked).
        """
        own, chat = request.sampling.grammar, request.offering
        if own is not None:
            await self._check(tenant, own, request.fields.grammar)
        if chat is not None and dialect is not None:
            request = await self._with_calls(tenant, request, chat, dialect.frame, thinking)
        if thinking is not None and own is not None and request.sampling.grammar is own:
            grammar = after_reasoning(own, thinking, self._token_of)
            await self._check(tenant, grammar, request.fields.grammar)
            request = replace(request, sampling=request.sampling._replace(grammar=grammar))
        if request.sampling.grammar and request.sampling.ignore_eos:
            message = f"{request.fields.grammar} says where an answer ends: not with ignore_eos"
            raise invalid_request(message, "ignore_eos")
        return request

    async def _with_calls(
        self, tenant: str, request: GenerateRequest, chat: Chat, frame: CallFrame, thinking: Thinking | None
    ) -> GenerateRequest:
        """Return the request with a checked grammar of tool calls if calls are required, tools are strict or the
        request has its own grammar, which then governs answers without calls; otherwise return it unchanged."""
        rule, grammar = chat.rule, request.sampling.grammar
        answer = None if rule.must_call or grammar is None else _answer_schema(request, frame)
        if not (rule.must_call or rule.strict or answer):
            return request
        for number, tool in enumerate(chat.tools):
            if not rule.allows(tool["function"]["name"]):
                continue
            schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(arguments_schema(tool, rule)))
            await self._check(tenant, schema, f"tools[{number}].function.parameters")
        try:
            grammar = tool_grammar(frame, chat.tools, rule, self._token_of, answer, thinking)
        except UnwritableTool as error:
            field = f"tools[{error.number}].function.parameters"
            raise invalid_request(f"{field} cannot be followed: {error}", field) from error
        await self._check(tenant, grammar, "tools")
        fields = replace(request.fields, grammar="tools")
        return replace(request, sampling=request.sampling._replace(grammar=grammar), fields=fields)

    async def _check(self, tenant: str, grammar: Grammar, field: str) -> None:
        if (length := len(grammar.text)) > MAX_CHARACTERS:  # before the text is hashed and sent to a worker
            raise invalid_request(f"{field} is {length} characters long, and may have {MAX_CHARACTERS}", field)
        verdict = await asyncio.wrap_future(self._pool.submit(tenant, grammar))
        if verdict.reason is Reason.QUEUE:
            raise ApiError(Fault.RATE_LIMIT_EXCEEDED, verdict.message, field, RETRY_SECONDS)
        if verdict.reason is Reason.UNDECIDED:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, verdict.message, RETRY_SECONDS)
        if verdict.reason is not None:
            raise invalid_request(f"{field} cannot be followed: {verdict.message}", field)


def _answer_schema(request: GenerateRequest, frame: CallFrame) -> dict[str, Any]:
    """Return the JSON schema in the request's own grammar, which an answer without tool calls follows. Raises ApiError:
    UNSUPPORTED_PARAMETER, the grammar is no JSON schema or the dialect has no mark for tool calls."""
    grammar, field = request.sampling.grammar, request.fields.grammar
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA or not frame.mark:
        raise unsupported_parameter(field, "is not supported together with tools that may be called")
    schema: dict[str, Any] = msgspec.json.decode(grammar.text)
    return schema
