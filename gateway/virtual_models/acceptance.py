"""Tests that decide whether the answer of a cascade's small member is good enough."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.core.messages.grammar import Grammar, GrammarKind

QUESTION, ANSWER = "{question}", "{answer}"


@dataclass(frozen=True, slots=True)
class Verifier:
    """A model or adapter that judges an answer. Raises ValueError if the prompt lacks the answer."""

    member: str
    prompt: str
    """The user message of the judgement, in which {question} and {answer} stand for the last user message and the
    answer."""
    accept: str = "yes"
    """The answer is accepted if the judgement's first token is this word or its beginning, in any case."""

    def __post_init__(self) -> None:
        if ANSWER not in self.prompt:
            raise ValueError(f"verifier.prompt must contain {ANSWER}")
        if not self.accept.strip():
            raise ValueError("verifier.accept must not be empty")

    def question(self, question: str, answer: str) -> str:
        """Return the user message of a judgement: `prompt` with `question` and `answer` filled in. A placeholder that
        occurs in these texts themselves is not replaced."""
        head, _, tail = self.prompt.partition(ANSWER)
        return head.replace(QUESTION, question) + answer + tail.replace(QUESTION, question)

    def accepts(self, first_token: str) -> bool:
        word = first_token.strip().casefold()
        return bool(word) and self.accept.strip().casefold().startswith(word)


class HeldAnswer(NamedTuple):
    """One complete answer, held back while the tests of a cascade judge it."""

    text: str
    finish: str
    """Finish reason, `tool_calls` if the answer calls tools."""
    logprobs: Sequence[float] = ()
    """Log probability of each output token, in nats."""
    calls: Sequence[tuple[str, str]] = ()
    """Name and arguments, as JSON text, of each tool call."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The tests that an answer must pass, all of them. Raises ValueError if there is none, or for a number out of
    range."""

    logprob: float | None = None
    """Least mean log probability of an output token, in nats, at most 0."""
    valid: bool = True
    """The answer must not be empty, and must have ended by itself. Under a JSON schema it must be JSON; tool calls must
    have objects as arguments."""
    agreement: bool = False
    """Two samples of the answer must agree."""
    agreement_temperature: float = 0.7
    """Least temperature of the second sample."""
    verifier: Verifier | None = None

    def __post_init__(self) -> None:
        if self.logprob is not None and not self.logprob <= 0:
            raise ValueError(f"accept.logprob must be at most 0, not {self.logprob}")
        if not 0 < self.agreement_temperature <= 2:
            raise ValueError(
                f"accept.agreement_temperature must be above 0 and at most 2, not {self.agreement_temperature}"
            )
        if not (self.valid or self.agreement or self.verifier or self.logprob is not None):
            raise ValueError("accept names no test")

    def failure(self, answers: Sequence[HeldAnswer], grammar: Grammar | None) -> str:
        """Return the first test that one of the answers to a request fails, of those that need no further
        computation: `invalid` or `logprob`. Empty means that they pass."""
        if self.valid and not all(is_valid(answer, grammar) for answer in answers):
            return "invalid"
        if self.logprob is not None and any(mean_logprob(answer.logprobs) < self.logprob for answer in answers):
            return "logprob"
        return ""

    def explain(self) -> str:
        tests = ["valid"] * self.valid + ["two samples agree"] * self.agreement
        if self.logprob is not None:
            tests.append(f"mean log probability of at least {self.logprob:g}")
        if self.verifier is not None:
            tests.append(f"{self.verifier.member} says {self.verifier.accept}")
        return ", ".join(tests)


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Return the mean log probability of an answer's tokens, in nats; minus infinity if there is none."""
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def is_valid(answer: HeldAnswer, grammar: Grammar | None) -> bool:
    """Return whether an answer is not empty and ended by itself, is JSON where the request's grammar is a JSON schema,
    and has JSON objects as arguments of its tool calls. The engine enforces the schema itself."""
    if answer.finish == "length":
        return False
    if answer.calls:
        return all(isinstance(_parsed(arguments), Mapping) for _, arguments in answer.calls)
    is_json = grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    return _parsed(answer.text) is not _NONE if is_json else bool(answer.text.strip())


def agree(first: HeldAnswer, second: HeldAnswer) -> bool:
    """Return whether two answers say the same: the same tool calls or, if neither has any, the same text."""
    if first.calls or second.calls:
        return _calls(first) == _calls(second)
    return _said(first.text) == _said(second.text)


_NONE = object()


def _parsed(text: str) -> Any:
    """Return the JSON value of a text, or _NONE if the text is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return _NONE


def _said(text: str) -> Any:
    """Return a key that is equal for texts that say the same: the JSON value of a text that is JSON, otherwise the text
    in lower case, with single spaces and without punctuation and quotes at both ends."""
    value = _parsed(text)
    return " ".join(text.split()).strip(" .!\"'`").casefold() if value is _NONE else value


def _calls(answer: HeldAnswer) -> list[tuple[str, Any]]:
    return [(name, _said(arguments)) for name, arguments in answer.calls]
