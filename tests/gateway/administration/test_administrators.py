"""Administrators made, changed and removed live, on one gateway and on several of one Valkey."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace

import grpc
import pytest
from admin_room import OWNER_KEY, admin_room
from fakes import ACME
from redis.asyncio import Redis
from served import on_port
from typer.testing import CliRunner

from gateway.accounts.administrators import Administrators
from gateway.accounts.record import account_store, decode_account, encode_account
from gateway.accounts.registry import AccountRegistry
from gateway.cli.main import app as cli
from gateway.config.sections import AdminConfig, ConfiguredAdmin
from gateway.config.whole import demo_config
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import hash_key
from gateway.pb import admins_pb2 as pb
from gateway.pb.admins_pb2_grpc import AdministratorAdminStub
from gateway.rpc.api import GrpcServer

ADMINS = "/admin/v1/admins"
BOSS = Administrator("boss", AdminRole.OWNER)
HOSTILE = ["", " ", "..", "../boss", "a/b", "é", "a b", "x" * 65, "\u202eboss", "a\n", "<b>", "configuration"]


@pytest.fixture
async def room(tmp_path):
    async with admin_room(tmp_path) as found:
        yield found


@pytest.fixture
async def make(valkey, valkey_server, monkeypatch):
    """Gateways' registries over one Valkey."""
    monkeypatch.setattr("gateway.registry.store.CALL_SECONDS", 60.0)
    monkeypatch.setattr("gateway.registry.log.ECHO_SECONDS", 60.0)
    opened: list[tuple[AccountRegistry, Redis]] = []

    async def build() -> AccountRegistry:
        client = Redis.from_url(valkey_server.connection_url)
        registry = AccountRegistry(account_store(client), lambda tenants: None)
        await registry.start()
        opened.append((registry, client))
        return registry

    yield build
    for registry, client in opened:
        await registry.close()
        await client.aclose()


async def heard(registry: AccountRegistry, other: AccountRegistry) -> None:
    """`other` has followed the log as far as `registry`."""
    async with asyncio.timeout(30):
        while other._mirror.generation < registry._mirror.generation:
            await other._log.next_change.wait()


def opens(registry: AccountRegistry, secret: str) -> bool:
    try:
        return registry.authenticate(secret).is_admin
    except ApiError as error:
        if error.fault is not Fault.INVALID_API_KEY:
            raise
        return False


async def fault_of(change) -> Fault:
    with pytest.raises(ApiError) as caught:
        await change
    return caught.value.fault


