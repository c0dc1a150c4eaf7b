"""Integers that callers choose and that become keys are bounded: unbounded ones can all have one hash."""

from collections.abc import Iterator

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from msgspec.inspect import (
    CustomType,
    DictType,
    FloatType,
    FrozenSetType,
    IntType,
    ListType,
    SetType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    multi_type_info,
)

from gateway.api_schema.chats import Biases
from gateway.batches.input import BatchLine
from gateway.http.openapi.operations import OPERATIONS
from gateway.pb import (
    adapters_pb2,
    batches_pb2,
    generation_pb2,
    json_api_pb2,
    limits_pb2,
    operations_pb2,
    tenants_pb2,
    usage_pb2,
)
from gateway.upstreams.wire import ChoiceDelta, Event

BODIES = sorted({each.body for each in OPERATIONS if each.body is not None} | {BatchLine, Event}, key=str)
FILES = (
    adapters_pb2,
    batches_pb2,
    generation_pb2,
    json_api_pb2,
    limits_pb2,
    operations_pb2,
    tenants_pb2,
    usage_pb2,
)
SAFE = 2**32
"""Integers below this have as many hashes."""


def unbounded(found: Type, seen: set[type]) -> Iterator[str]:
    """Yield the keys and members of sets, anywhere in a type, that are numbers and not bounded."""
    match found:
        case DictType(key_type=key, value_type=value):
            yield from (f"key {each}" for each in numbers(key))
            yield from unbounded(value, seen)
        case SetType(item_type=item) | FrozenSetType(item_type=item):
            yield from (f"member {each}" for each in numbers(item))
        case ListType(item_type=item) | VarTupleType(item_type=item):
            yield from unbounded(item, seen)
        case UnionType(types=types):
            for each in types:
                yield from unbounded(each, seen)
        case StructType(cls=cls, fields=fields) if cls not in seen:
            seen.add(cls)
            for field in fields:
                yield from (f"{cls.__name__}.{field.name}: {each}" for each in unbounded(field.type, seen))
        case CustomType():
            yield f"{found} is not understood by this test"


def numbers(key: Type) -> Iterator[Type]:
    for each in key.types if isinstance(key, UnionType) else (key,):
        if isinstance(each, FloatType) or (isinstance(each, IntType) and not is_bounded(each)):
            yield each


def is_bounded(kind: IntType) -> bool:
    return kind.ge is not None and kind.le is not None and kind.le - kind.ge < SAFE


def test_keys_in_json_bodies():
    seen: set[type] = set()
    assert [each for kind in multi_type_info(BODIES) for each in unbounded(kind, seen)] == []
    assert ChoiceDelta in seen


def test_the_test_finds_an_unbounded_key():
    kinds = multi_type_info([dict[int, str], set[int] | None, list[dict[float, str]], dict[str, frozenset[int]]])
    assert [len(list(unbounded(kind, set()))) for kind in kinds] == [1, 1, 1, 1]


def messages(kind: Descriptor, seen: set[str]) -> Iterator[Descriptor]:
    if kind.full_name not in seen:
        seen.add(kind.full_name)
        yield kind
        for field in kind.fields:
            if field.message_type is not None:
                yield from messages(field.message_type, seen)


def test_keys_in_grpc_messages():
    seen: set[str] = set()
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    kinds = [kind for service in services for method in service.methods for kind in messages(method.input_type, seen)]
    maps = [kind.fields_by_name["key"] for kind in kinds if kind.GetOptions().map_entry]
    lists = [field for kind in kinds for field in kind.fields if field.is_repeated and field.message_type is None]
    wide = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_DOUBLE}
    assert maps and lists
    assert [field.full_name for field in (*maps, *lists) if field.cpp_type in wide] == []


def test_a_bias_of_a_giant_token_id_is_refused_while_it_is_read():
    for key in (2**61 - 1, 2**64, -1):
        with pytest.raises(msgspec.ValidationError, match="at `key` in"):
            msgspec.convert({str(key): 1.0}, Biases, str_keys=True)
