"""What administrators write with a misspelling is refused, wherever they write it: it would change more than meant."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from batch_fakes import stored_options
from fakes import GatewayApp, build_gateway_app

from gateway.api_schema.operation import PLACEHOLDER, Operation
from gateway.config.file import ConfigError
from gateway.config.whole import load_config
from gateway.http.openapi.document import document
from gateway.http.openapi.operations import OPERATIONS

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
WRONG = "unknwon"
ROUTED = [operation for operation in OPERATIONS if operation.who == "admin" and operation.path != "/metrics"]


@pytest.fixture
async def gateway_app(valkey, tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path, **stored_options(valkey, tmp_path / "stored"))


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield each schema of an object in a schema, following references."""
    if isinstance(schema, list):
        for each in schema:
            yield from objects(each)
    elif isinstance(schema, dict):
        if reference := schema.get("$ref"):
            yield from objects(SCHEMAS[reference.rpartition("/")[2]])
        elif schema.get("type") == "object":
            yield schema
        for key, each in schema.items():
            yield from objects(each) if key != "default" else ()


def test_no_body_of_administrators_has_room_for_unknown_fields():
    found = 0
    for operation in ROUTED:
        described = DOCUMENT["paths"][PLACEHOLDER.sub(r"{\1}", operation.path)][operation.method.lower()]
        for each in objects(described.get("requestBody", {})):
            found += 1
            allowed = each["additionalProperties"] if "properties" in each else False
            assert allowed is False, f"{operation.method} {operation.path}: {each}"
    assert found > 12


async def test_what_is_misspelt_is_refused_by_every_operation_of_administrators(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        for operation in ROUTED:
            path = PLACEHOLDER.sub("pirate", operation.path)
            answers = [await client.request(operation.method, path, params={WRONG: "1"})]
            if operation.method != "GET":
                answers.append(await client.request(operation.method, path, json=filled(operation)))
            for answer in answers:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, WRONG), operation
    assert list(gateway_app.adapters.records) == ["pirate", "poet"]


def filled(operation: Operation) -> dict[str, Any]:
    """Return a body of an operation that has all required fields, each of a right type, and an unknown one."""
    if operation.body is None:
        return {WRONG: True}
    schema = SCHEMAS[operation.body.__name__]
    kinds = {name: schema["properties"][name]["type"] for name in schema.get("required", ())}
    return {**{name: [] if kind == "array" else "x" for name, kind in kinds.items()}, WRONG: True}


async def test_a_misspelling_of_tenants_gives_an_adapter_to_nobody(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        body = {"name": "bard", "source": "poet", "tenant": ["acme"]}
        answer = await client.post("/admin/v1/adapters", json=body)
        shown = await client.get("/admin/v1/adapters/bard")
    assert answer.json()["error"]["message"] == "there is no field 'tenant'; did you mean 'tenants'?"
    assert (answer.status_code, shown.status_code) == (400, 404)


async def test_fields_of_vllms_clients_are_known(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        loaded = {"lora_name": "bard", "lora_path": "poet", "load_inplace": False, "is_3d_lora_weight": False}
        assert (await client.post("/v1/load_lora_adapter", json=loaded)).status_code == 200
        unloaded = {"lora_name": "bard", "lora_int_id": None}
        assert (await client.post("/v1/unload_lora_adapter", json=unloaded)).status_code == 200


CONFIGS = Path(__file__).parents[3] / "configs"
KEYS = ("STOREFRONT", "STOREFRONT_NEXT", "RESEARCH", "ADMIN")
ENV = {**{f"{name}_KEY": f"sk-{name}-0123456789" for name in KEYS}, "REDIS_URL": "redis://x:1/0"}
EXTRA = """
tenants:
  acme:
    keys: [sk-acme-0123456789abcdef]
    limits: {tokens_per_day: 1, when_redis_is_away: {tokens_per_day: open}}
    key_limits: {tokens_per_day: 1}
    adapter_limits: {tokens_per_day: 1}
    classes: {gold: {weight: 2}}
batches: {webhooks: {urls: ["https://x.y/"]}}
"""


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


@pytest.mark.parametrize("path", [*sorted(CONFIGS.glob("*.yaml")), None], ids=str)
def test_no_section_of_a_configuration_has_room_for_unknown_keys(path, tmp_path):
    given = yaml.safe_load(path.read_text() if path else EXTRA)
    for index in range(len(list(mappings(given)))):
        spoilt = copy.deepcopy(given)
        list(mappings(spoilt))[index][WRONG] = 1
        (tmp_path / "spoilt.yaml").write_text(yaml.safe_dump(spoilt))
        with pytest.raises(ConfigError):  # which names the key or, in a mapping of free names, what its value must be
            load_config(tmp_path / "spoilt.yaml", ENV)
