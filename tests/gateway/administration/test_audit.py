"""The audit log: what it has of each change, what it never has, and what happens while its store is away."""

from __future__ import annotations

import asyncio
import json

import grpc
import msgspec
import pytest
from admin_room import OWNER_KEY, AdminRoom, admin_room
from fakes import AWAY, write_adapter
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from served import on_port
from typer.testing import CliRunner

from gateway.accounts.record import ACCOUNTS
from gateway.accounts.registry import AccountRegistry
from gateway.administration.trail import recording_seeds
from gateway.api_schema.admins import AuditEntry
from gateway.audit.log import AuditLog, AuditQuery
from gateway.audit.redaction import REDACTED, redacted
from gateway.audit.store import MemoryAuditStore, RedisAuditStore, Retention
from gateway.cli.main import app as cli
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Tenant, hash_key
from gateway.pb import tenants_pb2
from gateway.pb.tenants_pb2_grpc import TenantAdminStub
from gateway.registry.memory import MemoryRecordStore
from gateway.registry.store import StoreAway
from gateway.rpc.api import GrpcServer

AUDIT, TENANTS, KEYS = "/admin/v1/audit", "/admin/v1/tenants", "/admin/v1/keys"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("gateway.registry.store.CALL_SECONDS", 60.0)


@pytest.fixture
async def room(tmp_path):
    async with admin_room(tmp_path) as found:
        yield found


async def newest(room: AdminRoom) -> AuditEntry:
    [entry] = await room.entries(limit=1)
    return entry


async def test_a_change_is_recorded_with_who_when_where_and_what(room):
    async with room.app.client(room.secrets["accounts"]) as client:
        headers = {"x-request-id": "change-1"}
        await client.patch(f"{TENANTS}/acme", json={"weight": 2.5, "adapters": ["poet"]}, headers=headers)
    entry = await newest(room)
    assert (entry.by, entry.role, entry.protocol, entry.address) == ("accounts", "accounts", "http", "127.0.0.1")
    assert (entry.request_id, entry.action, entry.object) == ("change-1", "tenants.change", "tenants/acme")
    assert (entry.before, entry.after) == ({"weight": 1.0, "adapters": ["*"]}, {"weight": 2.5, "adapters": ["poet"]})
    assert (entry.result, entry.at > 0) == ("ok", True)


async def test_reading_is_not_recorded_and_neither_is_what_a_role_forbids(room):
    before = await room.entries()
    async with room.app.client(room.secrets["viewer"]) as client:
        assert (await client.get(TENANTS)).status_code == 200
        assert (await client.delete(f"{TENANTS}/acme")).status_code == 403
    assert await room.entries() == before


async def test_a_change_that_fails_is_recorded_with_its_error(room):
    async with room.app.client(OWNER_KEY) as client:
        await client.post(f"{TENANTS}/unknown/disable")
        await client.post(TENANTS, json={"name": "a/b"})
    names, unknown = await room.entries(limit=2)
    assert (unknown.action, unknown.object, unknown.result) == (
        "tenants.disable",
        "tenants/unknown",
        "tenant_not_found",
    )
    assert (names.object, names.result, names.before, names.after) == ("tenants/a/b", "invalid_request", {}, {})


