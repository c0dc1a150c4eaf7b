"""Standard gRPC services: health (grpc.health.v1), of the server and of each base model, and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2

WATCH_SECONDS = 0.25
"""Interval in seconds at which the status is polled for all Watch calls together, and so the maximum delay with which
they report a change."""
MOST_WATCHES = 1000
"""Maximum number of Watch calls in progress. They need no key."""


class EngineHealth(health_pb2_grpc.HealthServicer):
    """Health service: one status of all `services` and the empty name, and one of each base model, SERVING while
    `serves` returns True, until `stop_serving`. It is polled once for all Watch calls."""

    def __init__(self, services: Sequence[str], models: Sequence[str], serves: Callable[[str], bool]) -> None:
        """`serves` returns whether requests for a base model can be served, or for any if the name is empty."""
        self._model_of = {model: model for model in models} | dict.fromkeys(("", *services), "")
        """Base model that the status of a service is about, by the service's name; empty means all."""
        self._serves = serves
        self._stopping = False
        self._num_watches = 0
        self._polled: dict[str, bool] = {}
        """What `serves` returned in the last poll, by base model. It is current only while there are Watch calls."""
        self._next_change = asyncio.Event()
        """Set, and replaced by a new event, when a poll finds a change or the server begins to stop."""

    async def Check(  # noqa: N802
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        if request.service not in self._model_of:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=self._status(request.service, self._serves))

    async def List(  # noqa: N802
        self, request: HealthListRequest, context: grpc.aio.ServicerContext
    ) -> HealthListResponse:
        statuses = {service: self._status(service, self._serves) for service in self._model_of}
        return HealthListResponse(
            statuses={service: HealthCheckResponse(status=status) for service, status in statuses.items()}
        )

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Send the status now and whenever a poll finds that it has changed, until the server begins to stop. Beyond
        MOST_WATCHES calls, further ones end with UNIMPLEMENTED."""
        # Clients then go on without these checks; after any other status they would take the server for unhealthy, and
        # strangers could make it so.
        if self._num_watches >= MOST_WATCHES:
            full = f"this server has {self._num_watches} Watch calls, its maximum; use Check"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, full)
        told = None
        with self._polling():
            while not self._stopping:
                change, status = self._next_change, self._status(request.service, self._polled.__getitem__)
                if status != told:
                    await context.write(HealthCheckResponse(status=status))
                    told = status
                await change.wait()
            await context.write(HealthCheckResponse(status=self._status(request.service, self._serves)))

    def stop_serving(self) -> None:
        """Report NOT_SERVING from now on, permanently, so that clients use other servers, and end Watch calls."""
        self._stopping = True
        self._wake()

    @contextmanager
    def _polling(self) -> Iterator[None]:
        """Count a Watch call during the block. The status is polled from the first such call until the last one
        ends."""
        if not self._num_watches:
            self._polled = self._poll()
            self._poller = asyncio.create_task(self._keep_polling(), name="health-poll")
        self._num_watches += 1
        try:
            yield
        finally:
            self._num_watches -= 1
            if not self._num_watches:
                self._poller.cancel()

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            polled = self._poll()
            if polled != self._polled:
                self._polled = polled
                self._wake()

    def _poll(self) -> dict[str, bool]:
        return {model: self._serves(model) for model in set(self._model_of.values())}

    def _wake(self) -> None:
        """Make every Watch call look at the status again."""
        change, self._next_change = self._next_change, asyncio.Event()
        change.set()

    def _status(self, service: str, serves: Callable[[str], bool]) -> HealthCheckResponse.ServingStatus:
        """Return the status of a service, given the function that returns whether a base model's requests can be
        served."""
        if service not in self._model_of:
            return HealthCheckResponse.SERVICE_UNKNOWN
        serving = serves(self._model_of[service]) and not self._stopping
        return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING


OLD_PACKAGE, PACKAGE = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE = f"{PACKAGE}.ServerReflection"
FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Enable reflection on a server, as grpc.reflection.v1 and v1alpha, for `services`, given by their full names, and
    for reflection itself."""
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
    """Add the file descriptor of grpc.reflection.v1, a renamed copy of v1alpha's, to the default descriptor pool, in
    which reflection looks up names. Does nothing if the pool has it."""
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
