"""A thin synchronous client of the gRPC service LimitAdmin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.cli.clients.admin import AdminClient
from gateway.pb import limits_pb2 as pb
from gateway.pb import limits_pb2_grpc as pb_grpc


class LimitsClient(AdminClient):
    def __init__(self, target: str, key: str) -> None:
        super().__init__(target, key)
        self._stub = pb_grpc.LimitAdminStub(self._channel)

    def get(self, tenant: str) -> Sequence[pb.LimitEntry]:
        return self._stub.Get(pb.GetLimitsRequest(tenant=tenant), metadata=self._metadata).entries

    def set(
        self,
        scope: pb.LimitScope,
        values: Mapping[str, int | None],
        shadow: Sequence[str] | None,
        away: Mapping[str, str] | None = None,
    ) -> pb.LimitEntry:
        """Change the limits of a scope.

        Args:
            values: limit -> new value; None lifts the limit.
            shadow: limits that only count. None leaves the setting unchanged.
            away: limit -> policy while Redis is away. None leaves the setting unchanged.
        """
        given = {name: value for name, value in values.items() if value is not None}
        request = pb.SetLimitsRequest(
            scope=scope,
            limits=pb.Limits(**given, shadow=shadow or (), when_redis_is_away=away or {}),
            lift=[name for name, value in values.items() if value is None],
            set_shadow=shadow is not None,
            set_when_redis_is_away=away is not None,
        )
        return self._stub.Set(request, metadata=self._metadata)

    def reset(self, scope: pb.LimitScope, *, used: bool) -> pb.Limits:
        return self._stub.Reset(pb.ResetLimitsRequest(scope=scope, used=used), metadata=self._metadata).limits

    def usage(self, tenant: str) -> Sequence[pb.ScopeUsage]:
        return self._stub.Usage(pb.LimitUsageRequest(tenant=tenant), metadata=self._metadata).scopes

    def watch(self, tenant: str) -> Iterator[Sequence[pb.ScopeUsage]]:
        """Yield the usage of all scopes first, then that of the scopes in which it has changed."""
        for response in self._stub.Watch(pb.WatchLimitsRequest(tenant=tenant), metadata=self._metadata):
            yield response.scopes
