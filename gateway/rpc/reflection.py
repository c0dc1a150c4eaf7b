"""Server reflection under both of its names: grpc.reflection.v1 and v1alpha.

The two protocols have the same messages on the wire. grpcio-reflection has only v1alpha, while newer clients ask for v1
first (github.com/grpc/grpc/blob/master/doc/server-reflection.md). The descriptor of v1 is derived from that of v1alpha.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLD_PACKAGE, PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE = f"{PACKAGE}.ServerReflection"
FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Enable reflection on a server for `services`, given by their full names, and for reflection itself."""
    _describe_v1()
    names = (*services, reflection.SERVICE_NAME, SERVICE)
    servicer = reflection.aio.ReflectionServicer(names)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handlers,))


def _describe_v1() -> None:
    """Add the file descriptor of v1 to the default pool, in which reflection looks up what clients ask for."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(FILE)
        return
    except KeyError:
        pass
    text = reflection_pb2.DESCRIPTOR.serialized_pb
    file = FileDescriptorProto.FromString(text)
    file.name, file.package = FILE, PACKAGE
    file.ClearField("options")  # the options name packages of generated code
    for message in file.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(f".{OLD_PACKAGE}.", f".{PACKAGE}.")
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(f".{OLD_PACKAGE}.", f".{PACKAGE}.")
        method.output_type = method.output_type.replace(f".{OLD_PACKAGE}.", f".{PACKAGE}.")
    pool.AddSerializedFile(file.SerializeToString())
