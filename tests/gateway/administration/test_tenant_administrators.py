"""Administrators of one tenant: what they reach, and what they do not learn."""

from __future__ import annotations

import grpc
import pytest
from admin_room import AdminRoom, admin_room

from gateway.core.administrators import AdminRole
from gateway.http.openapi.operations import OPERATIONS
from gateway.pb import limits_pb2, tenants_pb2
from gateway.pb.limits_pb2_grpc import LimitAdminStub
from gateway.pb.tenants_pb2_grpc import TenantAdminStub
from gateway.rpc.api import GrpcServer

KEYS, LIMITS = "/admin/v1/keys", "/admin/v1/limits"
REACHED = {
    "GET /admin/v1/tenants/{name}",
    "GET /admin/v1/keys",
    "POST /admin/v1/keys",
    "GET /admin/v1/keys/{id}",
    "PATCH /admin/v1/keys/{id}",
    "DELETE /admin/v1/keys/{id}",
    "POST /admin/v1/keys/{id}/rotate",
    "POST /admin/v1/keys/{id}/disable",
    "POST /admin/v1/keys/{id}/enable",
    "GET /admin/v1/limits",
    "PATCH /admin/v1/limits",
    "POST /admin/v1/limits/reset",
    "GET /admin/v1/limits/usage",
    "GET /admin/v1/usage",
    "GET /admin/v1/batches",
    "POST /admin/v1/batches/{tenant}/{batch_id}/cancel",
}


@pytest.fixture
async def room(tmp_path):
    async with admin_room(tmp_path) as found:
        await found.admin("acme-ops", AdminRole.OWNER, "acme")
        yield found


def test_what_they_reach_is_listed_here():
    assert {f"{row.method} {row.path}" for row in OPERATIONS if row.of_tenant} == REACHED


