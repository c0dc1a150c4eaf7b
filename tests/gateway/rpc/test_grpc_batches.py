"""Files and batches over gRPC: the same things as over HTTP, in pieces of any size, for the same tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from batch_fakes import batch_options, claimed
from grpc_app import as_key, open_grpc_app, refused, until
from redis.asyncio import Redis

from engine.pb import engine_pb2
from gateway.batches.record import TIMES, BatchError, Tally
from gateway.batches.store import BatchStore
from gateway.pb import batches_pb2 as pb
from gateway.pb.batches_pb2_grpc import BatchesStub
from gateway.rpc import arrival
from gateway.rpc.batches import PLAIN_FIELDS

TEXT = b"line\n" * 100_000
PIECES = [TEXT[:1], b"", *(TEXT[start : start + 90_000] for start in range(1, len(TEXT), 90_000))]


@dataclass
class Api:
    stub: BatchesStub
    store: BatchStore
    gateway_app: Any

    async def send(self, *pieces: bytes, key: str = "acme", **header: Any) -> pb.File:
        messages = [pb.CreateFileRequest(header=pb.FileHeader(**{"filename": "in.jsonl", **header}))]
        messages += [pb.CreateFileRequest(data=piece) for piece in pieces]
        return await self.stub.CreateFile(iter(messages), metadata=as_key(key))

    async def read(self, file_id: str, key: str = "acme", **fields: Any) -> bytes:
        request = pb.ReadFileRequest(file_id=file_id, **fields)
        return b"".join([chunk.data async for chunk in self.stub.ReadFile(request, metadata=as_key(key))])

    async def create(self, key: str = "acme", **fields: Any) -> pb.Batch:
        file = await self.send(b"x\n", key=key)
        request = pb.CreateBatchRequest(**{"input_file_id": file.id, "endpoint": "/v1/completions"} | fields)
        return await self.stub.CreateBatch(request, metadata=as_key(key))

    async def get(self, batch_id: str, key: str = "acme") -> pb.Batch:
        return await self.stub.GetBatch(pb.GetBatchRequest(batch_id=batch_id), metadata=as_key(key))


@pytest.fixture
async def api(tmp_path, valkey: Redis) -> AsyncIterator[Api]:
    root = tmp_path / "gateway"
    root.mkdir()
    async with open_grpc_app(root, **batch_options(valkey, tmp_path / "stored")) as opened:
        yield Api(BatchesStub(opened.channel), BatchStore(valkey), opened.gateway_app)
        await opened.assert_empty()


async def test_a_file_comes_and_goes_in_pieces(api):
    file = await api.send(*PIECES, expires_after_seconds=7200)
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(TEXT), "in.jsonl", "batch", "processed")
    assert file.expires_at - file.created_at == 7200
    assert await api.read(file.id) == TEXT
    assert await api.read(file.id, offset=7, limit=10) == TEXT[7:17]
    assert await api.read(file.id, offset=len(TEXT) - 3) == TEXT[-3:]
    assert await api.read(file.id, offset=len(TEXT)) == b""
    assert await api.stub.GetFile(pb.GetFileRequest(file_id=file.id), metadata=as_key()) == file
    deleted = await api.stub.DeleteFile(pb.DeleteFileRequest(file_id=file.id), metadata=as_key())
    assert (deleted.id, deleted.deleted) == (file.id, True)
    gone = await refused(api.stub.GetFile(pb.GetFileRequest(file_id=file.id), metadata=as_key()))
    assert (gone.code, gone.reason) == ("NOT_FOUND", "FILE_NOT_FOUND")


async def test_files_are_listed_in_pages(api):
    first, second, third = [(await api.send(b"x")).id for _ in range(3)]

    async def page(**fields):
        listed = await api.stub.ListFiles(pb.ListFilesRequest(**fields), metadata=as_key())
        return [file.id for file in listed.data], listed.has_more

    assert await page() == ([third, second, first], False)
    assert await page(limit=2, oldest_first=True) == ([first, second], True)
    assert await page(after=second) == ([first], False)
    assert await page(purpose="batch_output") == ([], False)


async def test_what_is_no_file_is_refused_and_leaves_nothing(api):
    headless = await refused(api.stub.CreateFile(iter([pb.CreateFileRequest(data=b"x")]), metadata=as_key()))
    assert (headless.code, headless.fields) == ("INVALID_ARGUMENT", ["header"])
    assert (await refused(api.stub.CreateFile(iter([]), metadata=as_key()))).fields == ["header"]
    header = pb.CreateFileRequest(header=pb.FileHeader(filename="x"))
    twice = await refused(api.stub.CreateFile(iter([header, header]), metadata=as_key()))
    assert twice.fields == ["data"]
    assert (await refused(api.send(b"x", purpose="fine-tune"))).code == "INVALID_ARGUMENT"
    assert (await refused(api.send())).code == "INVALID_ARGUMENT"
    listed = await api.stub.ListFiles(pb.ListFilesRequest(), metadata=as_key())
    assert not listed.data


async def test_who_stops_sending_is_not_waited_for(api, monkeypatch):
    monkeypatch.setattr(arrival, "ARRIVAL_SECONDS", 0.1)
    monkeypatch.setattr(arrival, "LOOK_SECONDS", 0.05)
    call = api.stub.CreateFile(metadata=as_key())
    await call.write(pb.CreateFileRequest(header=pb.FileHeader(filename="x")))
    await call.write(pb.CreateFileRequest(data=b"x"))
    assert (await refused(call)).code == "DEADLINE_EXCEEDED"
    assert not (await api.stub.ListFiles(pb.ListFilesRequest(), metadata=as_key())).data


@pytest.mark.parametrize("fields", [{"offset": -1}, {"offset": len(TEXT) + 1}, {"limit": -1}])
async def test_ranges_lie_within_the_file(api, fields):
    file = await api.send(*PIECES)
    request = pb.ReadFileRequest(file_id=file.id, **fields)
    chunks = aiter(api.stub.ReadFile(request, metadata=as_key()))
    assert (await refused(anext(chunks))).code == "INVALID_ARGUMENT"


async def test_a_batch_from_its_beginning_to_its_end(api):
    batch = await api.create(metadata={"run": "7"}, completion_window="90m")
    assert (batch.status, batch.completion_window, dict(batch.metadata)) == ("validating", "90m", {"run": "7"})
    assert batch.expires_at - batch.created_at == 5400
    assert not batch.HasField("in_progress_at") and not batch.HasField("eta_seconds")
    assert await api.get(batch.id) == batch
    news = api.stub.WatchBatch(pb.WatchBatchRequest(batch_id=batch.id, interval_seconds=0.1), metadata=as_key())
    seen = aiter(news)
    assert (await anext(seen)).status == "validating"
    lease = await claimed(api.store, "validate")
    assert await api.store.validated(lease, 3, "tiny")
    running = await anext(seen)
    assert (running.status, running.request_counts.total, running.model) == ("in_progress", 3, "tiny")
    shard = await claimed(api.store, "shard")
    assert await api.store.commit(shard, ["a"], [0, 1], Tally(1, 1, 30, 10, 7))
    counted = await anext(seen)
    assert counted.request_counts == pb.RequestCounts(total=3, completed=1, failed=1)
    assert counted.usage == pb.BatchUsage(input_tokens=30, cached_tokens=10, output_tokens=7, total_tokens=37)
    cancelled = await api.stub.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id), metadata=as_key())
    assert cancelled.status == (await anext(seen)).status == "cancelling"
    await api.store.release(shard)
    assert await api.store.finished(await claimed(api.store, "finalize"), "file-1", None)
    statuses = [told.status async for told in seen]
    assert statuses[-1] == "cancelled"
    again = await api.stub.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id), metadata=as_key())
    assert (again.status, again.output_file_id, again.HasField("error_file_id")) == ("cancelled", "file-1", False)


async def test_why_a_file_was_refused(api):
    batch = await api.create()
    lease = await claimed(api.store, "validate")
    await api.store.invalid(lease, [BatchError("duplicate_custom_id", "twice", "custom_id", 17), BatchError("x", "y")])
    failed = await api.get(batch.id)
    assert failed.status == "failed"
    assert failed.errors[0] == pb.BatchError(code="duplicate_custom_id", message="twice", param="custom_id", line=17)
    assert not failed.errors[1].HasField("line")


async def test_batches_are_listed_in_pages(api):
    ids = [(await api.create()).id for _ in range(3)][::-1]
    listed = await api.stub.ListBatches(pb.ListBatchesRequest(limit=2), metadata=as_key())
    assert (len(listed.data), listed.has_more) == (2, True)
    rest = await api.stub.ListBatches(pb.ListBatchesRequest(after=listed.data[-1].id), metadata=as_key())
    assert {batch.id for batch in (*listed.data, *rest.data)} == set(ids)
    refusal = await refused(api.stub.ListBatches(pb.ListBatchesRequest(limit=101), metadata=as_key()))
    assert refusal.fields == ["limit"]


async def test_how_long_it_will_take(api):
    """A line takes 90 ms of the device, of which batch work gets half."""
    batch = await api.create()
    await api.store.validated(await claimed(api.store, "validate"), 11)
    lane = engine_pb2.LaneStats(lane=engine_pb2.LANE_BATCH)
    api.gateway_app.engine.picture = engine_pb2.EngineStats(lanes=[lane], batch_share=0.5)
    assert not (await api.get(batch.id)).HasField("eta_seconds"), "the gateway does not know yet what a line takes"
    shard = await claimed(api.store, "shard")
    assert await api.store.commit(shard, ["a"], [0], Tally(1, 0, 30, 10, 7, 90_000))
    assert (await api.get(batch.id)).eta_seconds == pytest.approx(10 * 0.09 / 0.5)


async def test_others_see_nothing_of_it(api):
    batch = await api.create()
    for call in (
        api.stub.GetBatch(pb.GetBatchRequest(batch_id=batch.id), metadata=as_key("globex")),
        api.stub.CancelBatch(pb.CancelBatchRequest(batch_id=batch.id), metadata=as_key("globex")),
        api.stub.GetFile(pb.GetFileRequest(file_id=batch.input_file_id), metadata=as_key("globex")),
        anext(aiter(api.stub.WatchBatch(pb.WatchBatchRequest(batch_id=batch.id), metadata=as_key("globex")))),
        api.stub.GetBatch(pb.GetBatchRequest(batch_id="nonsense"), metadata=as_key()),
    ):
        assert (await refused(call)).code == "NOT_FOUND"
    held = await refused(api.stub.DeleteFile(pb.DeleteFileRequest(file_id=batch.input_file_id), metadata=as_key()))
    assert (held.code, held.reason) == ("FAILED_PRECONDITION", "FILE_IN_USE")
    assert (await refused(api.get(batch.id, key="admin"))).code == "PERMISSION_DENIED"
    assert (await refused(api.stub.GetBatch(pb.GetBatchRequest()))).code == "UNAUTHENTICATED"
    listed = await api.stub.ListBatches(pb.ListBatchesRequest(), metadata=as_key("globex"))
    assert not listed.data


async def test_a_watch_ends_with_the_server(tmp_path, valkey):
    options = batch_options(valkey, tmp_path / "stored")
    async with asyncio.timeout(60), open_grpc_app(tmp_path, grace_seconds=600, **options) as opened:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}")
        api = Api(BatchesStub(channel), BatchStore(valkey), opened.gateway_app)
        batch = await api.create()
        request = pb.WatchBatchRequest(batch_id=batch.id, interval_seconds=60)
        watching = api.stub.WatchBatch(request, metadata=as_key())
        seen = aiter(watching)
        await anext(seen)
    assert [told async for told in seen] == []
    assert await watching.code() is grpc.StatusCode.OK
    await channel.close()


async def test_a_tenant_has_a_bounded_number_of_watches(api, monkeypatch):
    monkeypatch.setattr(api.gateway_app.gateway.watches, "most", 2)
    own, others = await api.create(), await api.create(key="globex")

    def watch(batch: pb.Batch = own, key: str = "acme") -> Any:
        return api.stub.WatchBatch(pb.WatchBatchRequest(batch_id=batch.id), metadata=as_key(key))

    first, second = watch(), watch()
    for call in (first, second):
        assert (await call.read()).id == own.id
    refusal = await refused(watch().read())
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED")
    assert "you have 2 open streams" in refusal.message and "close some" in refusal.message
    assert (await api.get(own.id)).id == own.id
    elsewhere = watch(others, "globex")
    assert (await elsewhere.read()).id == others.id
    first.cancel()
    await until(lambda: api.gateway_app.gateway.watches._held["acme"] == 1)
    third = watch()
    assert (await third.read()).id == own.id
    for call in (second, third, elsewhere):
        call.cancel()
    await until(lambda: not api.gateway_app.gateway.watches._held)


def test_every_field_of_a_batch_is_told():
    names = {field.name for field in pb.Batch.DESCRIPTOR.fields}
    apart = {*TIMES, "model", "request_counts", "usage", "metadata", "errors", "eta_seconds"}
    assert names == set(PLAIN_FIELDS) | apart


async def test_a_watch_ends_when_its_key_is_refused(api):
    batch = await api.create()
    request = pb.WatchBatchRequest(batch_id=batch.id, interval_seconds=0.1)
    watching = api.stub.WatchBatch(request, metadata=as_key())
    assert (await watching.read()).id == batch.id
    del api.gateway_app.services.accounts._callers["sk-acme"]
    async with asyncio.timeout(30):
        assert (await refused(watching.read())).code == "UNAUTHENTICATED"
