"""Every field of every message that a gRPC method takes, and the ways in which its bytes grow.

Bytes are written here rather than by protobuf, as no library would write what is worth a trial.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.growth.json_fields import json_fields
from tests.fuzz.growth.values import GROWTHS, MERSENNE, TEXTS, Shape
from tests.fuzz.messages import BODIES

VARINT, FIXED64, BYTES, GROUP, END_GROUP, FIXED32 = 0, 1, 2, 3, 4, 5
WIRE = {
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_FIXED64: FIXED64,
    FieldDescriptor.TYPE_SFIXED64: FIXED64,
    FieldDescriptor.TYPE_FIXED32: FIXED32,
    FieldDescriptor.TYPE_SFIXED32: FIXED32,
    FieldDescriptor.TYPE_STRING: BYTES,
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_MESSAGE: BYTES,
}
"""How the values of types are written, but for those written as varints."""
VALUES: Mapping[str, str] = {"model": "tiny", "role": "user", "parameters": "{}", "json": "{}", "arguments": "{}"}
NEEDED: Mapping[str, tuple[str, ...]] = {"ChatMessage": ("role", "content"), "CreateFileRequest": ()}
"""Names of the text fields that valid messages of a kind have, where that is not all of them."""
INPUTS = ("chat", "prompt", "prompt_ids")
MOST_DEPTH = 6
Wrap = Callable[[bytes], bytes]
"""Puts the bytes of a field into a whole message around it."""
ProtoGrowth = Callable[[int], bytes]
"""Makes the bytes of a field, its tag among them."""


@dataclass(frozen=True)
class ProtoField:
    """One field of what a method takes."""

    path: str
    kind: str
    """As in ChatMessage.content."""
    growths: Mapping[str, ProtoGrowth]
    around: Wrap


def proto_fields(method: MethodDescriptor) -> list[ProtoField]:
    """Return all fields of a method's messages, and one without a name for fields that no message knows."""
    return list(_fields(method.input_type, "", (), lambda data: data))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def prefixed(number: int, data: bytes) -> bytes:
    """Return a field of text, bytes or a message."""
    return tag(number, BYTES) + varint(len(data)) + data


def _fields(kind: Descriptor, path: str, above: tuple[str, ...], around: Wrap) -> Iterator[ProtoField]:
    valid = _valid(kind)
    yield ProtoField(path, f"{kind.name} (unknown)", _unknown_growths(kind), lambda data: around(valid + data))
    for field in kind.fields:
        here = f"{path}.{field.name}".lstrip(".")
        base = b"" if field.containing_oneof is not None and field.name in INPUTS else valid

        def wrap(data: bytes, base: bytes = base, kind: Descriptor = kind) -> bytes:
            return around((base or _valid(kind, without_input=True)) + data)

        yield ProtoField(here, f"{kind.name}.{field.name}", _growths(field), wrap)
        if field.name in BODIES:
            yield from _body_fields(field, here, wrap)
        inner = field.message_type
        if inner is not None and above.count(inner.name) < 1 and len(above) < MOST_DEPTH:
            number = field.number
            yield from _fields(inner, here, (*above, inner.name), lambda data, n=number, w=wrap: w(prefixed(n, data)))


def _valid(kind: Descriptor, without_input: bool = False) -> bytes:
    """Return a small message with the fields that most messages of this kind need."""
    message = GetMessageClass(kind)()
    if kind.name == "GenerateRequest":
        message.sampling.max_tokens = 4
        if not without_input:
            message.prompt = "hi"
    if kind.name == "Chat":
        message.messages.add(role="user", content="hi")
        return bytes(message.SerializeToString())
    for field in kind.fields:
        text = field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated and field.containing_oneof is None
        if text and field.name in NEEDED.get(kind.name, (field.name,)):
            setattr(message, field.name, VALUES.get(field.name, "a"))
    return bytes(message.SerializeToString())


def _growths(field: FieldDescriptor) -> dict[str, ProtoGrowth]:
    number = field.number
    if field.message_type is not None:
        return _message_growths(number, field.message_type)
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text_growths(number)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"zero bytes": lambda size: prefixed(number, bytes(size)), **_again(prefixed(number, b"a"))}
    return _number_growths(number, WIRE.get(field.type, VARINT))


