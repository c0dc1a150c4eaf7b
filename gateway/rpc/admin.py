"""The service loralane.v1.AdapterAdmin, for administrators' keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.watch import AdapterChanges, watch
from gateway.api_schema.adapters import AdapterStatus
from gateway.pb import adapters_pb2 as pb
from gateway.pb import adapters_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, watch_interval

T = TypeVar("T")


class AdapterAdminService(pb_grpc.AdapterAdminServicer):
    """Handlers of AdapterAdmin. A change that has begun continues if
    its caller disconnects, so that the registry and the engine stay consistent."""

    def __init__(self, adapters: AdapterAdmin) -> None:
        self._adapters = adapters
        self._changes: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    async def Load(self, request: pb.LoadAdapterRequest, call: RpcCall) -> pb.Adapter:  # noqa: N802
        registry = await self._adapters.to_load(request.name, request.path, request.base_model)
        options: dict[str, Any] = {
            "tenants": tuple(request.tenants),
            "chat_template": request.chat_template or None,
        }
        await self._finish(registry.load(request.name, request.path, replace=request.replace, **options))
        return _adapter(await registry.status_after_change(request.name))

    async def Reload(  # noqa: N802
        self, request: pb.ReloadAdapterRequest, call: RpcCall
    ) -> pb.ReloadAdapterResponse:
        registry = self._adapters.of(request.name)
        changed = await self._finish(registry.reload(request.name))
        adapter = _adapter(await registry.status_after_change(request.name))
        return pb.ReloadAdapterResponse(adapter=adapter, changed=changed)

    async def Unload(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, call: RpcCall
    ) -> pb.UnloadAdapterResponse:
        registry = self._adapters.of(request.name, request.base_model)
        aborted = await self._finish(registry.unload(request.name, request.drain_seconds or None))
        return pb.UnloadAdapterResponse(aborted=aborted)

    async def Pin(self, request: pb.PinAdapterRequest, call: RpcCall) -> pb.Adapter:  # noqa: N802
        def pin(registry: AdapterRegistry) -> Coroutine[Any, Any, Any]:
            return registry.pin(request.name, request.pinned)

        return await self._changed(request.name, pin)

    async def Alias(self, request: pb.AliasAdapterRequest, call: RpcCall) -> pb.Adapter:  # noqa: N802
        def alias(registry: AdapterRegistry) -> Coroutine[Any, Any, Any]:
            return registry.alias(request.name, request.alias, remove=request.remove)

        return await self._changed(request.name, alias)

    async def Allow(self, request: pb.AllowTenantsRequest, call: RpcCall) -> pb.Adapter:  # noqa: N802
        def allow(registry: AdapterRegistry) -> Coroutine[Any, Any, Any]:
            return registry.allow(request.name, tuple(request.tenants))

        return await self._changed(request.name, allow)

    async def List(  # noqa: N802
        self, request: pb.ListAdaptersRequest, call: RpcCall
    ) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(_adapter, await self._adapters.statuses()))

    async def Watch(self, request: pb.WatchAdaptersRequest, call: RpcCall) -> None:  # noqa: N802
        seconds = watch_interval(request.interval_seconds)
        await call.open()
        async with aclosing(watch(self._adapters, seconds, self._closing, call.check)) as differences:
            async for difference in differences:
                await call.send(_difference_to_pb(difference))

    def stop_watching(self) -> None:
        """End every Watch call, which would otherwise last as long as its caller stays connected."""
        self._closing.set()

    async def close(self) -> None:
        """Cancel the changes of adapters in progress and wait until they have ended; their exceptions are dropped."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _changed(self, name: str, change: Callable[[AdapterRegistry], Coroutine[Any, Any, Any]]) -> pb.Adapter:
        """Run a change of an adapter in the registry that has it, and return the adapter's new status."""
        registry = self._adapters.of(name)
        await self._finish(change(registry))
        return _adapter(await registry.status_after_change(name))

    async def _finish(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, even if the caller disconnects, and return its result."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)


def _adapter(status: AdapterStatus) -> pb.Adapter:
    """Convert an adapter's status to a message, which has the same fields under the same names."""
    return pb.Adapter(**msgspec.structs.asdict(status))


def _difference_to_pb(difference: AdapterChanges) -> pb.WatchAdaptersResponse:
    return pb.WatchAdaptersResponse(adapters=map(_adapter, difference.adapters), removed=difference.removed)
