"""Batches over HTTP, as OpenAI's client asks for them, and their validation by a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from batch_fakes import batch_options, claimed, wanted
from fakes import ACME, BASE, GLOBEX, FakeEngine, GatewayApp, build_gateway_app, write_adapter
from file_fakes import objects, pieces, until
from openai import AsyncOpenAI, BadRequestError, ConflictError, InternalServerError, NotFoundError, RateLimitError
from redis.asyncio import Redis

from gateway.adapters.names import AdapterNames
from gateway.batches import validation
from gateway.batches.finalize import StraySweeper, sweep
from gateway.batches.lease import Lease
from gateway.batches.line_reader import read_index
from gateway.batches.service import Batches
from gateway.batches.store import BatchStore
from gateway.batches.validation import Validator
from gateway.core.errors import Fault, unavailable
from gateway.core.space import Disk
from gateway.core.tenants import Tenant
from gateway.files.service import Files
from gateway.files.sweeper import NameAgeTracker
from tests.gateway.batches.test_batch_input import CHAT, asked, line, text_of

MAX_OPEN = 3


@dataclass
class BatchApi:
    gateway_app: GatewayApp
    store: BatchStore
    files: Files
    batches: Batches
    folder: Path
    tenant: Tenant = ACME

    @property
    def client(self) -> AsyncOpenAI:
        return self.gateway_app.openai()

    async def brought(self, text: bytes, tenant: str = "acme") -> str:
        return (await self.files.create(tenant, "lines.jsonl", "batch", pieces(text))).id

    async def validated(self) -> Lease:
        """After the validation of the one batch there is."""
        lease = await claimed(self.store, "validate")
        await self.validator.run(lease)
        return lease

    @property
    def validator(self) -> Validator:
        models = self.gateway_app.gateway.models
        return Validator(self.store, self.files, lambda name: self.tenant, models, 1000, 10_000)


@asynccontextmanager
async def open_api(valkey: Redis, tmp_path: Path, **more: Any) -> AsyncIterator[BatchApi]:
    folder = tmp_path / "störed 100%25"
    options = batch_options(valkey, folder, MAX_OPEN)
    gateway_app = await build_gateway_app(tmp_path, **options, **more)
    yield BatchApi(gateway_app, BatchStore(valkey, timeout=30.0), options["files"], options["batches"], folder)
    await gateway_app.assert_empty()


@pytest.fixture
async def api(valkey: Redis, tmp_path) -> AsyncIterator[BatchApi]:
    async with open_api(valkey, tmp_path) as api:
        yield api


async def create(api: BatchApi, input_file_id: str, **more):
    terms = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": input_file_id, **more}
    return await api.client.batches.create(**terms)


async def test_the_official_client_creates_polls_lists_and_cancels(api):
    source = await api.brought(text_of([line("1", model=BASE)]))
    batch = await create(api, source, metadata={"name": "nightly"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"name": "nightly"})
    assert (batch.endpoint, batch.input_file_id, batch.completion_window) == (CHAT, source, "24h")
    assert batch.expires_at == batch.created_at + 86_400
    assert await api.client.batches.retrieve(batch.id) == batch
    others = [await create(api, source, completion_window=window) for window in ("90s", "7d")]
    listed = [found.id async for found in api.client.batches.list(limit=2)]
    assert listed == [others[1].id, others[0].id, batch.id]
    cancelled = await api.client.batches.cancel(batch.id)
    assert (cancelled.status, cancelled.cancelling_at is not None) == ("cancelling", True)
    assert await api.client.batches.cancel(batch.id) == cancelled


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "/v1/moderations"),
        *(("completion_window", window) for window in ("tomorrow", "0s", "31d", "-1h", "24", "1.5h")),
        ("metadata", {str(number): "" for number in range(17)}),
        ("metadata", {"k" * 65: "v"}),
        ("metadata", {"key": "v" * 513}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 3599}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 30 * 86_400 + 1}),
    ],
)
async def test_what_is_refused_is_named(api, field, value):
    with pytest.raises(BadRequestError) as refusal:
        await create(api, await api.brought(b"{}"), **{field: value})
    assert refusal.value.param.partition(".")[0] == field
    assert (await api.client.batches.list()).data == []


async def test_an_input_must_be_the_tenants_own_and_of_the_right_purpose(api):
    foreign = await api.brought(b"{}", "globex")
    for missing in (foreign, "file-" + "0" * 24, "nonsense"):
        with pytest.raises(NotFoundError) as refusal:
            await create(api, missing)
        assert (refusal.value.code, refusal.value.param) == ("file_not_found", "input_file_id")
    output = await api.files.adopt("acme", "file-" + "1" * 24, "out.jsonl", pieces(b"{}"))
    with pytest.raises(BadRequestError) as refusal:
        await create(api, output.id)
    assert refusal.value.param == "input_file_id"
    await api.files.delete("acme", output.id)


async def test_lines_of_a_strict_tenant_are_refused_their_unknown_fields(api):
    strict = line("1", body={**line("1", model=BASE)["body"], "chat_id": 1})
    batch = await create(api, await api.brought(text_of([strict])))
    api.tenant = replace(ACME, unknown_fields="refuse")
    await api.validated()
    failed = await api.client.batches.retrieve(batch.id)
    assert (failed.status, [error.param for error in failed.errors.data]) == ("failed", ["body.chat_id"])


async def test_a_tenant_has_only_so_many_open(api):
    source = await api.brought(b"{}")
    for _ in range(MAX_OPEN):
        await create(api, source)
    with pytest.raises(RateLimitError) as refusal:
        await create(api, source)
    assert refusal.value.code == "insufficient_quota"
    assert refusal.value.response.headers["x-should-retry"] == "false"


async def test_an_input_cannot_be_deleted_until_its_batch_has_been_swept(api):
    source = await api.brought(text_of([line("1", model=BASE)]))
    batch = await create(api, source)
    with pytest.raises(ConflictError):
        await api.client.files.delete(source)
    await api.validated()
    await api.client.batches.cancel(batch.id)
    await api.store.finished(await claimed(api.store, "finalize"), None, None)
    assert await api.files.storage.list(f"batches/{batch.id}/")
    await sweep(api.store, api.files, await claimed(api.store, "sweep"))
    await api.client.files.delete(source)
    assert objects(api.folder) == []


async def test_nothing_is_left_of_a_batch_that_could_not_be_created(api, monkeypatch):
    async def away(*_):
        raise unavailable(Fault.REGISTRY_UNAVAILABLE, "Redis is away")

    source = await api.brought(b"{}")
    monkeypatch.setattr(api.batches._store, "create", away)
    with pytest.raises(InternalServerError) as refusal:
        await create(api, source)
    assert (refusal.value.status_code, refusal.value.code) == (503, "registry_unavailable")
    await api.client.files.delete(source)


async def test_an_administrator_has_no_batches(api):
    async with api.gateway_app.client("sk-admin") as client:
        assert (await client.get("/v1/batches")).status_code == 403


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=ten", "after=batch_x"])
async def test_a_page_that_cannot_be(api, query):
    async with api.gateway_app.client() as client:
        refusal = (await client.get(f"/v1/batches?{query}")).json()["error"]
    assert refusal["param"] == query.partition("=")[0]


async def test_an_unknown_batch(api):
    for batch_id in ("batch_" + "0" * 24, "nonsense"):
        with pytest.raises(NotFoundError) as refusal:
            await api.client.batches.retrieve(batch_id)
        assert refusal.value.code == "batch_not_found"


async def test_a_sound_input_becomes_shards_in_the_order_of_its_index(api):
    lines = [line("1", model="pirate"), line("2", model=BASE), line("3", model="captain")]
    batch = await create(api, await api.brought(text_of(lines)))
    await api.validated()
    found = await api.client.batches.retrieve(batch.id)
    assert (found.status, found.request_counts.total, found.model) == ("in_progress", 3, None)
    entries = await read_index(api.files.storage, await claimed(api.store, "shard"))
    assert [(entry.position, entry.line) for entry in entries] == [(0, 2), (1, 1), (2, 3)]


async def test_an_input_that_is_not_sound_fails_the_batch(api, monkeypatch):
    monkeypatch.setattr(validation, "UNHEARD_SECONDS", 0.0)
    batch = await create(api, await api.brought(text_of([line("1", model=BASE), line("2", model="poets")])))
    await api.validated()
    found = await api.client.batches.retrieve(batch.id)
    assert (found.status, found.output_file_id, found.error_file_id) == ("failed", None, None)
    assert [(error.code, error.param, error.line) for error in found.errors.data] == [
        ("model_not_found", "body.model", 2)
    ]


async def test_a_batch_is_refused_a_model_that_a_request_is_refused(valkey, tmp_path, monkeypatch):
    """Two gateways may load one name into two models at the same time: the first model's adapter is meant, here one of
    another tenant."""
    monkeypatch.setattr(validation, "UNHEARD_SECONDS", 0.0)
    async with open_api(valkey, tmp_path, others={"small": FakeEngine()}) as api:
        source = str(write_adapter(tmp_path, "tone"))
        for model, tenants in zip(api.gateway_app.gateway.models, ([GLOBEX.name], ()), strict=True):
            model.adapters.share_names(AdapterNames(()))
            await model.adapters.load("tone", source, tenants=tenants)
        with pytest.raises(NotFoundError) as refusal:
            await api.client.completions.create(model="tone", prompt="hi")
        batch = await create(api, await api.brought(text_of([line("1", model="tone")])))
        await api.validated()
        failed = await api.client.batches.retrieve(batch.id)
    assert [(error.code, error.line) for error in failed.errors.data] == [(refusal.value.code, 1)]


async def test_an_unknown_model_is_looked_for_again(api):
    batch = await create(api, await api.brought(text_of([line("1", model="newest")])))
    await api.validated()
    assert (await api.client.batches.retrieve(batch.id)).status == "validating"


async def test_an_input_that_is_gone_fails_the_batch(api):
    lost = await api.store.create(wanted(), 9)
    await api.validated()
    found = await api.client.batches.retrieve(lost.id)
    assert (found.status, [error.code for error in found.errors.data]) == ("failed", ["file_not_found"])
    with pytest.raises(ConflictError) as refusal:
        await api.client.batches.cancel(lost.id)
    assert refusal.value.code == "batch_conflict"


async def test_a_storage_that_fails_is_tried_again(api):
    batch = await create(api, await api.brought(text_of([line("1")])))
    (api.folder / next(name for name in objects(api.folder))).unlink()
    await api.validated()
    assert (await api.client.batches.retrieve(batch.id)).status == "validating"


async def test_who_is_told_to_stop_leaves_no_process(api, monkeypatch):
    started = []
    spawn = asyncio.create_subprocess_exec

    async def noted(*words, **more):
        started.append(await spawn(*words, **more))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    await create(api, await api.brought(text_of([line("1")])))
    work = asyncio.create_task(api.validated())
    await until(lambda: bool(started))
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert started[0].returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)


async def test_objects_without_an_owner_leave_the_storage_after_a_while(api):
    now = 0.0
    sweeper = StraySweeper(api.files.storage, api.store, NameAgeTracker(60.0, lambda: now))
    await create(api, await api.brought(text_of([line("1", model=BASE)])))
    await api.validated()
    late = "batches/batch_" + "0" * 24 + "/parts/000000-1-1.out"
    kept = await api.files.storage.list("batches/")
    await api.files.storage.write(late, pieces(b"late"))
    assert await sweeper.sweep() == []
    now = 60.0
    assert await sweeper.sweep() == [late]
    assert [name for name in objects(api.folder) if name.startswith("batches")] == kept


def test_a_process_that_validates_imports_no_more_than_it_needs():
    code = "import sys, gateway.batches.validate; print({'numpy', 'redis', 'structlog'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


async def test_a_process_that_validates_ends_with_who_asked(tmp_path):
    os.mkfifo(tmp_path / "never written")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.batches.validate"), stdin=asyncio.subprocess.PIPE
    )
    process.stdin.write(msgspec.json.encode(asked(url=str(tmp_path / "never written"))) + b"\n")
    process.stdin.close()
    async with asyncio.timeout(30):
        assert await process.wait() == 1


async def test_a_batch_without_room_for_answers_is_refused(api):
    """Because the tenant's files and answers have all their bytes, or because a disk is almost full."""
    file_id = await api.brought(b"{}\n")
    usage = SimpleNamespace(total=2**30, free=2**30)
    api.batches._disk = Disk(api.folder, measure=lambda folder: usage)
    create = {"endpoint": CHAT, "input_file_id": file_id, "completion_window": "24h"}
    async with api.client as client:
        await api.files.charge_answers("acme", "batch_1", api.files.limits.tenant_bytes)
        with pytest.raises(RateLimitError, match="delete some"):
            await client.batches.create(**create)
        await api.files.refund_answers("acme", "batch_1")
        usage.free = 2**29 - 1
        with pytest.raises(InternalServerError, match="almost full") as caught:
            await client.batches.create(**create)
        assert caught.value.status_code == 507
        usage.free = 2**29
        made = await client.batches.create(**create)
        await client.batches.cancel(made.id)
