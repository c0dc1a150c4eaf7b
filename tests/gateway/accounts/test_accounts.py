"""Tenants and keys changed on one gateway, and what another does with the very next request."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import grpc
import pytest
from fakes import GatewayApp, build_gateway_app
from patient_valkey import PatientValkey
from redis.asyncio import Redis
from served import on_port
from typer.testing import CliRunner

from gateway.accounts.record import account_store, decode_account, encode_account, tenant_account
from gateway.accounts.registry import AccountRegistry
from gateway.cli.main import app as cli
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import RequestClass, Tenant, hash_key, key_id
from gateway.pb import tenants_pb2
from gateway.pb.tenants_pb2_grpc import TenantAdminStub
from gateway.rpc.api import GrpcServer

ADMIN_KEY = "sk-admin-of-these-tests"
ADMINS = [(Administrator("boss", AdminRole.OWNER), hash_key(ADMIN_KEY))]
CONFIGURED = hash_key("sk-from-the-configuration")
ACME = Tenant("acme", adapters=("poet",), limits=Limits(60))
TENANTS, KEYS = "/admin/v1/tenants", "/admin/v1/keys"
CHAT = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine is not without Redis: by default, a call of 2 s is refused, and a change that takes 5 s."""
    monkeypatch.setattr("gateway.registry.store.CALL_SECONDS", 60.0)
    monkeypatch.setattr("gateway.registry.log.ECHO_SECONDS", 60.0)


@pytest.fixture
async def make(valkey, valkey_server):
    """Gateways' registries over one Valkey."""
    opened: list[AccountRegistry] = []
    clients: list[Redis] = []

    async def build(changed=lambda tenants: None) -> AccountRegistry:
        clients.append(Redis.from_url(valkey_server.connection_url))
        registry = AccountRegistry(account_store(clients[-1]), changed)
        await registry.start()
        await registry.administrators.seed(ADMINS)
        opened.append(registry)
        return registry

    yield build
    for registry in opened:
        await registry.close()
    for client in clients:
        await client.aclose()


async def heard(registry: AccountRegistry, other: AccountRegistry) -> None:
    """`other` has followed the log as far as `registry`."""
    async with asyncio.timeout(30):
        while other._mirror.generation < registry._mirror.generation:
            await other._log.next_change.wait()


def refused(registry: AccountRegistry, secret: str) -> bool:
    try:
        registry.authenticate(secret)
    except ApiError as error:
        return error.fault is Fault.INVALID_API_KEY
    return False


async def test_a_key_made_on_one_gateway_opens_another_and_is_kept_nowhere(make, valkey):
    one, other = await make(), await make()
    await one.create(ACME)
    new = await one.create_key("acme", "laptop")
    await heard(one, other)
    principal = other.authenticate(new.secret)
    assert (principal.tenant, principal.is_admin, principal.key_id) == (ACME, False, new.account.key_id)
    assert new.secret not in repr(new) + repr(one.records)
    for name in await valkey.keys("*"):
        kind = (await valkey.type(name)).decode()
        read = {"hash": valkey.hgetall, "stream": valkey.xrange, "string": valkey.get}[kind]
        assert new.secret not in repr(await read(name))


@pytest.mark.parametrize("what", ["key", "tenant", "deleted key", "deleted tenant", "rotated"])
async def test_what_is_disabled_is_refused_at_once_on_another_gateway(make, what):
    one, other = await make(), await make()
    await one.create(ACME)
    new, spare = await one.create_key("acme"), await one.create_key("acme")
    await heard(one, other)
    assert not refused(other, new.secret)
    if what == "key":
        await one.disable_key(new.account.key_id, True)
    elif what == "tenant":
        await one.disable("acme", True)
    elif what == "deleted key":
        await one.delete_key(new.account.key_id)
    elif what == "deleted tenant":
        assert await one.delete("acme") == 2
    else:
        spare = await one.rotate(new.account.key_id)
    await heard(one, other)
    assert refused(one, new.secret)
    assert refused(other, new.secret)
    assert refused(other, spare.secret) is ("tenant" in what)
    assert other.authenticate(ADMIN_KEY).is_admin


