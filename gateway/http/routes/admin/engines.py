"""The HTTP API for engines, below /admin/v1/engines, and their integrity check."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from engine.rpc.stream import EngineUnavailable
from gateway.api_schema import engines as api
from gateway.api_schema.common import Deleted
from gateway.core.errors import Fault, unavailable
from gateway.http.lists import model_filter, parse_number
from gateway.http.routes.admin.from_rows import Answering, Answers
from gateway.observe.operations import Operations
from gateway.requests.served_model import ServedModels


class EnginesApi:
    """Handlers of the operations on engines. `AdminApi` lets only administrators reach them."""

    def __init__(self, operations: Operations, models: ServedModels) -> None:
        self._operations = operations
        self._models = models

    def answers(self) -> Answers:
        return {
            api.CHECK: self.check,
            api.LIST: self.engines,
            api.ADD: self.add,
            api.REMOVE: self.remove,
            api.DRAIN: self._change("drain"),
            api.RESUME: self._change("resume"),
            api.RESTART: self._change("restart"),
        }

    async def engines(self, request: Request) -> api.EngineOverviews:
        """Return the engines of all base models, or of the one that the query parameter `model` names."""
        return api.EngineOverviews(self._operations.engines(model_filter(request)))

    async def add(self, request: Request, body: api.NewEngineBody) -> api.EngineOverview:
        return await self._operations.add_engine(body.name, body.address, body.model, body.role)

    async def remove(self, request: Request) -> Deleted:
        await self._operations.remove_engine(request.path_params["engine"], model_filter(request))
        return Deleted(True)

    async def check(self, request: Request) -> api.Violations:
        """Run the integrity check of all engines, and return the violations found, as texts; none means that there are
        none. The check inspects every page and stalls an engine's steps meanwhile. Raises ApiError: ENGINE_UNAVAILABLE
        if an engine does not answer."""
        try:
            found = await asyncio.gather(*(model.engine.stats(check=True) for model in self._models))
        except EngineUnavailable as error:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not available") from error
        return api.Violations([violation for stats in found for violation in stats.violations])

    def _change(self, action: str) -> Answering:
        async def change(request: Request) -> api.EngineOverview:
            given = request.query_params.get("seconds")
            most = api.MAX_RESTART_SECONDS
            seconds = api.RESTART_SECONDS if given is None else parse_number(given, "seconds", 0, most)
            name = request.path_params["engine"]
            return await self._operations.change_engine(name, action, model_filter(request), seconds)

        return change
