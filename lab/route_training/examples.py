"""Reads the lines of a training file: requests, and what is known of the two members' answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.core.errors import ApiError
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import parse
from gateway.requests.prompt_features import prompt_facts
from gateway.virtual_models.features import PromptFacts

MOST_LINE_BYTES = 1 << 20
MOST_EXAMPLES = 100_000
LABELS = ("small_suffices", "small_score", "large_score", "small_answer", "large_answer")
"""Fields of a line beside the request's body."""

Json = dict[str, Any]


class Label(Struct, frozen=True):
    """How good both members' answers to a request are. Scores may have any scale."""

    small: float
    large: float

    @property
    def suffices(self) -> bool:
        return self.small >= self.large


class Example(Struct, frozen=True):
    """A request of the training file."""

    body: Json
    facts: PromptFacts
    label: Label | None
    """None means that the file does not say; both members must be asked."""

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body


def read_examples(path: Path) -> list[Example]:
    """Return the examples of a file in order, each prompt once: with a repetition, a router would be measured with
    prompts that it was trained with. Raises OSError, and ValueError naming the line, if the file cannot be used."""
    examples: dict[bytes, Example] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if len(line) > MOST_LINE_BYTES or len(examples) >= MOST_EXAMPLES:
                limit = f"lines of {MOST_LINE_BYTES >> 20} MiB" if len(line) > MOST_LINE_BYTES else MOST_EXAMPLES
                raise ValueError(f"{path}, line {number}: at most {limit} are read")
            try:
                example = read_example(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            examples.setdefault(_identity(example), example)
    return list(examples.values())


def read_example(line: bytes) -> Example:
    """Return the example in a line of a training file. Raises ValueError if it is no request or its labels are
    invalid."""
    try:
        document = msgspec.json.decode(line, type=Json)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON object: {error}") from error
    labels = {name: document.pop(name) for name in LABELS if name in document}
    body = document.get("body", document)
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    body = {**body, "model": str(body.get("model") or "model")}
    return Example(body, _facts(body), _label(labels))


def unlabelled(examples: Sequence[Example]) -> Iterator[int]:
    """Yield the numbers of the examples for which the members must be asked."""
    return (number for number, example in enumerate(examples) if example.label is None)


def _facts(body: Json) -> PromptFacts:
    encoded = msgspec.json.encode(body)
    try:
        if "messages" in body:
            return prompt_facts(chat_request(parse(encoded, ChatRequest), "training"))
        request = completion_request(parse(encoded, CompletionRequest), "training")
    except ApiError as error:
        raise ValueError(error.message) from error
    if len(request.prompts) != 1:
        raise ValueError("prompt must be one prompt, not a list")
    return prompt_facts(request)


def _label(labels: Mapping[str, Any]) -> Label | None:
    suffices = labels.get("small_suffices")
    scores = [labels.get(name) for name in ("small_score", "large_score")]
    if suffices is None and scores == [None, None]:
        return None
    if suffices is not None and scores != [None, None]:
        raise ValueError("give either small_suffices, or small_score and large_score")
    if suffices is not None:
        if not isinstance(suffices, bool):
            raise ValueError("small_suffices must be true or false")
        return Label(float(suffices), 1.0)
    small, large = map(_score, scores)
    return Label(small, large)


def _score(value: Any) -> float:
    """Return a score of a label. Raises ValueError if it is no number, or too large for one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("small_score and large_score must both be numbers")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("small_score and large_score must be numbers of float64") from error


def _identity(example: Example) -> bytes:
    """Return a key that is equal for two examples if their prompts are."""
    body = example.body
    return msgspec.json.encode([body.get(name) for name in ("messages", "prompt", "tools", "response_format")])