async def test_every_kind_of_change_over_http(room, tmp_path):
    write_adapter(tmp_path, "bard")
    async with room.app.client(OWNER_KEY) as client:

        async def change(method: str, path: str, body: object = None, **query: str) -> AuditEntry:
            answer = await client.request(method, path, json=body, params=query)
            assert answer.status_code < 300, answer.text
            return await newest(room)

        created = await change("POST", TENANTS, {"name": "initech", "weight": 2.0})
        assert (created.object, created.before, created.after["weight"]) == ("tenants/initech", {}, 2.0)
        disabled = await change("POST", f"{TENANTS}/initech/disable")
        assert (disabled.before, disabled.after) == ({"disabled": False}, {"disabled": True})
        key = await change("POST", KEYS, {"tenant": "initech", "label": "laptop"})
        key_id = key.after["id"]
        assert (key.object, key.after["tenant"], key.before) == (f"keys/{key_id}", "initech", {})
        rotated = await change("POST", f"{KEYS}/{key_id}/rotate")
        assert (rotated.object, rotated.before) == (f"keys/{key_id}", {"disabled": False})
        assert rotated.after["disabled"] and rotated.after["replaced_by"] != key_id
        gone = await change("DELETE", f"{TENANTS}/initech")
        assert (gone.before["weight"], gone.after) == (2.0, {})
        loaded = await change("POST", "/admin/v1/adapters", {"name": "bard", "source": "bard"})
        assert (loaded.action, loaded.object, loaded.after["source"]) == ("adapters.create", "adapters/bard", "bard")
        pinned = await change("POST", "/admin/v1/adapters/bard/pin")
        assert (pinned.before, pinned.after) == ({"pinned": False}, {"pinned": True})
        unloaded = await change("POST", "/v1/unload_lora_adapter", {"lora_name": "bard"})
        assert (unloaded.object, unloaded.before["source"], unloaded.after) == ("adapters/bard", "bard", {})
        paused = await change("POST", "/admin/v1/lanes/batch/pause")
        assert (paused.action, paused.object) == ("lanes.pause", "lanes/batch")
        admin = await change("POST", "/admin/v1/admins", {"name": "ci", "role": "viewer"})
        assert (admin.object, admin.after["role"], admin.by) == ("admins/ci", "viewer", "boss")
        admin = await change("PATCH", "/admin/v1/admins/ci", {"role": "operator"})
        assert (admin.before, admin.after) == ({"role": "viewer"}, {"role": "operator"})


