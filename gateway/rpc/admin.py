"""The service loralane.v1.AdapterAdmin, for administrators' keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc

from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.watch import AdapterChanges, watch
from gateway.core.tenants import Authenticator
from gateway.pb import adapters_pb2 as pb
from gateway.pb import adapters_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, respond_to_admin, watch_interval
from gateway.rpc.wire import adapter_to_pb

T = TypeVar("T")


class AdapterAdminService(pb_grpc.AdapterAdminServicer):
    """Handlers of AdapterAdmin. They reject callers that are not administrators. A change that has begun continues if
    its caller disconnects, so that the registry and the engine stay consistent."""

    def __init__(self, adapters: AdapterAdmin, keys: Authenticator) -> None:
        self._adapters = adapters
        self._keys = keys
        self._changes: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    async def Load(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.Adapter:
        return await self._administer(context, partial(self._load, request))

    async def Reload(  # noqa: N802
        self, request: pb.ReloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReloadAdapterResponse:
        return await self._administer(context, partial(self._reload, request))

    async def Unload(  # noqa: N802
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        return await self._administer(context, partial(self._unload, request))

    async def Pin(  # noqa: N802
        self, request: pb.PinAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.Adapter:
        def pin(registry: AdapterRegistry) -> Coroutine[Any, Any, Any]:
            return registry.pin(request.name, request.pinned)

        return await self._administer(context, partial(self._changed, request.name, pin))

    async def Alias(  # noqa: N802
        self, request: pb.AliasAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.Adapter:
        def alias(registry: AdapterRegistry) -> Coroutine[Any, Any, Any]:
            return registry.alias(request.name, request.alias, remove=request.remove)

        return await self._administer(context, partial(self._changed, request.name, alias))

    async def Allow(  # noqa: N802
        self, request: pb.AllowTenantsRequest, context: grpc.aio.ServicerContext
    ) -> pb.Adapter:
        def allow(registry: AdapterRegistry) -> Coroutine[Any, Any, Any]:
            return registry.allow(request.name, tuple(request.tenants))

        return await self._administer(context, partial(self._changed, request.name, allow))

    async def List(  # noqa: N802
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAdaptersResponse:
        return await self._administer(context, self._list)

    async def Watch(  # noqa: N802
        self, request: pb.WatchAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await respond_to_admin(context, self._keys, partial(self._watch, request))

    def stop_watching(self) -> None:
        """End every Watch call, which would otherwise last as long as its caller stays connected."""
        self._closing.set()

    async def close(self) -> None:
        """Cancel the changes of adapters in progress and wait until they have ended; their exceptions are dropped."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _administer(self, context: grpc.aio.ServicerContext, work: Callable[[], Awaitable[T]]) -> T:
        return await respond_to_admin(context, self._keys, lambda _: work())

    async def _load(self, request: pb.LoadAdapterRequest) -> pb.Adapter:
        registry = await self._adapters.to_load(request.name, request.path, request.base_model)
        tenants = tuple(request.tenants)
        await self._finish(registry.load(request.name, request.path, replace=request.replace, tenants=tenants))
        return adapter_to_pb(await registry.status(request.name))

    async def _reload(self, request: pb.ReloadAdapterRequest) -> pb.ReloadAdapterResponse:
        registry = self._adapters.of(request.name)
        changed = await self._finish(registry.reload(request.name))
        adapter = adapter_to_pb(await registry.status(request.name))
        return pb.ReloadAdapterResponse(adapter=adapter, changed=changed)

    async def _unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        registry = self._adapters.of(request.name, request.base_model)
        aborted = await self._finish(registry.unload(request.name, request.drain_seconds or None))
        return pb.UnloadAdapterResponse(aborted=aborted)

    async def _list(self) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(adapter_to_pb, await self._adapters.statuses()))

    async def _watch(self, request: pb.WatchAdaptersRequest, call: RpcCall) -> None:
        seconds = watch_interval(request.interval_seconds)
        await call.open()
        async with aclosing(watch(self._adapters, seconds, self._closing)) as differences:
            async for difference in differences:
                await call.send(_difference_to_pb(difference))

    async def _changed(self, name: str, change: Callable[[AdapterRegistry], Coroutine[Any, Any, Any]]) -> pb.Adapter:
        """Run a change of an adapter in the registry that has it, and return the adapter's new status."""
        registry = self._adapters.of(name)
        await self._finish(change(registry))
        return adapter_to_pb(await registry.status(name))

    async def _finish(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, even if the caller disconnects, and return its result."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)


def _difference_to_pb(difference: AdapterChanges) -> pb.WatchAdaptersResponse:
    return pb.WatchAdaptersResponse(adapters=map(adapter_to_pb, difference.adapters), removed=difference.removed)
