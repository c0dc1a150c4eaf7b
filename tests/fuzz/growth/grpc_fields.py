"""Every field of the gRPC methods: those of their messages, and the metadata of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from tests.fuzz.cases import all_methods
from tests.fuzz.growth.proto_fields import ProtoGrowth, Wrap, proto_fields
from tests.fuzz.growth.requests import HEAD_SIZES, Field, GrpcCall

HARMS_OTHERS = ("LaneAdmin", "EngineAdmin")
"""Services by which an administrator would end or stop the neighbour. Their calls are made with a tenant's key."""
PUBLIC = ("Generation", "JsonApi", "Batches")
ASKS_FOR_EVER = "Watch"
"""Methods whose names begin so stream until the caller leaves."""
WITH_METADATA = ("Generate", "CreateFile")


def grpc_fields() -> Iterator[Field]:
    for method in all_methods():
        service = method.containing_service
        name = f"gRPC {service.name}.{method.name}"
        key = "sk-acme" if service.name in (*PUBLIC, *HARMS_OTHERS) else "sk-admin"
        for field in proto_fields(method):
            growths = {way: _growing(method, field.around, growth) for way, growth in field.growths.items()}
            yield Field(name, field.path or "message", field.kind, growths, key)
        if method.client_streaming:
            yield Field(name, "messages", f"messages of {name}", {"many": _many(method)}, key)
        if method.name in WITH_METADATA:
            yield Field(name, "metadata", f"metadata of {name}", _metadata(method), key, HEAD_SIZES)


def _call(method: MethodDescriptor, *messages: bytes) -> GrpcCall:
    path = f"/{method.containing_service.full_name}/{method.name}"
    return GrpcCall(path, messages, method.client_streaming, method.server_streaming)


def _growing(method: MethodDescriptor, around: Wrap, growth: ProtoGrowth) -> Callable[[int], GrpcCall]:
    return lambda size: _call(method, around(growth(size)))


def _many(method: MethodDescriptor) -> Callable[[int], GrpcCall]:
    return lambda size: _call(method, *(b"",) * (size // 1024))


def _metadata(method: MethodDescriptor) -> dict[str, Callable[[int], GrpcCall]]:
    def with_metadata(*metadata: tuple[str, Any]) -> GrpcCall:
        call = _call(method, b"")
        return GrpcCall(call.method, call.messages, call.client_streams, call.server_streams, metadata)

    return {
        "authorization: letters": lambda size: with_metadata(("authorization", "a" * size)),
        "x-request-id: letters": lambda size: with_metadata(("x-request-id", "a" * size)),
        "bytes": lambda size: with_metadata(("a-bin", b"\xff" * (size * 3 // 4))),
        "one name": lambda size: with_metadata(*(("a", "1"),) * (size // 36)),
        "many names": lambda size: with_metadata(*((f"a{number}", "1") for number in range(size // 40))),
    }
