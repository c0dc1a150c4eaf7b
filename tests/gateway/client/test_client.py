"""The typed client against a gateway with fakes, and against the description of the HTTP API."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from msgspec import UNSET

sys.path.insert(0, str(Path(__file__).parents[1]))

from batch_fakes import stored_options
from fakes import BASE, GLOBEX, build_gateway_app, key_ring, write_adapter
from loralane import AsyncClient, Client, ClientError
from served import served

from gateway.client import account_calls
from gateway.client.call import Endpoint
from gateway.client.client import Methods
from gateway.http.openapi.operations import OPERATIONS

NO_METHODS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/metrics"}
"""Paths for administrators without a method: vLLM's routes, and metrics for Prometheus."""
METHODS = {name: value for name, value in vars(Methods).items() if isinstance(value, Endpoint)}
ARGUMENTS = {"lane": "batch", "documents": ["x"], "tenants": ["x"], "tokens": [1]}


def example(endpoint):
    """Return the call that an endpoint makes of its required arguments."""
    needed = [one.name for one in inspect.signature(endpoint._make).parameters.values() if one.default is one.empty]
    return endpoint._make(**{name: ARGUMENTS.get(name, "x") for name in needed if name not in ("settings", "changes")})


def operation_of(call):
    """Return the operation of the HTTP API that a call is for; one with a literal path goes before one with a name."""
    fitting = [
        operation
        for operation in OPERATIONS
        if operation.method == call.method and re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", operation.path), call.path)
    ]
    return min(fitting, key=lambda operation: operation.path.count("{"))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_an_operation_of_the_api(name):
    call = example(METHODS[name])
    operation = operation_of(call)
    assert operation.answer is call.kind
    assert operation.body in (None, type(call.body))
    assert (operation.body is None) == (call.body is None)
    assert call.query.keys() <= operation.query.keys()
    assert METHODS[name].__doc__


def test_the_client_imports_no_server():
    code = "import sys, gateway.client.client; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    rooms = {name.split(".")[1] for name in modules if name.startswith("gateway.")}
    assert rooms == {"api_schema", "client", "core"}
    assert not {"google", "grpc", "numpy", "redis", "starlette", "torch"} & set(modules)


def test_usage_without_groups_is_one_line():
    assert account_calls.usage(group_by=[]).parameters["group_by"] == "none"
    assert account_calls.usage(group_by=["tenant", "lane"]).parameters["group_by"] == "tenant,lane"
    assert "group_by" not in account_calls.usage().parameters


def test_every_operation_of_administrators_has_a_method():
    served_by = [operation_of(example(endpoint)) for endpoint in METHODS.values()]
    missing = {operation.path for operation in OPERATIONS if operation.who == "admin" and operation not in served_by}
    assert missing == NO_METHODS


@pytest.fixture
async def gateway_app(tmp_path):
    accounts = key_ring()
    await accounts.start()
    yield await build_gateway_app(tmp_path, accounts=accounts)
    await accounts.close()


def client_of(gateway_app, key="sk-admin"):
    http = httpx.AsyncClient(transport=httpx.ASGITransport(gateway_app.app))
    return AsyncClient("http://test", key, http=http)


async def test_lanes_engines_and_requests(gateway_app):
    async with client_of(gateway_app) as client:
        assert [lane.lane for lane in await client.lanes()] == ["interactive", "batch"]
        assert (await client.pause_lane("batch")).mode == "paused"
        assert (await client.resume_lane("batch")).mode == "open"
        [engine] = await client.engines()
        assert (await client.drain_engine(engine.name)).state == "draining"
        assert (await client.add_engine("second", "127.0.0.1:7001")).name == "second"
        assert (await client.remove_engine("second")).deleted
        assert (await client.live_requests()).total == 0
        assert await client.recent_requests("failed") == []
        found = await client.overview("models,lanes")
        assert (found.models, found.engine) == ([BASE], UNSET)
        assert await client.violations() == ["page 7 is lost"]
        assert (await client.history(5)).step_seconds > 0
        with pytest.raises(ClientError) as caught:
            await client.cancel_request("unknown")
        assert (caught.value.status, caught.value.code) == (404, "request_not_found")


async def test_adapters(gateway_app, tmp_path):
    async with client_of(gateway_app) as client:
        assert [adapter.name for adapter in await client.adapters()] == ["pirate", "poet"]
        source = str(write_adapter(tmp_path, "team"))
        assert (await client.load_adapter("team/first", source, tenants=["acme"])).tenants == ("acme",)
        assert (await client.pin_adapter("team/first")).pinned
        assert (await client.alias_adapter("team/first", "first")).aliases == ("first",)
        assert (await client.allow_adapter("team/first", [])).tenants == ()
        assert not (await client.reload_adapter("team/first")).changed
        assert await client.unload_adapter("team/first", drain_seconds=0) == 2
        with pytest.raises(ClientError) as caught:
            await client.load_adapter("pirate", source)
        assert (caught.value.status, caught.value.code, caught.value.param) == (409, "adapter_conflict", "name")


async def test_accounts_limits_and_usage(gateway_app):
    async with client_of(gateway_app) as client:
        assert (await client.create_tenant("umbrella", default_lane="batch")).default_lane == "batch"
        key = await client.create_key("umbrella", "first")
        assert [one.id for one in await client.keys("umbrella")] == [key.id]
        assert (await client.rotate_key(key.id)).key != key.key
        assert (await client.delete_key(key.id)).deleted
        assert (await client.disable_tenant("umbrella")).disabled
        assert await client.delete_tenant("umbrella") == 1
        assert (await client.set_limits(GLOBEX.name, tokens_per_minute=None)).tokens_per_minute is None
        assert (await client.reset_limits(GLOBEX.name)).tokens_per_minute == 200
        assert {scope.tenant for scope in await client.limits_used()} == {"acme", "globex"}
        async with client_of(gateway_app, "sk-acme") as tenant:
            assert await tenant.detokenize((await tenant.tokenize("The sea")).tokens) == "The sea"
            ranking = await tenant.rerank(BASE, "the sea", ["a boat", "a car"], top_n=1)
            assert len(ranking.results) == 1
            assert len((await tenant.score(BASE, "the sea", ["a boat", "a car"])).data) == 2
            with pytest.raises(ClientError, match="an administrator's key"):
                await tenant.usage()
        report = await client.usage(tenant="acme", group_by=["lane"])
        assert [line.lane for line in report.usage] == ["interactive"]
        assert report.usage[0].tenant is UNSET


def test_the_client_without_an_event_loop(tmp_path):
    with served(tmp_path) as gateway, Client(gateway.url + "/", "sk-admin") as client:
        assert client.readiness().status == "ready"
        assert client.adapter("pirate").name == "pirate"
        with pytest.raises(ClientError) as caught:
            client.adapter("unknown")
        assert caught.value.status == 404
    with pytest.raises(httpx.ConnectError):
        Client(gateway.url, "sk-admin").lanes()


def test_other_servers_are_noticed():
    http = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text="<html>")))
    with Client("http://test", "sk", http=http) as client, pytest.raises(ClientError, match="no answer of a gateway"):
        client.lanes()


async def test_batches(valkey, tmp_path):
    gateway_app = await build_gateway_app(tmp_path, **stored_options(valkey, tmp_path / "stored"))
    async with client_of(gateway_app) as client:
        assert await client.batches() == []
        with pytest.raises(ClientError) as caught:
            await client.cancel_batch("acme", "batch_1")
        assert caught.value.code == "batch_not_found"
