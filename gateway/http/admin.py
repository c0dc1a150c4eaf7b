"""The HTTP API for administrators: vLLM's two adapter routes, and everything else under /admin/v1."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from engine.rpc.stream import EngineUnavailable
from gateway.accounts.admin import AccountAdmin
from gateway.core.errors import ApiError, Fault, invalid_request, unavailable
from gateway.http.accounts import AccountsApi
from gateway.http.admin_batches import AdminBatchesApi
from gateway.http.edge import Handler, RouteEntry, authenticate, read_body
from gateway.http.limits import LIMITS, LimitsApi
from gateway.http.lists import check_parameters
from gateway.http.openapi.operation import Operation
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.operations import HistoryApi, OperationsApi
from gateway.http.settings import PortSettings
from gateway.http.stream import json_response
from gateway.http.usage import UsageApi
from gateway.limiter.admin import LimitAdmin
from gateway.openai.parse import Body, parse
from gateway.openai.schema import (
    AliasRequest,
    AllowRequest,
    LoadAdapterRequest,
    NativeLoadRequest,
    UnloadAdapterRequest,
)
from gateway.services import Services

ADAPTERS = "/admin/v1/adapters"
ADAPTER = ADAPTERS + "/{name:path}"
NATIVE_FIELDS: dict[str | None, str] = {"lora_name": "name", "lora_path": "source"}
"""Field of vLLM's adapter routes -> the same field below /admin/v1/adapters. Errors are raised with vLLM's names and
renamed by this mapping in responses below /admin/v1/adapters."""

TABLE = {(operation.method, operation.path): operation for operation in OPERATIONS if operation.who == "admin"}


class NoBody(Struct, forbid_unknown_fields=True):
    """Body of an operation that changes something but reads no fields: it may be absent, or an object without any."""


class AdminApi:
    """Routes of the admin API, which only administrators may call, with the handlers for adapters and the integrity
    check. Adapter names may contain slashes, so the action is the last path segment."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        gateway, operations, most = services.gateway, services.operations, settings.max_control_bytes
        self._gateway = gateway
        self._adapters = gateway.adapters
        self._accounts = services.accounts
        self._max_body_bytes = most
        limits = LimitAdmin(gateway.limiter, services.accounts.counts_as)
        self._limits = LimitsApi(limits, most)
        self._live = OperationsApi(operations, limits, gateway.adapters, services.usage, most)
        self._parts = (
            AccountsApi(AccountAdmin(services.accounts, gateway.limiter.drop), most),
            UsageApi(services.usage),
            self._live,
            HistoryApi(operations),
            AdminBatchesApi(services.batches, services.etas),
        )

    def routes(self) -> list[Route]:
        table: list[RouteEntry] = [
            ("POST", "/v1/load_lora_adapter", self.load_as_vllm),
            ("POST", "/v1/unload_lora_adapter", self.unload_as_vllm),
            ("GET", ADAPTERS, self.list),
            ("POST", ADAPTERS, self.load),
            ("POST", ADAPTER + "/reload", self.reload),
            ("POST", ADAPTER + "/pin", self.pin),
            ("POST", ADAPTER + "/unpin", self.unpin),
            ("POST", ADAPTER + "/aliases", self.alias),
            ("POST", ADAPTER + "/tenants", self.allow),
            ("GET", ADAPTER, self.show),
            ("DELETE", ADAPTER, self.unload),
            ("GET", LIMITS, self._limits.get),
            ("PATCH", LIMITS, self._limits.set),
            ("POST", LIMITS + "/reset", self._limits.reset),
            ("GET", LIMITS + "/usage", self._limits.usage),
            ("GET", "/admin/v1/check", self.check),
        ]
        for part in self._parts:
            table += part.table()
        return [
            Route(path, self._for_admins(handler, TABLE[method, path]), methods=[method])
            for method, path, handler in table
        ]

    async def load_as_vllm(self, request: Request) -> Response:
        body = await self._body(request, LoadAdapterRequest)
        registry = await self._adapters.to_load(body.lora_name, body.lora_path)
        await registry.load(body.lora_name, body.lora_path, replace=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_as_vllm(self, request: Request) -> Response:
        body = await self._body(request, UnloadAdapterRequest)
        await self._adapters.of(body.lora_name).unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def list(self, request: Request) -> Response:
        return json_response({"adapters": await self._adapters.statuses()})

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(await self._adapters.of(name).status(name))

    async def load(self, request: Request) -> Response:
        body = await self._body(request, NativeLoadRequest)
        registry = await self._adapters.to_load(body.name, body.source, body.base_model)
        options: dict[str, Any] = {"tenants": body.tenants, "chat_template": body.chat_template}
        await registry.load(body.name, body.source, replace=body.replace, **options)
        return json_response(await registry.status_after_change(body.name))

    async def reload(self, request: Request) -> Response:
        name = request.path_params["name"]
        registry = self._adapters.of(name)
        changed = await registry.reload(name)
        return json_response({"changed": changed, "adapter": await registry.status_after_change(name)})

    async def unload(self, request: Request) -> Response:
        name, base_model = request.path_params["name"], request.query_params.get("base_model", "")
        aborted = await self._adapters.of(name, base_model).unload(name, _drain_seconds(request))
        return json_response({"aborted": aborted})

    async def pin(self, request: Request) -> Response:
        return await self._pinned(request, True)

    async def unpin(self, request: Request) -> Response:
        return await self._pinned(request, False)

    async def alias(self, request: Request) -> Response:
        body = await self._body(request, AliasRequest)
        name = request.path_params["name"]
        registry = self._adapters.of(name)
        await registry.alias(name, body.alias, remove=body.remove)
        return json_response(await registry.status_after_change(name))

    async def allow(self, request: Request) -> Response:
        body = await self._body(request, AllowRequest)
        name = request.path_params["name"]
        registry = self._adapters.of(name)
        await registry.allow(name, body.tenants)
        return json_response(await registry.status_after_change(name))

    async def check(self, request: Request) -> Response:
        """Run the integrity check of all engines, and return the violations found, as a JSON list of texts; empty means
        none. The check inspects every page and stalls an engine's steps meanwhile. Raises ApiError: ENGINE_UNAVAILABLE
        if an engine does not answer."""
        try:
            found = await asyncio.gather(*(model.engine.stats(check=True) for model in self._gateway.models))
        except EngineUnavailable as error:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not available") from error
        return json_response({"violations": [violation for stats in found for violation in stats.violations]})

    async def _pinned(self, request: Request, pinned: bool) -> Response:
        name = request.path_params["name"]
        registry = self._adapters.of(name)
        await registry.pin(name, pinned)
        return json_response(await registry.status_after_change(name))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        return parse(await read_body(request, self._max_body_bytes), kind)

    def _for_admins(self, handler: Handler, operation: Operation) -> Handler:
        """Wrap the handler of an operation so that other callers than administrators get an ApiError before their body
        is read, and administrators one for a query parameter, or a field of a change without a body, that the operation
        does not have: each of them is likely to be a misspelling, without which more would be changed than was meant.

        If the handler succeeds, the wrapper forbids caching of the response and, for any method but GET, drops the
        cached overview. In errors of /admin/v1/adapters it renames fields of vLLM's routes as `NATIVE_FIELDS` says.
        """

        async def guarded(request: Request) -> Response:
            authenticate(self._accounts, request).as_admin()
            try:
                check_parameters(request.query_params, *operation.query)
                if operation.body is None and request.method != "GET":
                    parse(await read_body(request, self._max_body_bytes) or b"{}", NoBody)
                response = await handler(request)
            except ApiError as error:
                if request.scope["path"].startswith(ADAPTERS):
                    error.param = NATIVE_FIELDS.get(error.param, error.param)
                raise
            if request.method != "GET":
                self._live.forget()
            response.headers["cache-control"] = "no-store"
            return response

        return guarded


def _drain_seconds(request: Request) -> float | None:
    text = request.query_params.get("drain_seconds")
    try:
        return None if text is None else float(text)
    except ValueError as error:
        raise invalid_request("drain_seconds must be a number", "drain_seconds") from error