def _again(one: bytes) -> dict[str, ProtoGrowth]:
    """Return the growth by count: the field again and again."""
    return {"many": lambda size: one * (size // len(one) + 1)}


def _text_growths(number: int) -> dict[str, ProtoGrowth]:
    grown: dict[str, ProtoGrowth] = {
        "not UTF-8": lambda size: prefixed(number, b"\xff" * size),
        **_again(prefixed(number, b"a")),
        "many empty": lambda size: prefixed(number, b"") * (size // 2 + 1),
    }
    for way in TEXTS:
        grown[way] = lambda size, g=GROWTHS[way]: prefixed(number, _plain(g(size, Shape())))
    return grown


def _plain(text: str) -> bytes:
    """Return the bytes of a text field for a growth: what a JSON text says, and any other JSON as it is."""
    try:
        return str(json.loads(text)).encode("utf-8", "replace") if text.startswith('"') else text.encode()
    except ValueError:
        return text.encode()


def _body_fields(field: FieldDescriptor, path: str, wrap: Wrap) -> Iterator[ProtoField]:
    """Yield the fields of the JSON body that a text field holds."""
    for inner in json_fields({"$ref": f"#/{BODIES[field.name]}"}):
        growths = {
            way: lambda size, f=inner, g=GROWTHS[way]: prefixed(
                field.number, f.grown(g(size, f.shape)).encode("utf-8", "replace")
            )
            for way in inner.growths
        }
        yield ProtoField(f"{path}: {inner.path}", f"{field.name}: {inner.kind}", growths, wrap)


def _number_growths(number: int, wire: int) -> dict[str, ProtoGrowth]:
    one = {VARINT: b"\x05", FIXED32: b"\x00\x00\x80\x3f", FIXED64: bytes(6) + b"\xf0\x3f"}[wire]
    grown = {
        **_again(tag(number, wire) + one),
        "packed": lambda size: prefixed(number, one * (size // len(one) + 1)),
        "packed, large": lambda size: prefixed(
            number, (varint(2**32 - 1) if wire == VARINT else b"\x7f" * len(one)) * (size // 8 + 1)
        ),
    }
    if wire == VARINT:
        grown["packed, colliding"] = lambda size: prefixed(
            number, b"".join(varint(MERSENNE * (1 + step % 7)) for step in range(size // 10 + 1))
        )
        grown["packed, different"] = lambda size: prefixed(number, b"".join(map(varint, range(size // 3))))
        grown["an endless number"] = lambda size: tag(number, wire) + b"\xff" * size
    return grown


def _message_growths(number: int, kind: Descriptor) -> dict[str, ProtoGrowth]:
    if kind.GetOptions().map_entry:
        key = kind.fields_by_name["key"]
        return {"entries": lambda size: _entries(number, key, size), **_again(prefixed(number, b""))}
    one = prefixed(number, _valid(kind))
    return {
        **_again(one),
        "many empty": lambda size: prefixed(number, b"") * (size // 2 + 1),
        "too long": lambda size: tag(number, BYTES) + varint(2**31 - 1) + bytes(size),
        "deep": lambda size: _deep(number, size),
    }


def _entries(number: int, key: FieldDescriptor, size: int) -> bytes:
    width, texts = 12, key.type == FieldDescriptor.TYPE_STRING
    keys = range(size // width + 1)
    made = (prefixed(1, b"%d" % step) if texts else tag(1, VARINT) + varint(step) for step in keys)
    return b"".join(prefixed(number, entry) for entry in made)


def _deep(number: int, size: int) -> bytes:
    """Return a message in a message in a message, each in the field with this number."""
    data = b""
    for _ in range(min(size // 4, 20_000)):
        data = prefixed(number, data)
    return data


def _unknown_growths(kind: Descriptor) -> dict[str, ProtoGrowth]:
    number = max((field.number for field in kind.fields), default=0) + 100
    one = tag(number, VARINT) + b"\x01"
    return {
        "unknown numbers": _again(one)["many"],
        "unknown texts": lambda size: prefixed(number, b"") * (size // 3 + 1),
        "unknown bytes": lambda size: prefixed(number, b"a" * size),
        "unknown groups": lambda size: (tag(number, GROUP) + tag(number, END_GROUP)) * (size // 4 + 1),
        "groups in groups": lambda size: tag(number, GROUP) * (size // 4) + tag(number, END_GROUP) * (size // 4),
        "different unknown fields": lambda size: b"".join(
            tag(number + step % 100_000, VARINT) + b"\x01" for step in range(size // 4)
        ),
    }