async def test_grpc_writes_the_same_entries(room):
    async with (
        GrpcServer(room.app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = TenantAdminStub(channel)
        metadata = (("authorization", f"Bearer {OWNER_KEY}"), ("x-request-id", "change-2"))
        await stub.DisableTenant(tenants_pb2.DisableTenantRequest(name="acme"), metadata=metadata)
        entry = await newest(room)
        assert (entry.protocol, entry.address, entry.request_id) == ("grpc", "127.0.0.1", "change-2")
        assert (entry.action, entry.object, entry.after) == ("tenants.disable", "tenants/acme", {"disabled": True})
        await stub.DisableTenant(tenants_pb2.DisableTenantRequest(name="acme", enable=True), metadata=metadata)
        assert (await newest(room)).action == "tenants.enable"
        made = await stub.CreateKey(tenants_pb2.CreateKeyRequest(tenant="acme"), metadata=metadata)
        assert (await newest(room)).object == f"keys/{made.key.id}"
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.DeleteTenant(tenants_pb2.DeleteTenantRequest(name="unknown"), metadata=metadata)
        assert (await newest(room)).result == "tenant_not_found"


async def test_what_the_configuration_changes_is_recorded(caplog):
    audit, store = AuditLog(MemoryAuditStore()), MemoryRecordStore(ACCOUNTS)
    registry = AccountRegistry(store, lambda tenants: None, seeded=recording_seeds(audit))
    await registry.start()
    await registry.seed(Tenant("acme"), [hash_key("sk-one")])
    await registry.administrators.seed([(Administrator("ci", AdminRole.VIEWER), hash_key("sk-ci"))])
    await registry.seed(Tenant("acme", weight=2.0), [])
    await registry.seed(Tenant("acme", weight=2.0), [])
    await registry.administrators.seed([(Administrator("other", AdminRole.VIEWER), hash_key("sk-other"))])
    entries = (await audit.page(AuditQuery())).entries[::-1]
    key = f"keys/{hash_key('sk-one')[:12]}"
    objects = [key, "tenants/acme", "admins/ci", key, "tenants/acme", "admins/ci", "admins/other"]
    assert [entry.object for entry in entries] == objects
    assert {(entry.by, entry.action, entry.result) for entry in entries} == {
        ("configuration", "configuration.apply", "ok")
    }
    assert (entries[4].before, entries[4].after) == ({"weight": 1.0}, {"weight": 2.0})
    assert (entries[3].after, entries[5].after) == ({}, {})
    await registry.close()


async def test_no_secret_is_in_the_log(tmp_path, valkey, capsys):
    """Every secret that is made or sent here is searched for in the whole stream, and in what is printed."""
    async with admin_room(tmp_path, RedisAuditStore(valkey, Retention(), "t:")) as room:
        secrets = await use_secrets(room)
    text = b"".join([row[b"entry"] for _, row in await valkey.xrange("t:{audit}")]).decode()
    assert text.count("admins/ci") >= 2 and "keys.rotate" in text and "grpc" in text
    printed = capsys.readouterr()
    for secret in secrets:
        for place in (text, printed.out, printed.err):
            assert secret not in place
            assert hash_key(secret) not in place


async def use_secrets(room: AdminRoom) -> list[str]:
    """Make and send secrets in every way, and return them."""
    secrets = [*room.secrets.values(), "hunter2", "sk-typed-by-mistake-in-a-path", "s3cr3t-query"]
    async with room.app.client(OWNER_KEY) as client:

        async def made(method: str, path: str, body: object = None) -> dict:
            answer = (await client.request(method, path, json=body)).json()
            secrets.append(answer.get("key", "hunter2"))
            return answer

        key = await made("POST", KEYS, {"tenant": "acme", "label": "sk-typed-by-mistake-in-a-path"})
        await made("POST", f"{KEYS}/{key['id']}/rotate")
        await made("POST", "/admin/v1/admins", {"name": "ci", "role": "owner"})
        await made("POST", "/admin/v1/admins/ci/rotate")
        await made("DELETE", f"{TENANTS}/sk-typed-by-mistake-in-a-path")
        await made("DELETE", f"{KEYS}/{hash_key(key['key'])}")
        source = "https://me:hunter2@example.com/a?sig=s3cr3t-query"
        await made("POST", "/admin/v1/adapters", {"name": "bard", "source": source})
        await made("DELETE", "/admin/v1/adapters/https://me:hunter2@example.com/a")
        await made("POST", "/admin/v1/engines", {"name": "e", "address": "https://me:hunter2@127.0.0.1:1"})
    async with (
        GrpcServer(room.app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        request = tenants_pb2.CreateKeyRequest(tenant="acme", label="of https://me:hunter2@example.com")
        metadata = (("authorization", f"Bearer {OWNER_KEY}"),)
        secrets.append((await TenantAdminStub(channel).CreateKey(request, metadata=metadata)).secret)
    return secrets


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=2000), st.integers())
def test_redaction_bounds_and_hides(text, number):
    nested = {"key": text, "api_token": [text], "list": [text, {"password": text}], "n": number, "key_id": "abc"}
    found = redacted(nested)
    assert (found["n"], found["key_id"]) == (number, "abc")
    assert found["key"] == (REDACTED if text else "")
    assert found["api_token"] == REDACTED
    assert found["list"][1]["password"] == (REDACTED if text else "")
    assert len(found["list"][0]) <= 256
    msgspec.json.encode(found)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@host/path", f"https://{REDACTED}@host/path"),
        ("redis://:p@host:1/0", f"redis://{REDACTED}@host:1/0"),
        ("s3://bucket/a?token=x", f"s3://bucket/a?{REDACTED}"),
        ("a" * 64, "a" * 12),
        ("https://h/dir/?sig=abc", f"https://h/dir/?{REDACTED}"),
        ("sk-" + "x" * 43, REDACTED),
        ("the key sk-demo-admin", f"the key {REDACTED}"),
        ("desk-assistant", "desk-assistant"),
        ("org/name", "org/name"),
        ("line\nbreak\x1b[31m", "line?break?[31m"),
    ],
)
def test_what_is_redacted_in_a_text(text, shown):
    assert redacted(text) == shown


