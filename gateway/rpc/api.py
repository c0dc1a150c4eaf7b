"""The public gRPC server: loralane.v1, health and reflection on one port."""

from __future__ import annotations

from types import TracebackType

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from gateway.accounts.admin import AccountAdmin
from gateway.administration.trail import AdminTrail
from gateway.config.certificates import Certificate
from gateway.core.file_descriptors import grpc_connections
from gateway.core.part import ApiSurface, serves_service
from gateway.limiter.admin import LimitAdmin
from gateway.pb import (
    adapters_pb2,
    adapters_pb2_grpc,
    admins_pb2,
    admins_pb2_grpc,
    batches_pb2,
    batches_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    json_api_pb2,
    json_api_pb2_grpc,
    limits_pb2,
    limits_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
)
from gateway.requests.readiness import readiness
from gateway.rpc import generation, json_api
from gateway.rpc.accounts import TenantAdminService
from gateway.rpc.admin import AdapterAdminService
from gateway.rpc.administrators import AdministratorAdminService
from gateway.rpc.arrival import LOOKAHEAD_BYTES
from gateway.rpc.batches import BatchesService
from gateway.rpc.entrance import Entrance
from gateway.rpc.generation import GenerationService
from gateway.rpc.json_api import JsonApiService
from gateway.rpc.limits import LimitAdminService
from gateway.rpc.operations import EngineAdminService, LaneAdminService, RequestAdminService
from gateway.rpc.standard import EngineHealth, add_reflection
from gateway.rpc.usage import UsageAdminService
from gateway.services import Services

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    json_api_pb2.DESCRIPTOR.services_by_name["JsonApi"].full_name,
    batches_pb2.DESCRIPTOR.services_by_name["Batches"].full_name,
    adapters_pb2.DESCRIPTOR.services_by_name["AdapterAdmin"].full_name,
    admins_pb2.DESCRIPTOR.services_by_name["AdministratorAdmin"].full_name,
    limits_pb2.DESCRIPTOR.services_by_name["LimitAdmin"].full_name,
    tenants_pb2.DESCRIPTOR.services_by_name["TenantAdmin"].full_name,
    usage_pb2.DESCRIPTOR.services_by_name["UsageAdmin"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["EngineAdmin"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["LaneAdmin"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["RequestAdmin"].full_name,
)

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)
"""Keepalive options. Peers that vanish without closing the connection are detected within 40 s; clients may ping every
10 s, even without a call in progress. A connection is closed at the third ping that comes earlier. The names are those
of gRPC's channel_arg_names.h; gRPC ignores unknown ones."""
WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES))
"""Flow control options. gRPC would raise the window of all calls to what it measures of the connection: 200 calls whose
messages the server did not read held 1.6 GB. A message of 8 MiB takes no longer without these probes on a local
connection, because its window grows while it is read."""
MOST_STREAMS = 1024
"""Maximum calls in progress on one connection. The server announces it, and clients let further calls wait."""


