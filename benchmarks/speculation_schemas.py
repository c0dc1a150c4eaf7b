"""Time per JSON answer, by many schemas, without and with proposed tokens; part of `make bench-speculation`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from benchmarks.runner import Run, in_turn
from benchmarks.speculation_pair import Pair
from benchmarks.speculation_prompts import CHAT
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import Request, SamplingParams

MOST = 512
"""Maximum number of tokens of an answer, more than any of the schemas allows."""
THINGS = ("a lamp", "a train journey", "a song", "a small bakery", "a bicycle", "a village", "a cat", "a film")
FIELDS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "maxLength": 24},
    "summary": {"type": "string", "maxLength": 48},
    "identifier": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "released_on": {"type": "string", "pattern": "^(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-2][0-9]$"},
    "colour": {"enum": ["red", "green", "blue", "black", "white"]},
    "status": {"enum": ["new", "in use", "retired"]},
    "price_in_euros": {"type": "integer", "minimum": 1, "maximum": 99_999},
    "rating": {"type": "number", "minimum": 0, "maximum": 5, "multipleOf": 0.5},
    "is_available": {"type": "boolean"},
    "owner": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 20}]},
    "keywords": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
}


@dataclass(frozen=True, slots=True)
class Answers:
    """Results of the answers to all schemas of one kind: the first ones by their schemas, or the second ones."""

    name: str
    count: int
    valid_off: int
    valid_auto: int
    """Answers that ended and match their schemas, without and with proposals."""
    equal: int
    """Answers that are the same with and without."""
    tokens: float
    """Mean number of tokens of an answer."""
    off_seconds: float
    auto_seconds: float
    """Median seconds of an answer, without and with proposals."""
    ratio: float
    """Seconds of all answers without proposals over those with them."""


def make_schemas(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return schemas of objects with three to six fields, one of which may be an object or an array of objects."""
    rng = Random(seed)
    return [_object(rng, rng.randint(3, 6), nested=True) for _ in range(count)]


def _object(rng: Random, size: int, *, nested: bool) -> dict[str, Any]:
    names = rng.sample(sorted(FIELDS), size)
    properties = {name: FIELDS[name] for name in names}
    if nested and rng.random() < 0.5:
        part = _object(rng, 2, nested=False)
        is_list = rng.random() < 0.5
        properties["parts" if is_list else "maker"] = (
            {"type": "array", "items": part, "maxItems": 2} if is_list else part
        )
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def measure(run: Run, pair: Pair, tokenizer: Tokenizer, count: int) -> None:
    """Have each schema answered once, then a fifth of them again about something else, with and without proposals, in
    turn."""
    schemas = make_schemas(count)
    pair.run("off", [_request(tokenizer, "warm", schemas[0], 7)])
    pair.run("auto", [_request(tokenizer, "warm", schemas[0], 7)])
    kinds = (("first", schemas, 0), ("second", schemas[: max(1, count // 5)], 1))
    results = [_answers(run, pair, tokenizer, *kind) for kind in kinds]
    run.show((), results)
    for one in results:
        print(
            f"{one.name} answers by {one.count} schemas: valid {one.valid_off} and {one.valid_auto}, equal {one.equal},"
            f" {one.tokens:.0f} tokens, {one.off_seconds:.3f} s and {one.auto_seconds:.3f} s (all: {one.ratio:.2f})"
        )


def _answers(
    run: Run, pair: Pair, tokenizer: Tokenizer, name: str, schemas: Sequence[dict[str, Any]], turn: int
) -> Answers:
    seconds: dict[str, list[float]] = {"off": [], "auto": []}
    answers: dict[str, list[list[int]]] = {"off": [], "auto": []}
    for number, schema in enumerate(run.track(schemas, f"{name} answers")):
        request = _request(tokenizer, f"{name}-{number}", schema, number + 3 * turn)
        for way in in_turn(("auto", "off"), number):
            taken, found = pair.run(way, [request])
            seconds[way].append(taken)
            answers[way].append(found[request.id])
    valid = {
        way: sum(_is_valid(tokenizer.decode(one), schema) for one, schema in zip(found, schemas, strict=True))
        for way, found in answers.items()
    }
    return Answers(
        name,
        len(schemas),
        valid["off"],
        valid["auto"],
        sum(off == auto for off, auto in zip(answers["off"], answers["auto"], strict=True)),
        statistics.mean(map(len, answers["auto"])),
        statistics.median(seconds["off"]),
        statistics.median(seconds["auto"]),
        sum(seconds["off"]) / sum(seconds["auto"]),
    )


def _request(tokenizer: Tokenizer, name: str, schema: dict[str, Any], number: int) -> Request:
    fields = ", ".join(schema["properties"])
    text = CHAT.format(f"Invent {THINGS[number % len(THINGS)]} and describe it in JSON, with the fields {fields}.")
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return Request(name, tokens, SamplingParams(MOST, temperature=0.0, grammar=grammar))


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
