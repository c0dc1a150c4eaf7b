"""A gRPC client that knows nothing but an address: everything it calls, it found through server reflection."""

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

PATIENCE_SECONDS = 600
"""As OpenAI's client has: answers of a real model to many at once take as long as the machine is busy."""


class ReflectedClient:
    """Synchronous; requests and replies are dictionaries."""

    def __init__(self, target, key):
        self.channel = grpc.insecure_channel(target)
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.database)
        self.metadata = (("authorization", f"Bearer {key}"),)

    def services(self):
        return list(self.database.get_services())

    def call(self, service, method, request):
        """Yields replies; unary methods yield one. Where the client streams, `request` is a list of requests."""
        descriptor = self.pool.FindServiceByName(service).FindMethodByName(method)
        request_class, reply_class = GetMessageClass(descriptor.input_type), GetMessageClass(descriptor.output_type)
        kinds = ("unary", "stream")
        make = getattr(self.channel, f"{kinds[descriptor.client_streaming]}_{kinds[descriptor.server_streaming]}")
        stub = make(f"/{service}/{method}", request_class.SerializeToString, reply_class.FromString)
        one_or_many = request if descriptor.client_streaming else [request]
        messages = [ParseDict(one, request_class()) for one in one_or_many]
        sent = iter(messages) if descriptor.client_streaming else messages[0]
        reply = stub(sent, metadata=self.metadata, timeout=PATIENCE_SECONDS)
        for message in reply if descriptor.server_streaming else [reply]:
            yield MessageToDict(message, preserving_proto_field_name=True)

    def close(self):
        self.channel.close()