class GrpcServer:
    """The gRPC server, as an async context manager. Entering it starts the server and yields the port that it listens
    on; leaving it stops the server."""

    def __init__(
        self,
        services: Services,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Certificate | None = None,
        shared: bool = False,
        max_message_bytes: int = 8 * 2**20,
        grace_seconds: float = 10.0,
        surface: ApiSurface = "all",
    ) -> None:
        """Create the server without starting it.

        Args:
            port: 0 takes any free one.
            certificate: None means that the server does not use TLS.
            shared: other gateway processes may listen on the same port; the kernel distributes connections.
            max_message_bytes: larger requests end with RESOURCE_EXHAUSTED.
            grace_seconds: how long running calls may continue when the server stops.
            surface: the part of the API: all, public (all but administration) or admin.
        """
        gateway, accounts = services.gateway, services.accounts
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.port: int | None = None
        """The port that the server listens on. None means that it does not listen yet."""
        self._certificate = certificate
        self._grace_seconds = grace_seconds
        self._admin = AdapterAdminService(gateway.adapters)
        self._limits = LimitAdminService(LimitAdmin(gateway.limiter, accounts.counts_as))
        exposed = tuple(name for name in SERVICES if serves_service(surface, name))
        names = [name for model in gateway.models for name in model.names]
        life = gateway.lifecycle

        def serves(model: str) -> bool:
            return readiness(gateway.models, gateway.limiter, model, draining=life.is_draining).serves

        self._health = EngineHealth(exposed, names, serves)
        options = _options(max_message_bytes, shared)
        entrance = Entrance(gateway, accounts, (*generation.REQUESTS, *json_api.REQUESTS), AdminTrail(services))
        self._server = grpc.aio.server(interceptors=(entrance,), options=options)
        self._batches = BatchesService(services)
        if surface != "admin":
            generation_pb2_grpc.add_GenerationServicer_to_server(GenerationService(gateway), self._server)
            json_api_pb2_grpc.add_JsonApiServicer_to_server(JsonApiService(gateway, services.responses), self._server)
            batches_pb2_grpc.add_BatchesServicer_to_server(self._batches, self._server)
        if surface != "public":
            self._add_administration(services)
        add_HealthServicer_to_server(self._health, self._server)
        add_reflection((*exposed, health.SERVICE_NAME), self._server)

    def _add_administration(self, services: Services) -> None:
        operations = services.operations
        tenants = TenantAdminService(AccountAdmin(services.accounts, services.gateway.limiter.drop))
        admins = AdministratorAdminService(services.accounts.administrators)
        admins_pb2_grpc.add_AdministratorAdminServicer_to_server(admins, self._server)
        adapters_pb2_grpc.add_AdapterAdminServicer_to_server(self._admin, self._server)
        limits_pb2_grpc.add_LimitAdminServicer_to_server(self._limits, self._server)
        tenants_pb2_grpc.add_TenantAdminServicer_to_server(tenants, self._server)
        usage_pb2_grpc.add_UsageAdminServicer_to_server(UsageAdminService(services.usage), self._server)
        operations_pb2_grpc.add_EngineAdminServicer_to_server(EngineAdminService(operations), self._server)
        operations_pb2_grpc.add_LaneAdminServicer_to_server(LaneAdminService(operations), self._server)
        operations_pb2_grpc.add_RequestAdminServicer_to_server(RequestAdminService(operations), self._server)

    async def start(self) -> int:
        """Start serving and return the port. Raises OSError: it cannot listen there, as if the address is in use."""
        try:
            port = self._add_port()
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}; use another port") from error
        await self._server.start()
        self.port = port
        return port

    @property
    def uses_tls(self) -> bool:
        return self._certificate is not None

    def _add_port(self) -> int:
        if self._certificate is None:
            return self._server.add_insecure_port(self._address)
        return self._server.add_secure_port(self._address, self._certificate.for_grpc())

    async def stop(self, seconds: float | None = None) -> None:
        """Report NOT_SERVING, end Watch calls, stop accepting calls, wait up to `seconds` (None: `grace_seconds`) for
        running calls to end, and then cancel them and changes of adapters in progress."""
        self._health.stop_serving()
        self._admin.stop_watching()
        self._limits.stop_watching()
        self._batches.stop_watching()
        await self._server.stop(self._grace_seconds if seconds is None else seconds)
        await self._admin.close()

    async def __aenter__(self) -> int:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _options(max_message_bytes: int, shared: bool) -> tuple[tuple[str, int], ...]:
    sizes = (("grpc.max_receive_message_length", max_message_bytes), ("grpc.max_send_message_length", -1))
    streams = ("grpc.max_concurrent_streams", MOST_STREAMS)
    connections = ("grpc.max_allowed_incoming_connections", grpc_connections())  # further ones are closed at once
    # Without SO_REUSEPORT, a port that another server holds is an error; with it, the two would share connections.
    return (*KEEPALIVE, *WINDOWS, *sizes, streams, connections, ("grpc.so_reuseport", int(shared)))
