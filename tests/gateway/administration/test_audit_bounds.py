"""The audit log under strain: large values, tenants' administrators, repeated calls, and changes of failed calls."""

from __future__ import annotations

import msgspec
import pytest
from admin_room import OWNER_KEY, admin_room
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.api_schema.admins import AuditEntry
from gateway.audit.log import MOST_BYTES, AuditLog, AuditQuery
from gateway.audit.redaction import redacted
from gateway.audit.store import MemoryAuditStore, RedisAuditStore, Retention
from gateway.core.administrators import AdminRole
from gateway.core.errors import ApiError, Fault
from gateway.redis.connect import redis_client

TENANTS, KEYS = "/admin/v1/tenants", "/admin/v1/keys"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("gateway.registry.store.CALL_SECONDS", 60.0)


@pytest.fixture(params=["memory", "redis"])
def make_store(request, valkey):
    def make(retention: Retention = Retention()):  # noqa: B008
        return MemoryAuditStore(retention) if request.param == "memory" else RedisAuditStore(valkey, retention, "t:")

    return make


@pytest.fixture
async def room(tmp_path):
    async with admin_room(tmp_path) as found:
        yield found


def entry_of(name: str, **more: object) -> AuditEntry:
    return AuditEntry(**{"at": 1e9, "by": "a", "action": "tenants.change", "object": name, "result": "ok", **more})


async def names_of(audit: AuditLog, **query: object) -> list[str]:
    return [entry.object for entry in (await audit.page(AuditQuery(**query))).entries]


async def test_a_change_that_took_long_does_not_hide_later_ones_from_since(make_store):
    now = [4e9]  # after what Redis's clock says, for nothing is too old
    audit = AuditLog(make_store(Retention(days=36_500)), lambda: now[0])
    await audit.end("", entry_of("early", at=3e9))
    await audit.end("", entry_of("short", at=1.5e9))
    await audit.end("", entry_of("long", at=0.5e9))  # it began long ago, and has ended last
    assert await names_of(audit, since=1e9) == ["short", "early"]


async def test_reading_ends_with_entries_that_were_added_before_since(monkeypatch):
    monkeypatch.setattr("gateway.audit.log.CHUNK", 2)
    now, reads = [1e9], []
    store = MemoryAuditStore(Retention(days=36_500))
    older = store.older

    async def counted(than, count):
        reads.append(than)
        return await older(than, count)

    monkeypatch.setattr(store, "older", counted)
    audit = AuditLog(store, lambda: now[0])
    for number in range(10):
        now[0] += 1000.0
        await audit.end("", entry_of(f"n{number}", at=now[0]))
    assert await names_of(audit, since=now[0] - 500.0) == ["n9"]
    assert len(reads) == 1


@pytest.mark.parametrize("text", ["x" * 256, "\U0001f600" * 256, '"\\' * 128, "https://h/dir/?" + "y" * 250])
async def test_an_entry_is_bounded_and_says_what_it_leaves_out(make_store, text):
    store = make_store()
    lists = {name: [text] * 100 for name in ("models", "adapters", "networks")}
    audit = AuditLog(store)
    await audit.end("", entry_of("keys/a", before=lists, after={**lists, "models": ["*"], "label": text}))
    [(_, stored)] = await store.older("", 10)
    assert len(stored) <= MOST_BYTES
    [entry] = (await audit.page(AuditQuery())).entries
    assert len(entry.before["models"]) == 11 and entry.before["models"][10] == "… 90 more"
    assert entry.after["models"] == ["*"]


async def test_an_entry_that_no_cut_makes_small_enough_says_so():
    audit = AuditLog(store := MemoryAuditStore())
    deep = {f"f{one}": {f"g{two}": ["x" * 99] * 10 for two in range(40)} for one in range(40)}
    await audit.end("", entry_of("tenants/a", before=deep, after=deep))
    [(_, stored)] = await store.older("", 10)
    assert len(stored) <= MOST_BYTES and "too large" in stored.decode()


def test_objects_are_cut_too():
    found = redacted({f"f{number}": number for number in range(50)})
    assert (len(found), found["…"]) == (41, "… 10 more")