async def test_a_key_that_outlived_its_tenant_does_not_open_the_next_of_that_name(make):
    one = await make()
    await one.create(ACME)
    secret = (await one.create_key("acme")).secret
    await one._log.remove(one.tenant("acme"), None)  # as by a gateway that died on its way through the keys
    assert refused(one, secret)
    await one.create(ACME)
    assert refused(one, secret)
    assert one.keys("acme") == []


async def test_enabled_again_it_is_let_in_again(make):
    one, other = await make(), await make()
    await one.create(ACME)
    new = await one.create_key("acme")
    for disable, which in ((one.disable_key, new.account.key_id), (one.disable, "acme")):
        await disable(which, True)
        assert refused(one, new.secret)
        await disable(which, False)
        await heard(one, other)
        assert not refused(other, new.secret)


async def test_a_rotated_key_may_be_kept_for_a_while(make):
    one = await make()
    await one.create(ACME)
    old = await one.create_key("acme", "laptop")
    new = await one.rotate(old.account.key_id, keep=True)
    assert new.account.key.label == "laptop"
    assert not refused(one, old.secret)
    assert not refused(one, new.secret)


async def test_changes_of_a_tenant_bind_on_another_gateway(make):
    one, other = await make(), await make()
    await one.create(ACME)
    new = await one.create_key("acme")
    await one.amend("acme", lambda tenant: replace(tenant, adapters=("pirate",), weight=3.0))
    await heard(one, other)
    tenant = other.authenticate(new.secret).tenant
    assert (tenant.may_use("pirate"), tenant.may_use("poet"), tenant.weight) == (True, False, 3.0)


async def test_operators_changes_stand_until_the_configuration_says_something_else(make):
    one = await make()
    await one.seed(ACME, [CONFIGURED])
    assert one.authenticate("sk-from-the-configuration").tenant == ACME
    await one.disable_key(key_id(CONFIGURED), True)
    await one.amend("acme", lambda tenant: replace(tenant, weight=2.0))
    restarted = await make()
    await restarted.seed(ACME, [CONFIGURED])
    assert refused(restarted, "sk-from-the-configuration")
    assert restarted.tenant("acme").tenant.weight == 2.0
    await restarted.disable("acme", True)
    await restarted.seed(replace(ACME, weight=5.0), [CONFIGURED])
    assert restarted.tenant("acme").tenant.weight == 5.0
    assert restarted.tenant("acme").disabled, "no configuration lets in a tenant that an operator shut out"
    assert refused(restarted, "sk-from-the-configuration")


async def test_a_seed_from_before_a_field_was_there_is_not_taken_up_again(make):
    one = await make()
    await one.seed(ACME, [CONFIGURED])
    said = json.loads(await one._store.seed("tenant/acme"))
    assert said["tenant"].keys().isdisjoint(("unknown_fields", "upstreams", "classes"))
    await one.seed(replace(ACME, unknown_fields="refuse"), [CONFIGURED])
    assert one.tenant("acme").tenant.unknown_fields == "refuse"


async def test_a_key_taken_out_of_the_configuration_is_gone_and_may_come_back(make):
    one, other = await make(), await make()
    await one.seed(ACME, [CONFIGURED, hash_key("sk-another")])
    live = await one.create_key("acme")
    await one.seed(ACME, [CONFIGURED])
    await heard(one, other)
    assert [refused(other, key) for key in ("sk-another", "sk-from-the-configuration", live.secret)] == [
        True,
        False,
        False,
    ]
    await one.seed(ACME, [CONFIGURED, hash_key("sk-another")])
    assert not refused(one, "sk-another")


async def test_a_deleted_tenant_does_not_come_back_with_the_next_start(make):
    one = await make()
    await one.seed(ACME, [CONFIGURED])
    await one.delete("acme")
    restarted = await make()
    await restarted.seed(ACME, [CONFIGURED])
    assert restarted.tenants() == []
    assert refused(restarted, "sk-from-the-configuration")