class BrokenStore(MemoryAuditStore):
    """Fails while `is_away`, or from the second write on if `breaks` is set."""

    is_away = False
    breaks = False

    async def add(self, entry: bytes, now: float, replaces: str = "", *, of_tenant: bool = False) -> str:
        if self.is_away:
            raise StoreAway("Redis does not answer")
        self.is_away = self.breaks
        return await super().add(entry, now, replaces, of_tenant=of_tenant)


async def test_a_change_that_cannot_be_recorded_is_not_made(tmp_path):
    async with admin_room(tmp_path, store := BrokenStore()) as room:
        store.is_away = True
        async with room.app.client(OWNER_KEY) as client:
            refused = await client.delete(f"{TENANTS}/acme")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "audit_unavailable")
            assert "retry-after" in refused.headers
            assert (await client.get(TENANTS)).status_code == 200
        assert room.accounts.tenant("acme")


async def test_a_store_that_is_lost_during_a_change_leaves_an_unknown_result(tmp_path):
    async with admin_room(tmp_path, store := BrokenStore()) as room:
        store.breaks = True
        async with room.app.client(OWNER_KEY) as client:
            assert (await client.post(f"{TENANTS}/acme/disable")).status_code == 200
        entry = await newest(room)
        assert (entry.action, entry.object, entry.result) == ("tenants.disable", "tenants/acme", "unknown")
        assert room.accounts.tenant("acme").disabled


async def test_a_change_ends_and_is_recorded_after_its_caller_left(room, monkeypatch):
    begun, go_on = asyncio.Event(), asyncio.Event()
    disable = room.accounts.disable

    async def slow(name, disabled):
        begun.set()
        await go_on.wait()
        return await disable(name, disabled)

    monkeypatch.setattr(room.accounts, "disable", slow)
    async with room.app.client(OWNER_KEY) as client:
        asked = asyncio.create_task(client.post(f"{TENANTS}/acme/disable"))
        await begun.wait()
        assert (await newest(room)).result == "unknown"
        asked.cancel()
        await asyncio.wait([asked])
        go_on.set()
        async with asyncio.timeout(30):
            while (await newest(room)).result != "ok":
                await asyncio.sleep(0)
    assert room.accounts.tenant("acme").disabled


@pytest.fixture(params=["memory", "redis"])
def make_store(request, valkey):
    def make(retention: Retention = Retention()):  # noqa: B008
        return MemoryAuditStore(retention) if request.param == "memory" else RedisAuditStore(valkey, retention, "t:")

    return make


def entry_of(number: int, **more: object) -> AuditEntry:
    fields = {"at": 1000.0 + number, "by": "a", "action": "tenants.change", "object": f"tenants/t{number}"}
    return AuditEntry(**{**fields, "result": "ok", **more})


async def test_pages_have_each_entry_once(make_store):
    audit = AuditLog(make_store(Retention(days=20_000)), lambda: 2000.0)
    for number in range(25):
        await audit.end("", entry_of(number, by="b" if number % 5 == 0 else "a"))
    found, before = [], ""
    while before is not None:
        page = await audit.page(AuditQuery(limit=10, before=before))
        found += page.entries
        before = page.next
    assert [entry.object for entry in found] == [f"tenants/t{number}" for number in reversed(range(25))]
    assert [entry.object for entry in (await audit.page(AuditQuery(by="b"))).entries] == [
        f"tenants/t{number}" for number in (20, 15, 10, 5, 0)
    ]
    assert len((await audit.page(AuditQuery(since=1020.0))).entries) == 5
    assert [one.object for one in (await audit.page(AuditQuery(object="tenants/t1"))).entries] == ["tenants/t1"]
    assert len((await audit.page(AuditQuery(object="tenants"))).entries) == 25
    assert (await audit.page(AuditQuery(object="tenant"))).entries == []
    later = await audit.page(AuditQuery(after=found[5].id))
    assert [entry.id for entry in later.entries] == [entry.id for entry in found[4::-1]]


