"""One rule for names, wherever they are given: no name means something else once a client has normalised its URL."""

from __future__ import annotations

from urllib.parse import urljoin

import pytest
from fakes import build_gateway_app

from gateway.cli.serve import _with_adapters
from gateway.client import account_calls, adapter_calls, operation_calls
from gateway.config.file import ConfigError
from gateway.config.whole import Config, load_config
from gateway.core.names import ADAPTER_NAME, ENGINE_NAME, MODEL_NAME, TENANT_NAME
from gateway.core.tenants import RequestClass, Tenant

RULES = {"model": MODEL_NAME, "adapter": ADAPTER_NAME, "tenant": TENANT_NAME, "engine": ENGINE_NAME}
BAD = ("", ".", "..", "a/../b", "a/./b", "t/", "/t", "a//b", "a/.b", "-a", "_a", "a b", "a\n", "ä", "a?b", "a#b", "a%b")
BOUNDARY = {MODEL_NAME: "a:b/c:d", ADAPTER_NAME: "a.b/c_d-e", TENANT_NAME: "a.b_c-d", ENGINE_NAME: "a:b.c"}
URL = "http://here/admin/v1/things/"


@pytest.mark.parametrize("kind", RULES)
def test_each_rule_takes_only_names_that_stay_as_they_are_in_a_url(kind):
    rule = RULES[kind]
    assert [name for name in (*BAD, "x" * (rule.most + 1)) if rule.fits(name)] == []
    for name in ("a", "0", BOUNDARY[rule], "v1..2", "x" * rule.most):
        assert rule.fits(name) and urljoin(URL, f"./{name}") == URL + name
    assert rule.fits("a/b") == rule.parts and rule.fits("a:b") == rule.colon


SECTIONS = {
    "model.name": "model: {{source: x, name: {name}}}",
    "models": "models: {{{name}: {{source: x}}}}",
    "adapters.preload": "adapters: {{preload: {{{name}: /a}}}}",
    "models.m.adapters.preload": "models: {{m: {{source: x, adapters: {{preload: {{{name}: /a}}}}}}}}",
    "routes": "routes: {{{name}: {{policy: weighted, members: {{m: 1}}}}}}",
    "upstreams": "upstreams: {{{name}: {{url: 'https://x/v1', model: y}}}}",
    "tenants": "tenants: {{{name}: {{keys: ['${{KEY}}']}}}}",
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", ["a/../b", "t/", ".."])
def test_the_configuration_takes_no_such_name(section, name, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(SECTIONS[section].format(name=f'"{name}"') + "\n")
    with pytest.raises(ConfigError, match="letters, digits"):
        load_config(file, {"KEY": "sk-0123456789abcdef"})


def test_options_and_tenants_take_no_such_name():
    with pytest.raises(ConfigError, match=r"adapters\.preload: 'a/\.\./b' cannot be the name of an adapter"):
        _with_adapters(Config(), ["a/../b=/x"], [])
    for fields in ({"name": "a/b"}, {"name": "a", "classes": {"..": RequestClass()}}):
        with pytest.raises(ValueError, match="must be 1 to 64 letters"):
            Tenant(**fields)


CREATED = {
    "/v1/load_lora_adapter": lambda name: {"lora_name": name, "lora_path": "poet"},
    "/admin/v1/adapters": lambda name: {"name": name, "source": "poet"},
    "/admin/v1/adapters/poet/aliases": lambda name: {"alias": name},
    "/admin/v1/adapters/poet/tenants": lambda name: {"tenants": [name]},
    "/admin/v1/engines": lambda name: {"name": name, "address": "host:7001"},
}


@pytest.mark.parametrize("path", CREATED)
async def test_administrators_cannot_give_such_a_name(path, tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client("sk-admin") as client:
        before = (await client.get("/admin/v1/adapters")).text
        for name in ("a/../b", "t/", "..", "a//b"):
            refused = await client.post(path, json=CREATED[path](name))
            assert refused.status_code == 400, refused.text
        assert (await client.get("/admin/v1/adapters")).text == before


async def test_a_url_of_another_form_of_a_name_changes_no_adapter(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client("sk-admin") as client:
        for path in ("a%2F..%2Fpoet", "%2Fpoet", "poet%2Fx%2F.."):
            assert (await client.delete(f"/admin/v1/adapters/{path}")).status_code == 404
    assert "poet" in gateway_app.adapters.records


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_clients_put_no_name_into_a_path_that_would_be_left_out(name):
    for call in (
        account_calls.tenant,
        account_calls.key,
        operation_calls.remove_engine,
        operation_calls.cancel_request,
        operation_calls.batch,
        adapter_calls.unload_adapter,
        lambda part: adapter_calls.unload_adapter(f"a/{part}/b"),
    ):
        with pytest.raises(ValueError, match="is no name"):
            call(name)
