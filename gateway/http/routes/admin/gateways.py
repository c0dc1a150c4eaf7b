"""The HTTP API for gateways, below /admin/v1/gateways."""

from __future__ import annotations

from starlette.requests import Request

from gateway.api_schema import gateways as api
from gateway.core.errors import invalid_request
from gateway.http.routes.admin.from_rows import Answers
from gateway.registry.gateways import GatewayDirectory


class GatewaysApi:
    """Handlers of the operations on gateways. `AdminApi` lets only administrators reach them."""

    def __init__(self, directory: GatewayDirectory) -> None:
        self._directory = directory

    def answers(self) -> Answers:
        return {api.LIST: self.gateways, api.DRAIN: self.drain}

    async def gateways(self, request: Request) -> api.GatewayOverviews:
        return api.GatewayOverviews(await self._directory.gateways())

    async def drain(self, request: Request) -> api.GatewayOverview:
        """Drain a gateway. Raises ApiError as `GatewayDirectory.drain` does, and INVALID_REQUEST if the query parameter
        `stop` is neither true nor false."""
        stop = request.query_params.get("stop", "false")
        if stop not in ("true", "false"):
            raise invalid_request("stop must be true or false", "stop")
        return await self._directory.drain(request.path_params["gateway"], stop=stop == "true")