async def test_administrators_of_tenants_cannot_push_out_other_changes(make_store):
    audit = AuditLog(make_store(Retention(entries=30)))
    for number in range(27):
        await audit.end("", entry_of(f"all/{number}"))
    for number in range(40):
        entry = entry_of(f"acme/{number}", tenant="acme")
        pending = await audit.begin(msgspec.structs.replace(entry, result="unknown"))
        await audit.end(pending, entry)
    shown = [f"acme/{number}" for number in (39, 38, 37)] + [f"all/{number}" for number in reversed(range(27))]
    found, before = [], ""
    while before is not None:
        page = await audit.page(AuditQuery(limit=7, before=before))
        found += [entry.object for entry in page.entries]
        before = page.next
    assert found == shown
    await audit.end("", entry_of("all/27"))
    assert await names_of(audit) == ["all/27", *shown[:-1]]


async def test_a_tenants_administrator_is_recorded_as_one(room):
    key = await room.admin("local", AdminRole.ACCOUNTS, "acme")
    async with room.app.client(key) as client:
        assert (await client.post(KEYS, json={"tenant": "acme"})).status_code == 201
    [entry] = await room.entries(limit=1)
    assert (entry.by, entry.tenant) == ("local", "acme")


async def test_a_call_that_is_repeated_after_a_lost_answer_adds_one_entry(valkey, valkey_server, monkeypatch):
    read, due = AbstractConnection.read_response, [0]

    async def losing(self, *args, **more):
        answer = await read(self, *args, **more)
        if due[0]:
            due[0] -= 1
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the answer is lost")
        return answer

    async with redis_client(valkey_server.connection_url) as client:
        audit = AuditLog(RedisAuditStore(client, Retention(), "t:"))
        pending = await audit.begin(entry_of("first"))
        monkeypatch.setattr(AbstractConnection, "read_response", losing)
        due[0] = 1
        await audit.end(pending, entry_of("first", result="lost"))
        due[0] = 1
        await audit.begin(entry_of("second", tenant="acme"))
        assert (due[0], await names_of(audit)) == (0, ["second", "first"])
    assert await valkey.llen("t:{audit}:tenants") == 1


async def test_a_change_that_was_made_is_shown_though_its_call_failed(room, monkeypatch):
    async def away(tenant):
        raise ApiError(Fault.LIMITER_UNAVAILABLE, "Redis does not answer")

    monkeypatch.setattr(room.app.gateway.limiter, "drop", away)
    room.app.open_again()
    async with room.app.client(OWNER_KEY) as client:
        assert (await client.delete(f"{TENANTS}/acme")).status_code == 503
    [entry] = await room.entries(limit=1)
    assert (entry.result, entry.object, entry.after) == ("limiter_unavailable", "tenants/acme", {})
    assert entry.before["weight"] == 1.0


async def test_a_rotation_that_conflicts_leaves_no_key_behind(room, monkeypatch):
    old = (await room.accounts.create_key("acme")).account
    write = room.accounts._write

    async def conflicting(record, before):
        if before is not None:
            raise ApiError(Fault.REGISTRY_UNAVAILABLE, "Redis does not answer")
        return await write(record, before)

    monkeypatch.setattr(room.accounts, "_write", conflicting)
    async with room.app.client(OWNER_KEY) as client:
        assert (await client.post(f"{KEYS}/{old.key_id}/rotate")).status_code == 503
    found = room.accounts.keys("acme")
    assert [key.key_id for key in found] == [old.key_id]
    [entry] = await room.entries(limit=1)
    assert (entry.result, entry.before, entry.after) == ("registry_unavailable", {}, {})


async def test_changes_of_a_key_are_found_by_its_id_whatever_the_caller_typed(room):
    key = (await room.accounts.create_key("acme")).account
    async with room.app.client(OWNER_KEY) as client:
        body = {"tenant": "acme", "key": key.key_id[:8], "requests_per_minute": 5}
        limited = await client.patch("/admin/v1/limits", json=body)
        assert limited.status_code == 200, limited.text
        assert (await client.post(f"{KEYS}/{key.key_hash}/disable")).status_code == 200
        assert (await client.delete(f"{KEYS}/{key.key_id[:8]}")).status_code == 200
    assert [entry.action for entry in await room.entries(object=f"keys/{key.key_id}")] == [
        "keys.delete",
        "keys.disable",
    ]
    [entry] = await room.entries(object=f"limits/acme/{key.key_id}")
    assert entry.result == "ok"