@pytest.mark.parametrize(
    "operation",
    [row for row in OPERATIONS if row.who == "admin" and not row.of_tenant],
    ids=lambda row: f"{row.method} {row.path}",
)
async def test_the_installation_is_out_of_reach(room, operation):
    bodies = {
        "/admin/v1/tenants": {"name": "new"},
        "/admin/v1/admins": {"name": "new", "role": "owner"},
        "/admin/v1/adapters": {"name": "new", "source": "poet"},
        "/admin/v1/engines": {"name": "new", "address": "127.0.0.1:1"},
        "/v1/load_lora_adapter": {"lora_name": "new", "lora_path": "poet"},
        "/v1/unload_lora_adapter": {"lora_name": "poet"},
        "/admin/v1/tenants/{name}": {"weight": 2.0},
        "/admin/v1/admins/{name}": {"role": "viewer"},
        "/admin/v1/adapters/{name:path}/aliases": {"alias": "x"},
        "/admin/v1/adapters/{name:path}/tenants": {"tenants": []},
    }
    names = {"{name}": "acme", "{name:path}": "poet", "{lane}": "batch", "{engine}": "x", "{id}": "x" * 12}
    path = operation.path
    for placeholder, name in names.items():
        path = path.replace(placeholder, name)
    body = bodies.get(operation.path) if operation.method in ("POST", "PATCH") else None
    async with room.app.client(room.secrets["acme-ops"]) as client:
        refused = await client.request(operation.method, path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied"), refused.text


async def test_they_manage_their_tenants_keys(room):
    async with room.app.client(room.secrets["acme-ops"]) as client:
        made = (await client.post(KEYS, json={"tenant": "acme", "label": "laptop"})).json()
        assert room.accounts.authenticate(made["key"]).tenant.name == "acme"
        rotated = (await client.post(f"{KEYS}/{made['id']}/rotate")).json()
        for verb in ("disable", "enable"):
            assert (await client.post(f"{KEYS}/{rotated['id']}/{verb}")).status_code == 200
        listed = (await client.get(KEYS, params={"tenant": "acme"})).json()["keys"]
        assert [key["id"] for key in listed] == [made["id"], rotated["id"]]
        assert (await client.delete(f"{KEYS}/{rotated['id']}")).json() == {"deleted": True}
        assert (await client.get("/admin/v1/tenants/acme")).json()["name"] == "acme"
        assert (await client.get("/admin/v1/usage", params={"tenant": "acme"})).status_code == 200


async def test_others_tenants_and_keys_look_like_none(room):
    other = await room.accounts.create_key("globex")
    async with room.app.client(room.secrets["acme-ops"]) as client:

        async def error(method: str, path: str, **more: object) -> tuple[int, str]:
            refused = await client.request(method, path, **more)
            return refused.status_code, refused.json()["error"]["message"]

        for name in ("globex", "unknown"):
            message = f"there is no tenant {name!r}"
            assert await error("GET", f"/admin/v1/tenants/{name}") == (404, message)
            assert await error("POST", KEYS, json={"tenant": name}) == (404, message)
            for path in (KEYS, LIMITS, f"{LIMITS}/usage", "/admin/v1/usage", "/admin/v1/batches"):
                assert await error("GET", path, params={"tenant": name}) == (404, message)
            assert await error("PATCH", LIMITS, json={"tenant": name, "key": "*", "tokens_per_day": 1}) == (
                404,
                message,
            )
            assert await error("POST", f"/admin/v1/batches/{name}/batch_1/cancel") == (404, message)
        for key_id in (other.account.key_id, other.account.key_hash, other.account.key_id[:6], "0" * 12):
            for method, verb in (("GET", ""), ("DELETE", ""), ("POST", "/rotate"), ("POST", "/disable")):
                assert await error(method, f"{KEYS}/{key_id}{verb}") == (404, f"{key_id!r} is no key's")
            changed = await error("PATCH", f"{KEYS}/{key_id}", json={"label": "mine"})
            assert changed == (404, f"{key_id!r} is no key's")
        for path in (KEYS, LIMITS, f"{LIMITS}/usage", "/admin/v1/usage", "/admin/v1/batches"):
            status, message = await error("GET", path)
            assert (status, "acme" in message) == (400, True)
    assert room.accounts.authenticate(other.secret).tenant.name == "globex"
    assert len(room.accounts.keys()) == 1


async def test_they_set_limits_below_their_tenants_own(room):
    async with room.app.client(room.secrets["acme-ops"]) as client:
        change = {"tenant": "acme", "requests_per_minute": 1_000_000}
        refused = await client.patch(LIMITS, json=change)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        refused = await client.post(f"{LIMITS}/reset", json={"tenant": "acme", "used": True})
        assert refused.status_code == 403
        reached = await client.patch(LIMITS, json={**change, "adapter": "poet"})
        assert reached.status_code != 403, reached.text
        other, own = [(await room.accounts.create_key(tenant)).account.key_id for tenant in ("globex", "acme")]
        for key_id in (other, "0" * 12):
            refused = await client.patch(LIMITS, json={**change, "key": key_id})
            assert (refused.status_code, refused.json()["error"]["message"]) == (404, f"{key_id!r} is no key's")
        for key_id in (own, "*"):
            assert (await client.patch(LIMITS, json={**change, "key": key_id})).status_code not in (403, 404)


async def test_a_role_of_a_tenant_is_no_more_than_that_role(room):
    viewer = await room.admin("acme-eyes", AdminRole.VIEWER, "acme")
    async with room.app.client(viewer) as client:
        assert (await client.get(KEYS, params={"tenant": "acme"})).status_code == 200
        refused = await client.post(KEYS, json={"tenant": "acme"})
        assert "role accounts or owner" in refused.json()["error"]["message"]


async def test_the_same_over_grpc(room: AdminRoom):
    other = await room.accounts.create_key("globex")
    key = (("authorization", f"Bearer {room.secrets['acme-ops']}"),)
    async with (
        GrpcServer(room.app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        tenants, limits = TenantAdminStub(channel), LimitAdminStub(channel)
        made = await tenants.CreateKey(tenants_pb2.CreateKeyRequest(tenant="acme"), metadata=key)
        assert made.key.tenant == "acme"
        scope = limits_pb2.LimitScope(tenant="globex", adapter="*")
        for call, request, status in (
            (tenants.CreateKey, tenants_pb2.CreateKeyRequest(tenant="globex"), "NOT_FOUND"),
            (tenants.DeleteKey, tenants_pb2.DeleteKeyRequest(id=other.account.key_id), "NOT_FOUND"),
            (tenants.ListKeys, tenants_pb2.ListKeysRequest(), "INVALID_ARGUMENT"),
            (tenants.ListTenants, tenants_pb2.ListTenantsRequest(), "PERMISSION_DENIED"),
            (limits.Set, limits_pb2.SetLimitsRequest(scope=scope), "NOT_FOUND"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, metadata=key)
            assert caught.value.code().name == status
    assert room.accounts.authenticate(other.secret).tenant.name == "globex"


async def test_a_limit_on_more_of_a_keys_hash_is_the_keys(room):
    own = await room.accounts.create_key("acme")
    own_id, own_hash = own.account.key_id, own.account.key_hash
    async with room.app.client(room.secrets["acme-ops"]) as client:
        for name in (own_hash[:13], own_hash):
            changed = await client.patch(LIMITS, json={"tenant": "acme", "key": name, "tokens_per_day": 7})
            assert (changed.status_code, changed.json()["key"]) == (200, own_id)
        longer = f"{own_id}{'0' if own_hash[12] != '0' else '1'}"
        refused = await client.patch(LIMITS, json={"tenant": "acme", "key": longer, "tokens_per_day": 7})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "key_not_found")
        limits = (await client.get(LIMITS, params={"tenant": "acme"})).json()["limits"]
    assert [entry["key"] for entry in limits if entry["tokens_per_day"] == 7] == [own_id]
