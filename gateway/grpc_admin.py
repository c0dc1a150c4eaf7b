"""The service loralane.v1.AdapterAdmin, for administrators' keys."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import grpc

from gateway.adapters import AdapterRegistry, AdapterStatus
from gateway.core.errors import forbidden, invalid_request
from gateway.core.tenants import KeyRing, Principal
from gateway.grpc_calls import Call, answer
from gateway.grpc_wire import adapter_to_pb
from gateway.pb import adapters_pb2 as pb
from gateway.pb import adapters_pb2_grpc as pb_grpc

MAX_DRAIN_SECONDS = 86_400.0

T = TypeVar("T")


class AdapterAdminService(pb_grpc.AdapterAdminServicer):
    """A change that has begun goes on when its caller leaves: a registry and an engine half way apart help nobody."""

    def __init__(self, adapters: AdapterRegistry, keys: KeyRing) -> None:
        self._adapters = adapters
        self._keys = keys
        self._changes: set[asyncio.Task[Any]] = set()

    async def Load(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.Adapter:
        return await answer(context, self._keys, partial(self._load, request))

    async def Unload(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        return await answer(context, self._keys, partial(self._unload, request))

    async def List(  # noqa: N802
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        return await answer(context, self._keys, self._list)

    async def close(self) -> None:
        """Ends changes under way."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _load(self, request: pb.LoadAdapterRequest, call: Call, principal: Principal) -> pb.Adapter:
        _check_admin(principal)
        record = await self._finish(self._adapters.load(request.name, request.path, replace=request.replace))
        statuses = {status.record.name: status for status in await self._adapters.statuses()}
        return adapter_to_pb(statuses.get(record.name, AdapterStatus(record, "disk")))

    async def _unload(
        self, request: pb.UnloadAdapterRequest, call: Call, principal: Principal
    ) -> pb.UnloadAdapterResponse:
        _check_admin(principal)
        if not 0 <= request.drain_seconds <= MAX_DRAIN_SECONDS:
            raise invalid_request(f"drain_seconds must be from 0 to {MAX_DRAIN_SECONDS:g}", "drain_seconds")
        aborted = await self._finish(self._adapters.unload(request.name, request.drain_seconds or None))
        return pb.UnloadAdapterResponse(aborted=aborted)

    async def _list(self, call: Call, principal: Principal) -> pb.ListAdaptersResponse:
        _check_admin(principal)
        return pb.ListAdaptersResponse(adapters=map(adapter_to_pb, await self._adapters.statuses()))

    async def _finish(self, change: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)


def _check_admin(principal: Principal) -> None:
    if not principal.is_admin:
        raise forbidden()
