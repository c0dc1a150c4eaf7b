"""AdapterAdmin from a terminal: a thin synchronous client and its table."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import grpc
from rich.table import Table

from gateway.pb import adapters_pb2 as pb
from gateway.pb import adapters_pb2_grpc as pb_grpc


class AdminClient:
    """A context manager around one channel. Calls raise grpc.RpcError."""

    def __init__(self, target: str, key: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._stub = pb_grpc.AdapterAdminStub(self._channel)
        self._metadata = (("authorization", f"Bearer {key}"),)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def list(self) -> Iterable[pb.Adapter]:
        return self._stub.List(pb.ListAdaptersRequest(), metadata=self._metadata).adapters

    def load(self, name: str, path: str, *, replace: bool) -> pb.Adapter:
        return self._stub.Load(pb.LoadAdapterRequest(name=name, path=path, replace=replace), metadata=self._metadata)

    def unload(self, name: str, drain_seconds: float) -> int:
        request = pb.UnloadAdapterRequest(name=name, drain_seconds=drain_seconds)
        return self._stub.Unload(request, metadata=self._metadata).aborted


def adapter_table(adapters: Iterable[pb.Adapter]) -> Table:
    table = Table("name", "version", "tier", "rank", "targets", "MB", "pages", "running", "waiting", box=None)
    for adapter in adapters:
        table.add_row(
            adapter.name,
            adapter.version[:12],
            adapter.tier,
            str(adapter.rank),
            ",".join(target.removesuffix("_proj") for target in adapter.target_modules),
            f"{adapter.bytes / 1e6:.1f}",
            str(adapter.pages),
            str(adapter.running),
            str(adapter.waiting),
        )
    return table