async def test_the_log_keeps_what_its_retention_says(make_store):
    now = [0.0]
    store = make_store(Retention(days=1, entries=5))
    audit = AuditLog(store, lambda: now[0])
    for number in range(8):
        await audit.end("", entry_of(number))
    assert [entry.object for entry in (await audit.page(AuditQuery())).entries] == [
        f"tenants/t{number}" for number in (7, 6, 5, 4, 3)
    ]
    now[0] = 4_000_000_000.0  # long after what Redis's clock says now
    await audit.end("", entry_of(9))
    assert len((await audit.page(AuditQuery())).entries) <= 1


async def test_a_filter_that_finds_nothing_reads_a_bounded_part(make_store, monkeypatch):
    monkeypatch.setattr("gateway.audit.log.CHUNK", 2)
    monkeypatch.setattr("gateway.audit.log.MOST_CHUNKS", 3)
    audit = AuditLog(make_store(), lambda: 2000.0)
    for number in range(10):
        await audit.end("", entry_of(number))
    page = await audit.page(AuditQuery(by="absent"))
    assert page.entries == [] and page.next
    page = await audit.page(AuditQuery(by="absent", before=page.next))
    assert (page.entries, page.next) == ([], None)


async def test_redis_that_is_away_is_said(monkeypatch):
    monkeypatch.setattr("gateway.registry.store.CALL_SECONDS", 2.0)
    async with Redis.from_url(AWAY) as client:
        audit = AuditLog(RedisAuditStore(client, Retention()))
        for call in (audit.begin(entry_of(1)), audit.page(AuditQuery())):
            with pytest.raises(ApiError) as caught:
                await call
            assert caught.value.fault is Fault.AUDIT_UNAVAILABLE
        await audit.end("1-0", entry_of(1))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"since": "yesterday"}, "since"),
        ({"since": "9" * 400}, "since"),
        ({"before": "x"}, "before"),
        ({"after": "-1"}, "after"),
        ({"after": "1-0", "before": "2-0"}, "after"),
        ({"unknown": "1"}, "unknown"),
    ],
)
async def test_bad_queries_are_refused_by_name(room, query, param):
    async with room.app.client(room.secrets["viewer"]) as client:
        refused = await client.get(AUDIT, params=query)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("since", ["2026-01-01", "2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "1767225600"])
async def test_times_are_read_in_every_form(room, since):
    await room.audit.end("", entry_of(1, at=1767225599.0, object="x/old"))
    await room.audit.end("", entry_of(1, at=1767225601.0, object="x/new"))
    async with room.app.client(room.secrets["viewer"]) as client:
        found = (await client.get(AUDIT, params={"since": since, "object": "x"})).json()
    assert [entry["object"] for entry in found["entries"]] == ["x/new"]


async def test_a_follower_in_a_terminal_prints_each_change_once(room):
    async with on_port(room.app) as url:
        options = ["--url", url, "--key", room.secrets["viewer"]]
        following = asyncio.create_task(asyncio.to_thread(_follow, options))
        async with room.app.client(OWNER_KEY) as client:
            number = 0
            while not following.done():  # it begins with the first change after it has started
                number += 1
                assert (await client.patch(f"{TENANTS}/acme", json={"weight": 1.0 + number})).status_code == 200
                await asyncio.sleep(0.05)
        lines = [json.loads(line) for line in (await following).splitlines() if line.startswith("{")]
    weights = [line["after"]["weight"] for line in lines]
    assert len(weights) >= 3 and weights == [weights[0] + step for step in range(len(weights))]


def _follow(options: list[str]) -> str:
    """Return what `audit follow` prints until it has waited three times."""
    from gateway.cli import admins

    waits = iter(range(3))

    def wait(seconds: float) -> None:
        import threading

        threading.Event().wait(0.5)
        if next(waits, None) is None:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admins, "wait", wait)
        return CliRunner().invoke(cli, ["audit", "follow", *options]).stdout
