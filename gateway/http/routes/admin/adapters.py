"""The HTTP API for adapters, below /admin/v1/adapters, and vLLM's two routes for them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.registry import AdapterRegistry
from gateway.api_schema import adapters as api
from gateway.core.errors import invalid_request
from gateway.http.routes.admin.from_rows import Answers


class AdaptersApi:
    """Handlers of the operations on adapters. `AdminApi` lets only administrators reach them."""

    def __init__(self, adapters: AdapterAdmin) -> None:
        self._adapters = adapters

    def answers(self) -> Answers:
        return {
            api.LOAD_AS_VLLM: self.load_as_vllm,
            api.UNLOAD_AS_VLLM: self.unload_as_vllm,
            api.LIST: self.list,
            api.LOAD: self.load,
            api.RELOAD: self.reload,
            api.PIN: self.pin,
            api.UNPIN: self.unpin,
            api.ALIAS: self.alias,
            api.ALLOW: self.allow,
            api.GET: self.show,
            api.UNLOAD: self.unload,
        }

    async def load_as_vllm(self, request: Request, body: api.LoadAdapterRequest) -> Response:
        registry = await self._adapters.to_load(body.lora_name, body.lora_path)
        await registry.load(body.lora_name, body.lora_path, replace=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_as_vllm(self, request: Request, body: api.UnloadAdapterRequest) -> Response:
        await self._adapters.of(body.lora_name).unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def list(self, request: Request) -> api.Adapters:
        return api.Adapters(await self._adapters.statuses())

    async def show(self, request: Request) -> api.AdapterStatus:
        name, registry = self._named(request)
        return await registry.status(name)

    async def load(self, request: Request, body: api.NativeLoadRequest) -> api.AdapterStatus:
        registry = await self._adapters.to_load(body.name, body.source, body.base_model)
        await registry.load(
            body.name, body.source, replace=body.replace, tenants=body.tenants, chat_template=body.chat_template
        )
        return await registry.status_after_change(body.name)

    async def reload(self, request: Request) -> api.Reloaded:
        name, registry = self._named(request)
        changed = await registry.reload(name)
        return api.Reloaded(changed, await registry.status_after_change(name))

    async def unload(self, request: Request) -> api.Unloaded:
        name, base_model = request.path_params["name"], request.query_params.get("base_model", "")
        return api.Unloaded(await self._adapters.of(name, base_model).unload(name, _drain_seconds(request)))

    async def pin(self, request: Request) -> api.AdapterStatus:
        name, registry = self._named(request)
        await registry.pin(name, True)
        return await registry.status_after_change(name)

    async def unpin(self, request: Request) -> api.AdapterStatus:
        name, registry = self._named(request)
        await registry.pin(name, False)
        return await registry.status_after_change(name)

    async def alias(self, request: Request, body: api.AliasRequest) -> api.AdapterStatus:
        name, registry = self._named(request)
        await registry.alias(name, body.alias, remove=body.remove)
        return await registry.status_after_change(name)

    async def allow(self, request: Request, body: api.AllowRequest) -> api.AdapterStatus:
        name, registry = self._named(request)
        await registry.allow(name, body.tenants)
        return await registry.status_after_change(name)

    def _named(self, request: Request) -> tuple[str, AdapterRegistry]:
        """Return the name in a request's path, and the registry that has it."""
        name = request.path_params["name"]
        return name, self._adapters.of(name)


def _drain_seconds(request: Request) -> float | None:
    text = request.query_params.get("drain_seconds")
    try:
        return None if text is None else float(text)
    except ValueError as error:
        raise invalid_request("drain_seconds must be a number", "drain_seconds") from error
