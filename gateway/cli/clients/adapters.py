"""A thin synchronous client of the gRPC service AdapterAdmin."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.cli.clients.admin import AdminClient
from gateway.pb import adapters_pb2 as pb
from gateway.pb import adapters_pb2_grpc as pb_grpc


class AdaptersClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._stub = pb_grpc.AdapterAdminStub(self._channel)

    def list(self) -> Sequence[pb.Adapter]:
        return self._stub.List(pb.ListAdaptersRequest(), metadata=self._metadata).adapters

    def load(self, name: str, path: str, *, replace: bool, tenants: Sequence[str] = ()) -> pb.Adapter:
        request = pb.LoadAdapterRequest(name=name, path=path, replace=replace, tenants=tenants)
        return self._stub.Load(request, metadata=self._metadata)

    def reload(self, name: str) -> pb.ReloadAdapterResponse:
        return self._stub.Reload(pb.ReloadAdapterRequest(name=name), metadata=self._metadata)

    def unload(self, name: str, drain_seconds: float) -> int:
        request = pb.UnloadAdapterRequest(name=name, drain_seconds=drain_seconds)
        return self._stub.Unload(request, metadata=self._metadata).aborted

    def pin(self, name: str, *, pinned: bool) -> pb.Adapter:
        return self._stub.Pin(pb.PinAdapterRequest(name=name, pinned=pinned), metadata=self._metadata)

    def alias(self, name: str, alias: str, *, remove: bool) -> pb.Adapter:
        request = pb.AliasAdapterRequest(name=name, alias=alias, remove=remove)
        return self._stub.Alias(request, metadata=self._metadata)

    def allow(self, name: str, tenants: Sequence[str]) -> pb.Adapter:
        return self._stub.Allow(pb.AllowTenantsRequest(name=name, tenants=tenants), metadata=self._metadata)
