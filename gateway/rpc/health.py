"""The service grpc.health.v1. Services report SERVING while the engine is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse

WATCH_SECONDS = 0.25
"""Polling interval of a Watch call in seconds, and so the maximum delay with which it reports a change."""


class EngineHealth(health_pb2_grpc.HealthServicer):
    """Reports one status for all services, and for the server as a whole under the empty name. The status is computed
    on each call."""

    def __init__(self, services: tuple[str, ...], ready: Callable[[], bool]) -> None:
        self._services = ("", *services)
        self._ready = ready
        self._stopping = False

    async def Check(  # noqa: N802
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=self._status(request.service))

    async def List(  # noqa: N802
        self, request: HealthListRequest, context: grpc.aio.ServicerContext
    ) -> HealthListResponse:
        statuses = {service: HealthCheckResponse(status=self._status(service)) for service in self._services}
        return HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Send the status now and whenever it changes. The call ends when the server stops, so that it does not delay
        the shutdown."""
        told = None
        while not self._stopping:
            status = self._status(request.service)
            if status != told:
                await context.write(HealthCheckResponse(status=status))
                told = status
            await asyncio.sleep(WATCH_SECONDS)
        await context.write(HealthCheckResponse(status=self._status(request.service)))

    def stop_serving(self) -> None:
        """Report NOT_SERVING from now on, permanently, so that clients use other servers."""
        self._stopping = True

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return HealthCheckResponse.SERVICE_UNKNOWN
        serving = self._ready() and not self._stopping
        return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
