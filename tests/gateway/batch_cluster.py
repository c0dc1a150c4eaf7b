"""Gateways with fake engines that work on batches, over one real Valkey and one folder."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from fakes import ACME, BASE, GLOBEX, GatewayApp, build_gateway_app
from file_fakes import pieces
from redis.asyncio import Redis

from gateway.batches.context import BatchContext
from gateway.batches.dispatcher import Dispatcher, cancel_until_done
from gateway.batches.gate import Gate
from gateway.batches.input import CheckParameters, InputCheck
from gateway.batches.lease import Lease
from gateway.batches.record import Batch, NewBatch, new_batch_id
from gateway.batches.setup import with_route_gates
from gateway.batches.store import BatchStore
from gateway.core.routing import Catalog
from gateway.core.space import Disk
from gateway.core.tenants import KeyLapse, Principal
from gateway.files.places import Folder
from gateway.files.registry import FileRegistry
from gateway.files.service import FileLimits, Files
from gateway.files.storage import Storage

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LEASE_SECONDS = 60.0
"""No lease runs out because a busy machine renewed it late; tests of leases that do have shorter ones."""
PATIENCE_SECONDS = 60.0
KEY_ID = "0123456789ab"
VIRTUAL = frozenset(("auto",))
"""Virtual models that validation knows."""


class BrokenFolder(Folder):
    """A storage folder whose operations fail while `is_broken` is set or `fails` returns true."""

    is_broken = False
    failures = 0
    """Number of operations that have failed."""
    fails: Callable[[], bool] = staticmethod(lambda: False)
    """Called before every operation, which fails when it returns true."""

    def _check(self) -> None:
        if self.is_broken or self.fails():
            self.failures += 1
            raise OSError("the disk is away")

    def create(self, name: str) -> BinaryIO:
        self._check()
        return super().create(name)

    def publish(self, partial: str, name: str) -> None:
        self._check()
        super().publish(partial, name)

    def open(self, name: str) -> BinaryIO:
        self._check()
        return super().open(name)


@dataclass
class Holders:
    """`KeyHolders` of tenants that a test may suspend."""

    lapses: dict[str, KeyLapse] = field(default_factory=dict)
    tenants: dict[str, Any] = field(default_factory=lambda: {"acme": ACME, "globex": GLOBEX})

    def holder(self, tenant: str, key_id: str) -> Principal | KeyLapse:
        return self.lapses.get(tenant) or Principal(self.tenants[tenant], key_id)


@dataclass
class ClusterMember:
    """One gateway of a cluster: the gateway with its fakes, and the dispatcher that works on batches."""

    gateway_app: GatewayApp
    store: BatchStore
    context: BatchContext
    dispatcher: Dispatcher
    counts: Counter[str]
    """Answered lines by result, and `wasted`: tokens of lines that ran again."""

    async def shorten_leases(self, seconds: float) -> None:
        """Let the leases of this gateway run out after so many seconds from now on."""
        self.store._lease_ms = int(1000 * seconds)
        self.dispatcher._leases._seconds = seconds
        await self.dispatcher._leases.renew()

    async def kill(self) -> None:
        """Stop as if the process had died: cancel the tasks, so that the event loop can end, and clean up nothing."""
        works = [task for work in self.dispatcher._works.values() for task in getattr(work, "_tasks", ())]
        await cancel_until_done(*self.dispatcher._background, *self.dispatcher._works, *works)


class BatchCluster:
    """Several gateways and what they share: Redis, a folder of objects, and tenants. Tests submit batches to it."""

    def __init__(self, root: Path, redis: Redis, lease_seconds: float = LEASE_SECONDS) -> None:
        self.root = root
        self.redis = redis
        self.lease_seconds = lease_seconds
        self.folder = BrokenFolder(root / "objects")
        self.free_bytes = 2**30
        """Free space of the disk of the objects, which has 1 GiB."""
        self.holders = Holders()
        self.store = BatchStore(redis, lease_seconds=lease_seconds)
        self.files = self.open_files()

    def open_files(self) -> Files:
        limits = FileLimits(max_file_bytes=2**24, tenant_bytes=2**28, tenant_files=1000)
        disk = Disk(self.folder.root, measure=lambda folder: SimpleNamespace(total=2**30, free=self.free_bytes))
        return Files(Storage(self.folder, disk), FileRegistry(self.redis), limits)

    async def add_member(self, name: str = "one", lane_capacity: int = 1000, **options: Any) -> ClusterMember:
        root = self.root / name
        root.mkdir(exist_ok=True)
        gateway_app = await build_gateway_app(root, **options)
        store = BatchStore(self.redis, lease_seconds=self.lease_seconds)
        loop, counts = asyncio.get_running_loop(), Counter()
        engines = {one.name: Gate(one.engine, lambda: lane_capacity, loop.time) for one in gateway_app.gateway.models}
        gates = with_route_gates(engines, gateway_app.gateway)
        context = BatchContext(
            store,
            self.open_files(),
            gateway_app.gateway,
            self.holders,
            gates,
            lambda how: counts.update([how]),
            lambda tokens: counts.update(wasted=tokens),
        )
        dispatcher = Dispatcher(
            context, lambda lease: self.validate(store, lease), owner=name, lease_seconds=self.lease_seconds
        )
        return ClusterMember(gateway_app, store, context, dispatcher, counts)

    async def validate(self, store: BatchStore, lease: Lease) -> None:
        """Validate a batch in this process; tests of validation itself are elsewhere."""
        batch = lease.batch
        record = await self.files.pin(batch.tenant, batch.input_file_id, batch.id)
        text = b"".join([piece async for piece in self.files.content(record)])
        asked = CheckParameters(
            url="",
            endpoint=batch.endpoint,
            tenant=self.holders.tenants[batch.tenant],
            catalogs=(Catalog((BASE,), {"pirate", "poet"}, virtual=VIRTUAL), Catalog(("small",), set())),
            max_lines=50_000,
            max_line_bytes=2**20,
        )
        found, index = InputCheck(asked).run(BytesIO(text))
        assert not found.errors
        await self.files.storage.write(batch.index_name(lease.fence), pieces(index))
        await store.validated(lease, found.total, found.model, found.model_lines)

    async def submit(
        self, lines: Sequence[Mapping[str, Any]], *, tenant: str = "acme", endpoint: str = CHAT, window: str = "1h"
    ) -> Batch:
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        record = await self.files.create(tenant, "in.jsonl", "batch", pieces(text))
        new = NewBatch(new_batch_id(), tenant, KEY_ID, endpoint, record.id, window, {"for": "a test"})
        return await self.store.create(new, 100)

    async def ended(self, batch: Batch) -> Batch:
        """Wait until no gateway has work left for the batch, and return its record."""

        async def swept() -> bool:
            return not await self.redis.exists(f"loralane:batchwork:{{{batch.tenant}}}:{batch.id}")

        await until(swept)
        return await self.store.get(batch.tenant, batch.id)

    async def lines_of(self, batch: Batch, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        record = await self.files.get(batch.tenant, file_id)
        text = b"".join([piece async for piece in self.files.content(record)])
        assert len(text) == record.bytes
        return [json.loads(line) for line in text.splitlines()]

    async def results(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Lines of the output and the error file of a batch that has ended, by custom_id; each is there once."""
        output = await self.lines_of(batch, batch.output_file_id)
        errors = await self.lines_of(batch, batch.error_file_id)
        told = [line["custom_id"] for line in (*output, *errors)]
        assert len(told) == len(set(told)) == batch.lines.total
        assert len({line["id"] for line in (*output, *errors)}) == len(told)
        return {line["custom_id"]: line for line in output}, {line["custom_id"]: line for line in errors}

    async def assert_clean(self, *members: ClusterMember) -> None:
        """Check that only records and files are left in Redis and in the folder, that each tenant is charged for its
        files alone, and that the members hold nothing."""
        assert not await self.files.storage.list("batches/")
        for tenant in self.holders.tenants:
            records, use = (await self.files.list(tenant)).data, await self.files.use(tenant)
            assert (use.bytes, use.files) == (sum(record.bytes for record in records), len(records))
        for member in members:
            await member.gateway_app.assert_empty()
            assert not member.dispatcher.leases
            assert (member.context.gates[BASE].in_flight, member.dispatcher.backlog.total()) == (0, 0)
        kinds = [key.decode().split(":")[1] async for key in self.redis.scan_iter("loralane:batch*")]
        assert {"batchwork", "batchholders", "batchbits", "batchparts"} & set(kinds) == set()


def chat_line(custom_id: str, text: str = "hi", model: str = BASE, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 20, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def completion_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": COMPLETION,
        "body": {"model": BASE, "prompt": "hi", **body},
    }


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)
