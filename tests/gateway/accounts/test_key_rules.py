"""What keys may do of what their tenants may: expiry, models, adapters, networks, rotation and last use."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from fnmatch import fnmatchcase
from io import BytesIO

import grpc
import pytest
from fakes import BASE, build_gateway_app
from hypothesis import given
from hypothesis import strategies as st
from served import on_port
from typer.testing import CliRunner

from gateway.accounts import last_use
from gateway.accounts import registry as registry_of_accounts
from gateway.accounts.keys import KeyAdmin
from gateway.accounts.last_use import LastUse, RedisLastUse
from gateway.accounts.record import ACCOUNTS, KeyOwner, decode_account, encode_account, key_account
from gateway.accounts.registry import AccountRegistry
from gateway.batches.input import CheckParameters, InputCheck
from gateway.cli.main import app as cli
from gateway.config.file import ConfigError
from gateway.config.whole import load_config
from gateway.core import patterns
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.errors import ApiError, Fault
from gateway.core.key_rules import KeyRules, restricted
from gateway.core.networks import caller_address, parse_networks
from gateway.core.routing import Catalog
from gateway.core.tenants import Principal, Tenant, hash_key
from gateway.pb import generation_pb2, tenants_pb2
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.pb.tenants_pb2_grpc import TenantAdminStub
from gateway.registry.memory import MemoryRecordStore
from gateway.registry.store import StoreAway
from gateway.rpc.api import GrpcServer
from gateway.serve.reload_target import tenant_seed

ADMIN_KEY = "sk-admin-of-these-tests"
ADMINS = [(Administrator("boss", AdminRole.OWNER), hash_key(ADMIN_KEY))]
ACME = Tenant("acme", adapters=("p*",))
KEYS = "/admin/v1/keys"
CHAT = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def accounts(clock):
    registry = AccountRegistry(
        MemoryRecordStore(ACCOUNTS), lambda tenants: None, clock, proxies=parse_networks(["10.9.0.0/16"])
    )
    await registry.start()
    await registry.administrators.seed(ADMINS)
    await registry.create(ACME)
    yield registry
    await registry.close()


def fault(work) -> Fault:
    with pytest.raises(ApiError) as caught:
        work()
    return caught.value.fault


async def test_a_key_is_refused_from_its_expiry_on(accounts, clock):
    new = await accounts.create_key("acme", rules=KeyRules(expires_at=clock.now + 60))
    other = await accounts.create_key("acme")
    assert accounts.authenticate(new.secret).tenant == ACME
    clock.now += 60
    assert fault(lambda: accounts.authenticate(new.secret)) is Fault.KEY_EXPIRED
    assert accounts.authenticate(other.secret).tenant == ACME
    assert isinstance(accounts.holder("acme", new.account.key_id), Principal), "work accepted before goes on"
    await accounts.disable_key(new.account.key_id, True)
    assert fault(lambda: accounts.authenticate(new.secret)) is Fault.INVALID_API_KEY


async def test_a_rotation_with_overlap_ends_the_old_key_later_and_keeps_the_rules(accounts, clock):
    keys = KeyAdmin(accounts, clock)
    old = await keys.create("acme", {"label": "ci", "adapters": ["poet"], "networks": ["10.0.0.0/8"]})
    new = await keys.rotate(old.account.key_id, overlap_s=3600)
    assert new.account.key.label == "ci"
    assert new.account.key.rules == KeyRules(adapters=("poet",), networks=("10.0.0.0/8",))
    assert new.account.counts_as == old.account.key_id
    clock.now += 3599
    assert accounts.authenticate(old.secret).limits_key == accounts.authenticate(new.secret).limits_key
    clock.now += 1
    assert fault(lambda: accounts.authenticate(old.secret)) is Fault.KEY_EXPIRED
    assert accounts.authenticate(new.secret).key_id == new.account.key_id


async def test_a_rotated_key_has_its_lifetime_again(accounts, clock):
    keys = KeyAdmin(accounts, clock)
    old = await keys.create("acme", {"expires_at": clock.now + 1000})
    clock.now += 900
    new = await keys.rotate(old.account.key_id, overlap_s=500)
    assert new.account.key.rules.expires_at == clock.now + 1000
    assert accounts.key(old.account.key_id).key.rules.expires_at == clock.now + 100, "an overlap extends nothing"
    endless = await keys.rotate(new.account.key_id, expires_at=None)
    assert endless.account.key.rules.expires_at is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_at": 1.0}, "expires_at"),
        ({"networks": ["10.0.0.1/8"]}, "networks"),
        ({"networks": ["elsewhere"]}, "networks"),
        ({"models": ["a" * 300]}, "models"),
        ({"adapters": ["a"] * 101}, "adapters"),
        ({"label": "a\nb"}, "label"),
        ({"models": ["*?[" * 3]}, "models"),
        ({"adapters": ["poet", "*" * 9]}, "adapters"),
        ({"adapters": ["a?"] * 9}, "adapters"),
        ({"models": ["[ab]"] * 5, "adapters": ["[ab]"] * 4}, "models"),
        ({"adapters": ["a" * 256] * 64}, "adapters"),
        ({"models": ["é\0" * 80] * 60}, "models"),
    ],
)
async def test_nonsense_is_refused_by_name(accounts, clock, fields, param):
    with pytest.raises(ApiError) as caught:
        await KeyAdmin(accounts, clock).create("acme", fields)
    assert (caught.value.fault, caught.value.param) == (Fault.INVALID_REQUEST, param)
    assert accounts.keys("acme") == []


@given(st.text("ab*?[]!", max_size=8), st.text("ab[]*", max_size=10))
def test_patterns_match_as_those_of_a_shell_do(pattern, name):
    assert patterns.matches(name, pattern) == fnmatchcase(name, pattern)


def test_only_few_patterns_of_a_key_are_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(patterns, "fnmatchcase", lambda name, pattern: compiled.append(pattern))
    names = tuple(f"name-{number}-*-of-*" for number in range(92))
    few = tuple(f"name-{number}-[ab]" for number in range(8))
    tenant = restricted(Tenant("acme"), KeyRules(adapters=names + few))
    assert not tenant.may_use("name-100")
    assert compiled == list(few)


async def test_a_tenant_has_at_most_so_many_keys(accounts, monkeypatch):
    monkeypatch.setattr(registry_of_accounts, "MOST_KEYS", 3)
    await accounts.create(Tenant("globex"))
    await accounts.seed(ACME, [hash_key("sk-of-the-file")])
    first, _ = [await accounts.create_key("acme") for _ in range(2)]
    for change in (accounts.create_key("acme"), accounts.rotate(first.account.key_id)):
        with pytest.raises(ApiError, match="tenant acme has 3 keys, the maximum; delete keys") as caught:
            await change
        assert caught.value.fault is Fault.TENANT_CONFLICT
    await accounts.create_key("globex")
    assert accounts.authenticate(first.secret).tenant == ACME, "a refused rotation leaves the old key as it is"
    await accounts.delete_key(first.account.key_id)
    await accounts.create_key("acme")
    await accounts.seed(ACME, [hash_key(f"sk-of-the-file-{number}") for number in range(3)])
    assert len(accounts.keys("acme")) == 5


async def test_deleted_keys_leave_nothing_behind(accounts):
    before = len(accounts._mirror._keys)
    new = await accounts.create_key("acme")
    await accounts.delete_key(new.account.key_id)
    assert len(accounts._mirror._keys) == before


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("10.1.2.3", "", "10.1.2.3"),
        ("::ffff:10.1.2.3", "", "10.1.2.3"),
        ("10.1.2.3", "1.1.1.1", "10.1.2.3"),  # from no proxy
        ("10.9.0.1", "6.6.6.6, 192.0.2.7", "192.0.2.7"),  # what stands before it may be made up
        ("10.9.0.1", "192.0.2.7, 10.9.0.2", "192.0.2.7"),
        ("10.9.0.1", "192.0.2.7:4711", "192.0.2.7"),
        ("10.9.0.1", "[2001:db8::1]:80", "2001:db8::1"),
        ("10.9.0.1", "unknown", None),
        ("10.9.0.1", "", "10.9.0.1"),
        ("", "192.0.2.7", None),
    ],
)
def test_where_a_request_comes_from(peer, forwarded, found):
    address = caller_address(peer, forwarded, parse_networks(["10.9.0.0/16"]))
    assert (None if address is None else str(address)) == found


async def test_a_key_is_refused_elsewhere_than_in_its_networks(accounts):
    new = await accounts.create_key("acme", rules=KeyRules(networks=("192.0.2.0/24",)))
    who = accounts.authenticate(new.secret)
    accounts.check_address(who, "192.0.2.9", "")
    accounts.check_address(who, "10.9.0.1", "192.0.2.9")
    for peer, forwarded in (("127.0.0.1", "192.0.2.9"), ("10.9.0.1", "192.0.2.9, 198.51.100.1"), ("", "")):
        assert fault(lambda at=(peer, forwarded): accounts.check_address(who, *at)) is Fault.ADDRESS_NOT_ALLOWED


async def test_a_refused_key_is_not_used(accounts, clock):
    far = await accounts.create_key("acme", rules=KeyRules(networks=("192.0.2.0/24",)))
    ended = await accounts.create_key("acme", rules=KeyRules(expires_at=clock.now))
    ids = [far.account.key_id, ended.account.key_id]
    assert fault(lambda: accounts.authenticate(ended.secret)) is Fault.KEY_EXPIRED
    who = accounts.authenticate(far.secret)
    assert fault(lambda: accounts.check_address(who, "127.0.0.1", "")) is Fault.ADDRESS_NOT_ALLOWED
    assert await accounts.last_use.read(ids) == {}
    accounts.check_address(who, "192.0.2.9", "")
    assert await accounts.last_use.read(ids) == {far.account.key_id: int(clock.now)}


async def test_a_key_that_is_gone_is_not_written_as_used(accounts, clock):
    """Another gateway may have deleted it, and forgotten its use, when this one still accepted it."""
    store = MemoryUse()
    accounts.last_use._store = store
    gone, kept = [await accounts.create_key("acme") for _ in range(2)]
    await accounts.delete_key(gone.account.key_id)
    for key in (gone, kept):
        accounts.last_use.note(key.account.key_id)
    await accounts.last_use.write()
    assert store.writes == [{kept.account.key_id: int(clock.now)}]


async def test_only_the_times_of_the_keys_that_are_shown_are_read(accounts):
    store = MemoryUse()
    accounts.last_use._store = store
    one, _ = [await accounts.create_key("acme") for _ in range(2)]
    asked = []
    store.read = lambda key_ids: asked.append(list(key_ids)) or MemoryUse.read(store, key_ids)
    await KeyAdmin(accounts).shown_one(one.account)
    assert asked == [[one.account.key_id]]


def test_records_of_before_have_no_rules():
    account = key_account("ab" * 32, KeyOwner("acme", "ci", rules=KeyRules(1.9e9, networks=("10.0.0.0/8",))), 1.0)
    assert decode_account(encode_account(account), 0) == account
    written = json.loads(encode_account(account))
    del written["key"]["rules"]
    assert decode_account(json.dumps(written).encode(), 0).key.rules == KeyRules()


class MemoryUse:
    def __init__(self) -> None:
        self.writes, self.is_away = [], False

    async def write(self, times):
        if self.is_away:
            raise StoreAway("gone")
        self.writes.append(dict(times))

    async def read(self, key_ids):
        return {key: at for times in self.writes for key, at in times.items() if key in key_ids}

    async def forget(self, key_ids):
        self.writes = [{key: at for key, at in times.items() if key not in key_ids} for times in self.writes]


async def test_a_keys_last_use_is_written_once_however_often_it_is_used(clock):
    store = MemoryUse()
    use = LastUse(store, clock)
    for _ in range(1000):
        use.note("a")
    use.note("b")
    await use.write()
    await use.write()
    assert store.writes == [{"a": int(clock.now), "b": int(clock.now)}]
    store.is_away, written = True, int(clock.now)
    use.note("a")
    clock.now += 60
    await use.write()
    assert await use.read(["a", "b"]) == {"a": int(clock.now), "b": written}
    store.is_away = False
    await use.write()
    assert store.writes[1:] == [{"a": int(clock.now)}]
    await use.forget(["a"])
    assert await use.read(["a", "b"]) == {"b": written}


async def test_last_uses_are_shared_by_gateways(valkey, monkeypatch):
    monkeypatch.setattr(last_use, "WRITE_SECONDS", 0.01)
    one, other = LastUse(RedisLastUse(valkey)), LastUse(RedisLastUse(valkey))
    one.start(lambda key_id: True)
    one.note("a")
    async with asyncio.timeout(30):
        while "a" not in await other.read(["a"]):
            await asyncio.sleep(0.01)
    await one.close()
    await other.forget(["a"])
    assert await one.read(["a"]) == {}


@pytest.fixture
async def gateway_app(tmp_path, accounts):
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.open_again(accounts)
    return gateway_app


async def test_a_key_names_only_its_models_and_adapters(gateway_app, accounts):
    async with gateway_app.client(ADMIN_KEY) as admin:
        body = {"tenant": "acme", "models": [], "adapters": ["po*"]}
        key = (await admin.post(KEYS, json=body)).json()
        assert (key["models"], key["adapters"], key["last_used"]) == ([], ["po*"], None)
        async with gateway_app.client(key["key"]) as caller:

            async def names() -> list[str]:
                return [card["id"] for card in (await caller.get("/v1/models")).json()["data"]]

            async def status(model: str) -> int:
                return (await caller.post("/v1/chat/completions", json={**CHAT, "model": model})).status_code

            assert await names() == ["poet"]
            assert [await status(model) for model in ("poet", "pirate", BASE)] == [200, 404, 404]
            assert (await caller.get(f"/v1/models/{BASE}")).status_code == 404
            assert (await caller.post("/tokenize", json={"prompt": "hi"})).status_code == 404
            assert (await caller.post("/tokenize", json={"prompt": "hi", "model": "poet"})).status_code == 200
            changed = await admin.patch(f"{KEYS}/{key['id']}", json={"models": ["*"], "adapters": ["*"]})
            assert changed.json()["models"] == ["*"]
            assert {*await names()} == {BASE, "captain", "pirate", "poet"}
            assert [await status(model) for model in ("pirate", BASE)] == [200, 200]
            await admin.patch("/admin/v1/tenants/acme", json={"adapters": ["poet"]})
            assert [await status(model) for model in ("poet", "pirate")] == [200, 404], "a key adds nothing"
        [shown] = (await admin.get(KEYS)).json()["keys"]
        assert shown["last_used"] == accounts._clock.now
        refused = await admin.patch(f"{KEYS}/{key['id']}", json={"model": ["*"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_expiry_and_networks_over_http(gateway_app, accounts, clock):
    ended = await accounts.create_key("acme", rules=KeyRules(expires_at=clock.now - 1))
    far = await accounts.create_key("acme", rules=KeyRules(networks=("203.0.113.0/24",)))
    near = await accounts.create_key("acme", rules=KeyRules(networks=("127.0.0.0/8",)))
    seen = {}
    for name, key in (("ended", ended), ("far", far), ("near", near)):
        async with gateway_app.client(key.secret) as caller:
            answer = await caller.post("/v1/messages", json=CHAT) if name == "ended" else await caller.get("/v1/models")
            seen[name] = (answer.status_code, answer.json())
            forwarded = await caller.get("/v1/models", headers={"x-forwarded-for": "203.0.113.9"})
            assert forwarded.status_code == seen[name][0], "this peer is no proxy"
    assert seen["ended"][0] == 401 and seen["ended"][1]["error"]["type"] == "authentication_error"
    assert (seen["far"][0], seen["far"][1]["error"]["code"]) == (403, "address_not_allowed")
    assert seen["near"][0] == 200
    async with gateway_app.client(ended.secret) as caller:
        assert (await caller.get("/v1/models")).json()["error"]["code"] == "key_expired"


async def test_all_of_it_over_grpc(gateway_app, accounts, clock):
    async with (
        GrpcServer(gateway_app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        admin, generation = TenantAdminStub(channel), GenerationStub(channel)
        as_admin = (("authorization", f"Bearer {ADMIN_KEY}"),)
        ends = clock.now + 10
        fields = tenants_pb2.KeyFields(expires_at=ends, set_models=True, adapters=["poet"], networks=["127.0.0.1"])
        request = tenants_pb2.CreateKeyRequest(tenant="acme", label="ci", fields=fields)
        new = await admin.CreateKey(request, metadata=as_admin)
        assert (new.key.label, new.key.expires_at, list(new.key.models)) == ("ci", ends, [])
        assert (list(new.key.adapters), list(new.key.networks)) == (["poet"], ["127.0.0.1"])

        async def models() -> list[str]:
            request = generation_pb2.ListModelsRequest()
            answer = await generation.ListModels(request, metadata=(("authorization", f"Bearer {new.secret}"),))
            return [model.id for model in answer.models]

        async def refusal() -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await models()
            return caught.value.code()

        assert await models() == ["poet"]
        only = tenants_pb2.UpdateKeyRequest(id=new.key.id, fields=tenants_pb2.KeyFields(networks=["203.0.113.0/24"]))
        assert list((await admin.UpdateKey(only, metadata=as_admin)).networks) == ["203.0.113.0/24"]
        assert await refusal() is grpc.StatusCode.PERMISSION_DENIED
        anywhere = tenants_pb2.KeyFields(set_networks=True)
        await admin.UpdateKey(tenants_pb2.UpdateKeyRequest(id=new.key.id, fields=anywhere), metadata=as_admin)
        clock.now += 10
        assert await refusal() is grpc.StatusCode.UNAUTHENTICATED
        forever = tenants_pb2.KeyFields(never_expires=True)
        await admin.UpdateKey(tenants_pb2.UpdateKeyRequest(id=new.key.id, fields=forever), metadata=as_admin)
        assert await models() == ["poet"]
        found = await admin.GetKey(tenants_pb2.GetKeyRequest(id=new.key.id), metadata=as_admin)
        assert not found.HasField("expires_at") and found.last_used == clock.now
        rotate = tenants_pb2.RotateKeyRequest(id=new.key.id, overlap_s=60)
        other = await admin.RotateKey(rotate, metadata=as_admin)
        assert list(other.key.adapters) == ["poet"]
        assert await models() == ["poet"]
        clock.now += 60
        assert await refusal() is grpc.StatusCode.UNAUTHENTICATED


async def test_in_a_terminal(gateway_app, accounts, clock, monkeypatch):
    monkeypatch.setattr("gateway.cli.keys.time.time", clock)
    async with on_port(gateway_app) as url:

        async def run(*words: str, typed: str = "") -> tuple[int, str, str]:
            arguments = [*words, "--url", url, "--key", ADMIN_KEY]
            result = await asyncio.to_thread(CliRunner().invoke, cli, arguments, typed)
            return result.exit_code, result.stdout, result.stderr

        rules = ("--expires", "90d", "--model", "", "--adapter", "po*", "--from", "127.0.0.0/8")
        status, out, _ = await run("keys", "create", "acme", "--label", "ci", *rules)
        secret = out.strip().splitlines()[-1]
        assert status == 0
        who = accounts.authenticate(secret)
        accounts.check_address(who, "127.0.0.1", "")
        [key] = accounts.keys("acme")
        assert key.key.rules == KeyRules(clock.now + 90 * 86_400, (), ("po*",), ("127.0.0.0/8",))
        for typed in (f"{secret}\n", hash_key(secret), f"sha256:{hash_key(secret)}", who.key_id):
            status, out, error = await run("keys", "find", typed=typed)
            assert status == 0, error
            assert all(word in out for word in (who.key_id, "acme", "ci", "po*", "127.0.0.0/8", "2027-"))
            assert secret not in out + error
        [found] = json.loads((await run("keys", "find", "--json", typed=secret))[1])
        assert (found["tenant"], found["last_used"]) == ("acme", clock.now)
        status, _, error = await run("keys", "find", typed="sk-a-wrong-key")
        assert status == 1 and "no tenant has this key" in error and "sk-a-wrong-key" not in error
        assert (await run("keys", "find"))[0] == 1
        await run("keys", "set", who.key_id, "--expires", "never", "--from", "any", "--label", "laptop")
        assert accounts.keys("acme")[0].key == KeyOwner("acme", "laptop", rules=KeyRules(None, (), ("po*",)))
        assert (await run("keys", "set", who.key_id, "--expires", "soon"))[0] == 2
        new = (await run("keys", "rotate", who.key_id, "--overlap", "1h"))[1].strip().splitlines()[-1]
        assert accounts.authenticate(secret).limits_key == accounts.authenticate(new).limits_key
        clock.now += 3600
        assert fault(lambda: accounts.authenticate(secret)) is Fault.KEY_EXPIRED
        assert "expired" in (await run("keys", "ls"))[1]


async def test_what_cannot_be_undone_is_asked_for(gateway_app, accounts, monkeypatch):
    new = await accounts.create_key("acme", "ci")
    async with on_port(gateway_app) as url:

        async def run(*words: str, typed: str = "", terminal: bool = False) -> tuple[int, str]:
            with monkeypatch.context() as patch:
                patch.setattr("gateway.cli.options.is_terminal", lambda: terminal)
                arguments = [*words, "--url", url, "--key", ADMIN_KEY]
                result = await asyncio.to_thread(CliRunner().invoke, cli, arguments, typed)
            return result.exit_code, " ".join(result.output.split())

        status, said = await run("keys", "delete", new.account.key_id)
        assert status == 1 and "say --yes" in said and f"Key {new.account.key_id} of acme, 'ci', goes for good" in said
        assert (await run("keys", "delete", new.account.key_id, typed="n\n", terminal=True))[0] == 1
        assert len(accounts.keys("acme")) == 1
        assert (await run("keys", "delete", new.account.key_id, typed="y\n", terminal=True))[0] == 0
        assert accounts.keys("acme") == []


def test_a_batchs_lines_are_checked_against_its_key():
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    parameters = CheckParameters(
        url="",
        endpoint="/v1/chat/completions",
        tenant=ACME,
        catalogs=(Catalog((BASE,), {"pirate", "poet"}),),
        max_lines=10,
        max_line_bytes=10_000,
    )
    for adapters, errors in ((("*",), 0), (("pirate",), 1)):
        parameters.rules = KeyRules(adapters=adapters)
        result, _ = InputCheck(parameters).run(BytesIO(json.dumps(line).encode()))
        assert len(result.errors) == errors
    assert result.errors[0].code == "model_not_found"


def test_a_tenant_as_a_key_sees_it_is_whole_for_members_of_virtual_models():
    tenant = restricted(ACME, KeyRules(models=("auto",), adapters=()))
    assert (tenant.may_use("poet"), tenant.may_use_base((BASE,)), tenant.may_use_virtual("auto")) == (False,) * 3
    wide = restricted(replace(ACME, adapters=("*",)), KeyRules(models=("auto",), adapters=()))
    assert (wide.may_use_virtual("auto"), wide.may_use_virtual("other")) == (True, False)
    assert wide.whole.may_use("poet")


async def test_the_configuration_describes_keys(tmp_path, clock):
    file = tmp_path / "loralane.yaml"
    text = (
        "tenants:\n  acme:\n    keys:\n"
        "      - ${PLAIN}\n"
        "      - {key: '${CI}', label: ci, expires_at: 2030-01-31, adapters: [poet], networks: [10.0.0.0/8]}\n"
        "http: {trusted_proxies: [10.9.0.0/16]}\n"
    )
    file.write_text(text)
    env = {"PLAIN": "sk-plain-0123456789", "CI": "sk-ci-0123456789"}
    config = load_config(file, env)
    rules = KeyRules(1_896_048_000.0, adapters=("poet",), networks=("10.0.0.0/8",))
    assert config.tenants["acme"].described[hash_key(env["CI"])].rules == rules
    assert config.http.trusted_proxies == ("10.9.0.0/16",)
    registry = AccountRegistry(MemoryRecordStore(ACCOUNTS), lambda tenants: None, clock)
    await registry.start()
    try:
        await registry.seed(*tenant_seed(config.tenants["acme"]))
        described, plain = registry.key(hash_key(env["CI"])), registry.key(hash_key(env["PLAIN"]))
        assert (described.key.label, described.key.rules, plain.key.rules) == ("ci", rules, KeyRules())
        await registry.amend_key(plain.key_id, lambda owner: replace(owner, label="live"))
        file.write_text(text.replace("[poet]", "[pirate]"))
        await registry.seed(*tenant_seed(load_config(file, env).tenants["acme"]))
        assert registry.key(described.key_id).key.rules.adapters == ("pirate",)
        assert registry.key(plain.key_id).key.label == "live"
    finally:
        await registry.close()
    for wrong, place in (
        ("label: [1]", "keys[1].label"),
        ("expires_at: soon", "keys[1].expires_at"),
        ("network: x", "keys[1].network"),
        ("networks: [x]", "keys[1]: networks"),
    ):
        file.write_text(f"tenants: {{acme: {{keys: ['${{PLAIN}}', {{key: '${{CI}}', {wrong}}}]}}}}")
        with pytest.raises(ConfigError) as caught:
            load_config(file, env)
        assert f"tenants.acme.{place}" in str(caught.value)


async def test_the_lookup_of_a_key_asks_no_store(accounts, monkeypatch):
    """A request's authorisation is answered from this process's memory."""
    new = await accounts.create_key("acme", rules=KeyRules(models=("a",)))
    monkeypatch.setattr(accounts, "_store", None)
    monkeypatch.setattr(accounts, "_log", None)
    assert accounts.authenticate(new.secret) is accounts.authenticate(new.secret)
    monkeypatch.undo()
