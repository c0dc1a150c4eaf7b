"""Protobuf messages made from their descriptors, and bytes that pose as such."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz import grammars
from tests.fuzz.values import MODELS, TEXTS, Values, api

MOST_DEPTH = 6
BODIES = {
    "create_response": "ResponsesRequest",
    "create_message": "MessagesRequest",
    "count_message_tokens": "CountTokensRequest",
}
"""Text fields that hold a JSON body, with its schema in the API's document."""
WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 5, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 5, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 5, 20, 128, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 5, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, 0.7, 1.0, -1.0, 1e38, float("nan"), float("inf")),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, 0.5, 1.0, -1.0, 1e308, float("nan"), float("-inf")),
}


def message_bytes(rng: Random, kind: Descriptor) -> bytes:
    """Return the bytes of a random message of this kind; one in ten is broken."""
    made = _message(rng, kind, 0).SerializeToString()
    if rng.random() < 0.9:
        return made
    at = rng.randrange(len(made) + 1)
    too_long = b"\x0a\xff\xff\xff\xff\x0f"
    return rng.choice((made[:at], made[:at] + rng.randbytes(3) + made[at:], rng.randbytes(40), too_long))


def _message(rng: Random, kind: Descriptor, depth: int) -> Message:
    message = GetMessageClass(kind)()
    few = min(1.0, 4 / max(1, len(kind.fields)))
    names = [field for field in kind.fields if field.number <= 2 or rng.random() < few]
    for field in names if depth < MOST_DEPTH else ():
        group = field.containing_oneof
        if group is None or message.WhichOneof(group.name) is None or rng.random() < 0.3:
            _fill(rng, message, field, depth)
    return message


def _fill(rng: Random, message: Any, field: FieldDescriptor, depth: int) -> None:
    many = range(rng.choice((0, 1, 1, 2, 3)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(rng, getattr(message, field.name), field.message_type, len(many), depth)
    elif field.message_type is not None:
        made, place = _message(rng, field.message_type, depth + 1), getattr(message, field.name)
        _ = place.extend([made] * len(many)) if field.is_repeated else place.CopyFrom(made)
    elif field.is_repeated:
        getattr(message, field.name).extend(_leaf(rng, field) for _ in many)
    else:
        setattr(message, field.name, _leaf(rng, field))


def _fill_map(rng: Random, target: Any, entry: Descriptor, count: int, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(count):
        if value.message_type is not None:
            target[_leaf(rng, key)].CopyFrom(_message(rng, value.message_type, depth + 1))
        else:
            target[_leaf(rng, key)] = _leaf(rng, value)


def _leaf(rng: Random, field: FieldDescriptor) -> Any:
    if field.name == "stall_timeout":
        return rng.choice((0.0, -1.0, 3600.0, 1e308, float("nan")))  # none so short that the call would end late
    if field.cpp_type in WHOLE:
        return rng.choice(WHOLE[field.cpp_type])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 10, 3_000)))
    return _text(rng, field.name).encode("utf-8", "replace").decode()


def _text(rng: Random, name: str) -> str:
    if name in BODIES and rng.random() < 0.9:
        values = Values(rng, api()["components"]["schemas"], rng.choice((0.0, 0.0, 0.02, 0.3)))
        return json.dumps(values.of({"$ref": f"#/{BODIES[name]}"}))
    match name:
        case "model":
            return rng.choice(MODELS)
        case "role":
            return rng.choice(("user", "user", "assistant", "system", "tool", ""))
        case "json" | "parameters":
            return grammars.schema_text(rng)
        case "regex":
            return grammars.regex(rng)
        case "grammar":
            return grammars.context_free(rng)
    return rng.choice(TEXTS)