async def test_an_administrator_lives_and_dies_over_http(room):
    async with room.app.client(OWNER_KEY) as client:
        made = (await client.post(ADMINS, json={"name": "ci", "role": "operator"})).json()
        assert (made["name"], made["role"], made["tenant"], made["added_by"]) == ("ci", "operator", "", "administrator")
        assert hash_key(made["key"]).startswith(made["key_id"])
        assert room.accounts.authenticate(made["key"]).administrator == Administrator("ci", AdminRole.OPERATOR)
        shown = (await client.get(f"{ADMINS}/ci")).json()
        assert shown == {name: value for name, value in made.items() if name != "key"}
        listed = (await client.get(ADMINS)).json()["admins"]
        assert [one["name"] for one in listed] == ["accounts", "boss", "ci", "operator", "owner", "viewer"]
        assert [one["added_by"] for one in listed if one["name"] == "boss"] == ["configuration"]
        changed = (await client.patch(f"{ADMINS}/ci", json={"role": "viewer"})).json()
        assert (changed["role"], changed["key_id"]) == ("viewer", made["key_id"])
        again = await client.post(ADMINS, json={"name": "ci", "role": "viewer"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "admin_conflict")
        rotated = (await client.post(f"{ADMINS}/ci/rotate")).json()
        assert (opens(room.accounts, made["key"]), opens(room.accounts, rotated["key"])) == (False, True)
        assert (await client.delete(f"{ADMINS}/ci")).json() == {"deleted": True}
        assert not opens(room.accounts, rotated["key"])
        assert (await client.get(f"{ADMINS}/ci")).json()["error"]["code"] == "admin_not_found"


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_refused(room, name):
    async with room.app.client(OWNER_KEY) as client:
        refused = await client.post(ADMINS, json={"name": name, "role": "viewer"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    assert len(room.accounts.administrators.records) == 5


@pytest.mark.parametrize("role", ["", "root", "Owner", "owner ", "viewer,owner"])
async def test_unknown_roles_are_refused_by_name(room, role):
    async with room.app.client(OWNER_KEY) as client:
        for refused in (
            await client.post(ADMINS, json={"name": "ci", "role": role}),
            await client.patch(f"{ADMINS}/viewer", json={"role": role}),
        ):
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "role")
            assert repr(role) in error["message"] and "viewer, operator, accounts, owner" in error["message"]


async def test_nobody_removes_himself_or_the_last_owner(room):
    admins = room.accounts.administrators
    async with room.app.client(OWNER_KEY) as boss, room.app.client(room.secrets["owner"]) as other:
        for refused in (
            await boss.delete(f"{ADMINS}/boss"),
            await boss.patch(f"{ADMINS}/boss", json={"role": "viewer"}),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "admin_conflict")
            assert "another owner" in refused.json()["error"]["message"]
        assert (await other.patch(f"{ADMINS}/boss", json={"role": "viewer"})).status_code == 200
        assert (await boss.delete(f"{ADMINS}/owner")).status_code == 403
    for loss in (admins.delete("owner", "absent"), admins.change("owner", "viewer", "absent")):
        assert await fault_of(loss) is Fault.ADMIN_CONFLICT
    assert admins.get("owner").admin.administrator.is_owner


@pytest.mark.parametrize("verbs", [("delete", "delete"), ("delete", "demote"), ("demote", "demote")])
async def test_owners_who_remove_each_other_at_once_leave_one(make, verbs):
    def loss(admins: Administrators, verb: str, name: str, by: str) -> Coroutine[None, None, object]:
        return admins.delete(name, by) if verb == "delete" else admins.change(name, "viewer", by)

    one, other = await make(), await make()
    await one.administrators.seed([(BOSS, hash_key(OWNER_KEY))])
    await one.administrators.create("second", "owner")
    await heard(one, other)
    ended = await asyncio.gather(
        loss(one.administrators, verbs[0], "second", "boss"),
        loss(other.administrators, verbs[1], "boss", "second"),
        return_exceptions=True,
    )
    faults = [error.fault for error in ended if isinstance(error, ApiError)]
    assert faults == [Fault.ADMIN_CONFLICT]
    await heard(one, other)
    await heard(other, one)
    owners = [record for record in one.administrators.records.values() if record.admin.administrator.is_owner]
    assert len(owners) == 1


async def test_a_name_is_given_once_and_removed_once(make):
    one, other = await make(), await make()
    await one.administrators.seed([(BOSS, hash_key(OWNER_KEY))])
    await heard(one, other)
    made = await asyncio.gather(
        *(registry.administrators.create("ci", "operator") for registry in (one, other)), return_exceptions=True
    )
    [key] = [found.secret for found in made if not isinstance(found, BaseException)]
    [error] = [found for found in made if isinstance(found, ApiError)]
    assert error.fault in (Fault.ADMIN_CONFLICT, Fault.ADMIN_EXISTS)
    await heard(one, other)
    await heard(other, one)
    assert opens(one, key) and opens(other, key)
    gone = await asyncio.gather(
        *(registry.administrators.delete("ci", "boss") for registry in (one, other)), return_exceptions=True
    )
    assert [found.fault for found in gone if isinstance(found, ApiError)] in (
        [Fault.ADMIN_CONFLICT],
        [Fault.ADMIN_NOT_FOUND],
    )
    await heard(one, other)
    await heard(other, one)
    assert not opens(one, key) and not opens(other, key)


@pytest.mark.parametrize("what", ["delete", "rotate"])
async def test_a_key_revoked_on_one_gateway_is_refused_on_another(make, valkey, what):
    one, other = await make(), await make()
    await one.administrators.seed([(BOSS, hash_key(OWNER_KEY))])
    key = (await one.administrators.create("ci", "operator")).secret
    await heard(one, other)
    assert opens(other, key)
    for name in await valkey.keys("*"):
        kind = (await valkey.type(name)).decode()
        read = {"hash": valkey.hgetall, "stream": valkey.xrange, "string": valkey.get}[kind]
        assert key not in repr(await read(name))
    await (one.administrators.delete("ci", "boss") if what == "delete" else one.administrators.rotate("ci"))
    await heard(one, other)
    assert not opens(one, key) and not opens(other, key)


async def test_the_configuration_is_a_seed(make):
    one = await make()
    ci = Administrator("ci", AdminRole.OPERATOR)
    configured = [(BOSS, hash_key(OWNER_KEY)), (ci, hash_key("sk-of-the-configuration"))]
    await one.administrators.seed(configured)
    assert opens(one, "sk-of-the-configuration")
    rotated = (await one.administrators.rotate("ci")).secret
    live = (await one.administrators.create("live", "viewer")).secret
    restarted = await make()
    await restarted.administrators.seed(configured)
    assert not opens(restarted, "sk-of-the-configuration"), "what operators changed stands"
    assert opens(restarted, rotated) and opens(restarted, live)
    await restarted.administrators.seed([(BOSS, hash_key(OWNER_KEY)), (ci, hash_key("sk-another-of-it"))])
    assert opens(restarted, "sk-another-of-it") and not opens(restarted, rotated)
    await restarted.administrators.seed([(BOSS, hash_key(OWNER_KEY))])
    assert not opens(restarted, "sk-another-of-it"), "a key that left the configuration is revoked"
    assert opens(restarted, live) and opens(restarted, OWNER_KEY)
    await restarted.administrators.seed(configured)
    await restarted.administrators.seed([])
    assert opens(restarted, "sk-of-the-configuration"), "a gateway for tenants alone names no administrators"


async def test_the_demos_keys_open_no_other_gateway_of_its_store(make, valkey):
    demo, other = demo_config(), replace(demo_config(), tenants={}, admin=AdminConfig())
    await (await make()).administrators.seed(demo.admin.seeds())
    for config, is_open in ((demo, True), (other, False)):
        store, refused = account_store(valkey), config.foreign_demo_keys()
        registry = AccountRegistry(store, lambda tenants: None, refused=refused)
        await registry.start()
        assert opens(registry, "sk-demo-admin") is is_open
        await registry.close()


async def test_a_tenants_administrators_go_with_it(room):
    key = await room.admin("acme-ops", AdminRole.OWNER, "acme")
    assert opens(room.accounts, key)
    await room.accounts.disable("acme", True)
    assert not opens(room.accounts, key)
    await room.accounts.delete("acme")
    await room.accounts.create(ACME)
    assert not opens(room.accounts, key)
    assert await fault_of(room.accounts.administrators.create("x", "owner", "unknown")) is Fault.TENANT_NOT_FOUND


async def test_a_record_survives_its_encoding(room):
    record = room.accounts.administrators.get("operator")
    assert decode_account(encode_account(record), record.generation) == record


async def test_the_same_over_grpc(room):
    async with (
        GrpcServer(room.app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = AdministratorAdminStub(channel)

        async def call(method, request):
            return await getattr(stub, method)(request, metadata=(("authorization", f"Bearer {OWNER_KEY}"),))

        made = await call("CreateAdministrator", pb.CreateAdministratorRequest(name="ci", role="operator"))
        assert (made.administrator.name, made.administrator.role) == ("ci", "operator")
        assert opens(room.accounts, made.secret)
        changed = await call("UpdateAdministrator", pb.UpdateAdministratorRequest(name="ci", role="viewer"))
        assert changed == await call("GetAdministrator", pb.GetAdministratorRequest(name="ci"))
        listed = await call("ListAdministrators", pb.ListAdministratorsRequest())
        assert changed in listed.administrators and len(listed.administrators) == 6
        rotated = await call("RotateAdministrator", pb.RotateAdministratorRequest(name="ci"))
        assert (opens(room.accounts, made.secret), opens(room.accounts, rotated.secret)) == (False, True)
        await call("DeleteAdministrator", pb.DeleteAdministratorRequest(name="ci"))
        assert not opens(room.accounts, rotated.secret)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("DeleteAdministrator", pb.DeleteAdministratorRequest(name="boss"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_same_in_a_terminal(room):
    async with on_port(room.app) as url:

        async def run(*words: str, key: str = OWNER_KEY) -> str:
            arguments = [*words, "--url", url, "--key", key]
            return (await asyncio.to_thread(CliRunner().invoke, cli, arguments)).stdout

        key = (await run("admins", "create", "ci", "--role", "operator")).strip().splitlines()[-1]
        assert room.accounts.authenticate(key).administrator.name == "ci"
        assert not await run("admins", "create", "worse", "--role", "owner", key=key)
        assert "worse" not in room.accounts.administrators.records
        assert "viewer" in await run("admins", "set", "ci", "--role", "viewer")
        rotated = (await run("admins", "rotate", "ci")).strip().splitlines()[-1]
        assert (opens(room.accounts, key), opens(room.accounts, rotated)) == (False, True)
        listed = json.loads(await run("admins", "ls", "--json", key=rotated))
        assert [one["role"] for one in listed if one["name"] == "ci"] == ["viewer"]
        assert "all" in await run("admins", "ls")
        await run("admins", "delete", "ci")
        assert not opens(room.accounts, rotated)
        [entry] = json.loads(await run("audit", "ls", "--object", "admins/ci", "--limit", "1", "--json"))
        assert (entry["action"], entry["by"], entry["result"]) == ("admins.delete", "boss", "ok")
        assert "admins.rotate" in await run("audit", "ls", "--by", "boss", "--object", "admins")


async def strip(registry: AccountRegistry, name: str) -> None:
    """Leave of an administrator's record what a gateway that knows no administrators writes back."""
    before = registry.administrators.get(name)
    await registry._log.put(replace(before, admin=None), before)


async def test_a_record_that_an_older_gateway_has_stripped_is_none(room):
    await strip(room.accounts, "viewer")
    async with room.app.client(OWNER_KEY) as client:
        for refused in (
            await client.get(f"{ADMINS}/viewer"),
            await client.patch(f"{ADMINS}/viewer", json={"role": "owner"}),
            await client.post(f"{ADMINS}/viewer/rotate"),
            await client.delete(f"{ADMINS}/viewer"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "admin_not_found")
        assert "viewer" not in [one["name"] for one in (await client.get(ADMINS)).json()["admins"]]
        assert not opens(room.accounts, room.secrets["viewer"])
        made = await client.post(ADMINS, json={"name": "viewer", "role": "operator"})
        assert (made.status_code, made.json()["role"]) == (201, "operator")
    assert opens(room.accounts, made.json()["key"])


async def test_the_configuration_replaces_a_stripped_record(room):
    """Even if the configuration is the one that was applied before the record was stripped."""
    await strip(room.accounts, "boss")
    assert not opens(room.accounts, OWNER_KEY)
    await room.accounts.administrators.seed([(BOSS, hash_key(OWNER_KEY))])
    assert opens(room.accounts, OWNER_KEY)
    [made, gone] = await room.entries(object="admins/boss", limit=2)
    assert (gone.after, made.before, made.after["role"]) == ({}, {}, "owner")


def test_a_configuration_without_an_owner_is_refused():
    viewer = ConfiguredAdmin(Administrator("eyes", AdminRole.VIEWER), hash_key("sk-of-the-eyes"))
    owner = ConfiguredAdmin(BOSS, hash_key(OWNER_KEY))
    of_tenant = ConfiguredAdmin(Administrator("it", AdminRole.OWNER, "acme"), hash_key("sk-of-acme-it"))
    for named in ({"eyes": viewer}, {"eyes": viewer, "it": of_tenant}):
        with pytest.raises(ValueError, match="administrators: one must have the role owner and no tenant"):
            AdminConfig(administrators=named)
    assert len(AdminConfig(administrators={"eyes": viewer, "boss": owner}).seeds()) == 2
    assert len(AdminConfig((hash_key(OWNER_KEY),), {"eyes": viewer}).seeds()) == 2
    assert AdminConfig().seeds() == []