@pytest.mark.slow
async def test_a_start_without_redis_serves_what_is_configured(tmp_path):
    server = PatientValkey(port=0, data_dir=tmp_path, unix_socket_path=tmp_path / "v.sock")
    async with Redis(unix_socket_path=str(tmp_path / "v.sock")) as client:
        registry = AccountRegistry(account_store(client), lambda tenants: None)
        await registry.start()
        await registry.seed(ACME, [CONFIGURED])
        assert registry.authenticate("sk-from-the-configuration").tenant == ACME
        with pytest.raises(ApiError) as caught:
            await registry.create_key("acme")
        assert caught.value.fault is Fault.REGISTRY_UNAVAILABLE
        with server:
            async with asyncio.timeout(30):
                while registry.tenant("acme").generation == 0:
                    await registry._log.next_change.wait()
            assert not refused(registry, "sk-from-the-configuration")
            new = await registry.create_key("acme")
        assert not refused(registry, new.secret), "what is known goes on while Redis is away"
        await registry.close()


async def test_two_tenants_of_one_name_and_keys_of_none(make):
    one = await make()
    await one.create(ACME)
    for faulty, fault in (
        (one.create(ACME), Fault.TENANT_EXISTS),
        (one.create(Tenant("admin")), Fault.INVALID_REQUEST),
        (one.create(Tenant("virtual-model-copy")), Fault.INVALID_REQUEST),
        (one.create_key("unknown"), Fault.TENANT_NOT_FOUND),
        (one.create_key("acme", "x" * 200), Fault.INVALID_REQUEST),
        (one.disable_key("123456", True), Fault.KEY_NOT_FOUND),
        (one.delete_key(""), Fault.KEY_NOT_FOUND),
        (one.delete("unknown"), Fault.TENANT_NOT_FOUND),
    ):
        with pytest.raises(ApiError) as caught:
            await faulty
        assert caught.value.fault is fault


async def test_records_outlive_being_written_down(make):
    one = await make()
    await one.create(ACME)
    key = (await one.create_key("acme", "laptop")).account
    for record in (one.tenant("acme"), key):
        assert decode_account(encode_account(record), record.generation) == record


@pytest.fixture
async def gateway_app(tmp_path, make) -> tuple[GatewayApp, AccountRegistry]:
    gateway_app = await build_gateway_app(tmp_path)
    accounts = await make(gateway_app.limiter.configure_lazily)
    gateway_app.open_again(accounts)
    return gateway_app, accounts


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("POST", TENANTS, {"name": "initech"}),
        ("PATCH", f"{TENANTS}/acme", {}),
        ("POST", KEYS, {"tenant": "acme"}),
    ],
)
async def test_a_field_that_is_misspelt_leaves_no_tenant_without_limits(gateway_app, method, path, given):
    gateway_app, accounts = gateway_app
    before = dict(accounts.records)
    async with gateway_app.client(ADMIN_KEY) as admin:
        refused = await admin.request(method, path, json={**given, "limit": {"tokens_per_day": 1}})
        misspelt = await admin.get(KEYS, params={"tennant": "acme"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")
    assert (misspelt.status_code, misspelt.json()["error"]["param"]) == (400, "tennant")
    assert accounts.records == before


async def test_a_tenants_life_over_http(gateway_app, caplog):
    gateway_app, _ = gateway_app
    caplog.set_level(logging.DEBUG)
    async with gateway_app.client(ADMIN_KEY) as admin:
        body = {"name": "initech", "adapters": ["p*"], "highest_lane": "batch", "default_lane": "batch"}
        created = await admin.post(TENANTS, json={**body, "limits": {"requests_per_minute": 2}})
        assert (created.status_code, created.json()["highest_lane"]) == (201, "batch")
        assert await gateway_app.limiter.limits(Scope("initech")) == Limits(2)
        key = (await admin.post(KEYS, json={"tenant": "initech", "label": "laptop"})).json()
        assert key["key"].startswith("sk-")
        async with gateway_app.client(key["key"]) as caller:
            answers = [await caller.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert answers[0].headers["x-loralane-lane"] == "batch"
            changed = {"unknown_fields": "refuse", "upstreams": ["cloud-*"]}
            strict = await admin.patch(f"{TENANTS}/initech", json=changed)
            assert (strict.status_code, strict.json()) == (200, strict.json() | changed)
            refused = await caller.post("/v1/chat/completions", json={**CHAT, "chat_id": 1})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_id")
            await admin.patch(f"{TENANTS}/initech", json={"unknown_fields": "ignore", "adapters": []})
            assert (await caller.post("/v1/chat/completions", json=CHAT)).status_code == 404
            await admin.post(f"{TENANTS}/initech/disable")
            assert (await caller.get("/v1/models")).status_code == 401
            await admin.post(f"{TENANTS}/initech/enable")
            assert (await caller.get("/v1/models")).status_code == 200
            rotated = (await admin.post(f"{KEYS}/{key['id']}/rotate")).json()
            assert (await caller.get("/v1/models")).status_code == 401
        listed = (await admin.get(KEYS, params={"tenant": "initech"})).json()["keys"]
        assert [(one["id"], one["disabled"], one["label"]) for one in listed] == [
            (key["id"], True, "laptop"),
            (rotated["id"], False, "laptop"),
        ]
        assert "key" not in listed[0]
        assert (await admin.delete(f"{KEYS}/{key['id']}")).json() == {"deleted": True}
        assert (await admin.delete(f"{TENANTS}/initech")).json() == {"keys": 1}
        assert (await admin.get(f"{TENANTS}/initech")).status_code == 404
        assert (await admin.get(TENANTS)).json() == {"tenants": []}
    assert key["key"] not in caplog.text
    await gateway_app.assert_empty()


@pytest.mark.parametrize("keep", [False, True])
async def test_a_rotation_keeps_a_keys_limits_and_what_it_used(gateway_app, keep):
    gateway_app, accounts = gateway_app
    await accounts.create(ACME)
    first = await accounts.create_key("acme", "contractor")
    async with gateway_app.client(ADMIN_KEY) as admin:

        async def allowed(secret: str) -> int:
            async with gateway_app.client(secret) as caller:
                answers = [await caller.post("/v1/chat/completions", json=CHAT) for _ in range(4)]
            return [answer.status_code for answer in answers].count(200)

        async def limit(key: str) -> None:
            body = {"tenant": "acme", "key": key, "requests_per_minute": 2}
            assert (await admin.patch("/admin/v1/limits", json=body)).json()["key"] == first.account.key_id

        await limit(first.account.key_id)
        assert await allowed(first.secret) == 2
        ids, secret = [first.account.key_id], ""
        for _ in range(2):
            new = (await admin.post(f"{KEYS}/{ids[-1]}/rotate", json={"keep": keep})).json()
            assert (new["counts_as"], new["id"] in ids) == (ids[0], False)
            ids, secret = [*ids, new["id"]], new["key"]
            assert await allowed(secret) == 0
        await limit(ids[-1])
        forgotten = {"tenant": "acme", "key": ids[-1], "used": True}
        assert (await admin.post("/admin/v1/limits/reset", json=forgotten)).status_code == 200
        assert await allowed(secret) == 2
        if keep:
            assert await allowed(first.secret) == 0, "both keys use the same limits up"
        entries = (await admin.get("/admin/v1/limits", params={"tenant": "acme"})).json()["limits"]
    assert [entry["key"] for entry in entries if entry["key"] not in ("", "*")] == ids[:1]


async def test_a_configuration_that_names_a_rotated_key_leaves_it_what_it_continues(make):
    one = await make()
    await one.seed(ACME, [CONFIGURED])
    new = await one.rotate(key_id(CONFIGURED))
    await one.seed(ACME, [CONFIGURED, new.account.key_hash])
    assert one.key(new.account.key_id).counts_as == key_id(CONFIGURED)
    principal = one.authenticate(new.secret)
    assert (principal.key_id, principal.limits_key) == (new.account.key_id, key_id(CONFIGURED))
    assert one.holder("acme", new.account.key_id) == principal, "for its batches, too"


async def test_classes_of_a_tenants_requests(gateway_app):
    gateway_app, accounts = gateway_app
    gold = {"weight": 3.0, "priority": -5, "ttft_s": 0.2, "itl_s": None}
    async with gateway_app.client(ADMIN_KEY) as admin:
        created = await admin.post(TENANTS, json={"name": "initech", "classes": {"gold": gold, "bulk": {}}})
        assert created.json()["classes"]["gold"] == gold and created.json()["classes"]["bulk"]["weight"] == 1.0
        key = (await admin.post(KEYS, json={"tenant": "initech"})).json()["key"]
        async with gateway_app.client(key) as caller:
            for own in ({}, {"request_class": "gold"}, {"request_class": "gold", "priority": 0, "slo": {"itl_ms": 50}}):
                assert (await caller.post("/v1/chat/completions", json={**CHAT, **own})).status_code == 200
            refused = await caller.post("/v1/chat/completions", json={**CHAT, "request_class": "silver"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_class")
        assert "gold, bulk" in refused.json()["error"]["message"]
        assert (await admin.patch(f"{TENANTS}/initech", json={"classes": {}})).json()["classes"] == {}
    sent = gateway_app.engine.requests
    assert [(one.request_class, one.class_weight, one.priority, one.ttft, one.itl) for one in sent] == [
        ("", 1.0, 0, None, None),
        ("gold", 3.0, -5, 0.2, None),
        ("gold", 3.0, 0, 0.2, 0.05),
    ]
    assert not accounts.tenant("initech").tenant.classes


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "ok", "default_lane": "fast"}, "default_lane"),
        ({"name": "ok", "weight": 0}, "weight"),
        ({"name": "ok", "weight": 1e308}, "weight"),
        ({"name": "ok", "weight": -1}, "weight"),
        ({"name": "ok", "unknown_fields": "pass"}, "unknown_fields"),
        ({"name": "ok", "weight": 1e-308}, "weight"),
        ({"name": "ok", "classes": {"gold": {"weight": 0}}}, "classes"),
        ({"name": "ok", "classes": {"gold": {"ttft_s": 0}}}, "classes"),
        ({"name": "ok", "classes": {"a b": {}}}, "classes"),
        ({"name": "ok", "classes": {f"c{number}": {} for number in range(9)}}, "classes"),
        ({"name": "ok", "classes": {"gold": {"speed": 2}}}, "classes.speed"),
        ({"name": "ok", "limits": {"tokens_per_minute": 0}}, "limits"),
        ({"name": "ok", "limits": {"tokens": 5}}, "limits"),
        ({}, "name"),
    ],
)
async def test_nonsense_is_refused_by_name(gateway_app, body, param):
    gateway_app, accounts = gateway_app
    async with gateway_app.client(ADMIN_KEY) as admin:
        response = await admin.post(TENANTS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert accounts.tenants() == []


async def test_no_tenants_key_opens_any_of_it(gateway_app):
    gateway_app, accounts = gateway_app
    await accounts.create(ACME)
    new = await accounts.create_key("acme")
    before = dict(accounts.records)
    verbs = [("GET", TENANTS), ("POST", TENANTS), ("GET", KEYS), ("POST", KEYS)]
    verbs += [(verb, f"{TENANTS}/acme") for verb in ("GET", "PATCH", "DELETE")]
    verbs += [("POST", f"{TENANTS}/acme/{verb}") for verb in ("disable", "enable")]
    verbs += [(verb, f"{KEYS}/{new.account.key_id}") for verb in ("GET", "DELETE")]
    verbs += [("POST", f"{KEYS}/{new.account.key_id}/{verb}") for verb in ("rotate", "disable", "enable")]
    async with gateway_app.client(new.secret) as caller, gateway_app.client(None) as stranger:
        for method, path in verbs:
            assert (await caller.request(method, path, json={"name": "x", "tenant": "acme"})).status_code == 403
            assert (await stranger.request(method, path)).status_code == 401
    assert accounts.records == before


async def test_the_same_over_grpc(gateway_app):
    gateway_app, accounts = gateway_app
    fields = tenants_pb2.TenantFields(
        default_lane="batch", adapters=["poet"], classes={"gold": tenants_pb2.RequestClass(weight=3.0, ttft_s=0.2)}
    )
    async with (
        GrpcServer(gateway_app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = TenantAdminStub(channel)

        async def call(method, request, key=ADMIN_KEY):
            return await getattr(stub, method)(request, metadata=(("authorization", f"Bearer {key}"),))

        created = await call("CreateTenant", tenants_pb2.CreateTenantRequest(name="initech", fields=fields))
        assert (created.default_lane, list(created.adapters)) == ("batch", ["poet"])
        assert accounts.tenant("initech").tenant.classes == {"gold": RequestClass(3.0, 0, 0.2)}
        new = await call("CreateKey", tenants_pb2.CreateKeyRequest(tenant="initech", label="laptop"))
        assert (new.key.tenant, new.key.label) == ("initech", "laptop")
        assert accounts.authenticate(new.secret).tenant.name == "initech"
        changed = tenants_pb2.UpdateTenantRequest(name="initech", fields=tenants_pb2.TenantFields(weight=2.0))
        with pytest.raises(grpc.aio.AioRpcError):
            await call("UpdateTenant", changed, new.secret)
        assert (await call("UpdateTenant", changed)).weight == 2.0
        other = await call("RotateKey", tenants_pb2.RotateKeyRequest(id=new.key.id))
        assert (refused(accounts, new.secret), refused(accounts, other.secret)) == (True, False)
        listed = await call("ListKeys", tenants_pb2.ListKeysRequest(tenant="initech"))
        assert [key.disabled for key in listed.keys] == [True, False]
        disabled = await call("DisableTenant", tenants_pb2.DisableTenantRequest(name="initech"))
        assert disabled.disabled and refused(accounts, other.secret)
        assert (await call("DeleteTenant", tenants_pb2.DeleteTenantRequest(name="initech"))).keys == 2


async def test_the_same_in_a_terminal(gateway_app):
    gateway_app, accounts = gateway_app
    async with on_port(gateway_app) as url:

        async def run(*words: str, key: str = ADMIN_KEY) -> str:
            arguments = [*words, "--url", url, "--key", key]
            return (await asyncio.to_thread(CliRunner().invoke, cli, arguments)).stdout

        created = await run("tenants", "create", "initech", "--adapter", "poet", "--default-lane", "batch")
        assert all(word in created for word in ("initech", "batch", "interactive", "poet"))
        secret = (await run("keys", "create", "initech", "--label", "laptop")).strip().splitlines()[-1]
        who = accounts.authenticate(secret)
        assert (who.tenant.name, who.tenant.adapters) == ("initech", ("poet",))
        await run("tenants", "set", "initech", "--weight", "2", key=secret)
        assert accounts.tenant("initech").tenant.weight == 1, "a tenant's key opens nothing here"
        await run("tenants", "set", "initech", "--weight", "2")
        [shown] = json.loads(await run("tenants", "show", "initech", "--json"))
        assert (shown["weight"], shown["adapters"], shown["disabled"]) == (2.0, ["poet"], False)
        await run("tenants", "set", "initech", "--unknown-fields", "refuse", "--upstream", "cloud-*")
        assert accounts.tenant("initech").tenant.unknown_fields == "refuse"
        [shown] = json.loads(await run("tenants", "show", "initech", "--json"))
        assert (shown["unknown_fields"], shown["upstreams"]) == ("refuse", ["cloud-*"])
        await run("tenants", "set", "initech", "--class", "gold:weight=3,ttft_s=0.2,priority=-1", "--class", "bulk")
        assert accounts.tenant("initech").tenant.classes == {
            "gold": RequestClass(3.0, -1, 0.2),
            "bulk": RequestClass(),
        }
        assert not await run("tenants", "set", "initech", "--class", "gold:speed=3")
        assert "bulk 1, gold 3" in await run("tenants", "ls")
        await run("tenants", "set", "initech", "--class", "")
        assert not accounts.tenant("initech").tenant.classes
        for what in (("tenants", "initech"), ("keys", who.key_id)):
            await run(what[0], "disable", what[1])
            assert refused(accounts, secret)
            await run(what[0], "enable", what[1])
            assert not refused(accounts, secret)
        other = (await run("keys", "rotate", who.key_id[:8])).strip().splitlines()[-1]
        assert (refused(accounts, secret), refused(accounts, other)) == (True, False)
        listed = json.loads(await run("keys", "ls", "initech", "--json"))
        assert [(one["label"], one["disabled"]) for one in listed] == [("laptop", True), ("laptop", False)]
        await run("keys", "delete", who.key_id, "--yes")
        assert [one.key_id for one in accounts.keys("initech")] == [key_id(hash_key(other))]
        await run("tenants", "delete", "initech", "--yes")
        assert refused(accounts, other)
        assert [*accounts.records] == ["admin/boss"]


def test_a_weight_from_before_weights_had_bounds_is_read_as_the_nearest_one():
    written = encode_account(tenant_account(replace(ACME, weight=2.0), 1.0))
    for weight, read in ((b"1e308", 1000.0), (b"1e-308", 0.001), (b"2.0", 2.0)):
        account = decode_account(written.replace(b'"weight":2.0', b'"weight":' + weight), 7)
        assert account.tenant.weight == read and account.generation == 7
