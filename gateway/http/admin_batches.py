"""The HTTP API below /admin/v1/batches, with which operators list and cancel the batches of every tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.batches.eta import EtaEstimator
from gateway.batches.record import Batch, batch_json
from gateway.batches.service import MAX_PAGE, Batches
from gateway.core.errors import invalid_request
from gateway.http.edge import RouteEntry
from gateway.http.stream import json_response

ADMIN_BATCHES = "/admin/v1/batches"
CANCEL_BATCH = ADMIN_BATCHES + "/{tenant}/{batch_id}/cancel"
WHICH = ("unfinished", "all")


class AdminBatchesApi:
    """Handlers that list and cancel batches of any tenant; they never return the content of a batch's lines. `AdminApi`
    lets only administrators reach them."""

    def __init__(self, batches: Batches, etas: EtaEstimator) -> None:
        self._batches = batches
        self._etas = etas

    def table(self) -> list[RouteEntry]:
        """Return (method, path, handler) for each route; `AdminApi` makes the routes from them."""
        return [("GET", ADMIN_BATCHES, self.listing), ("POST", CANCEL_BATCH, self.cancel)]

    async def listing(self, request: Request) -> Response:
        """Return batches as JSON, of all tenants or of the query's `tenant`, each with its tenant and estimated end.

        `which=all` lists the newest MAX_PAGE batches, the newest first; `which=unfinished` the unfinished ones, the
        earliest deadline first, with a `tenant` only those among its newest MAX_PAGE. The default of `which` is `all`
        if there is a `tenant`, else `unfinished`. Raises ApiError (INVALID_REQUEST) for any other value or parameter.
        """
        given = request.query_params
        tenant = given.get("tenant", "")
        which = given.get("which", "all" if tenant else "unfinished")
        if which not in WHICH:
            raise invalid_request(f"which must be one of {', '.join(WHICH)}", "which")
        found = await (self._unfinished(tenant) if which == "unfinished" else self._newest(tenant))
        return json_response({"batches": [await self._shown(batch) for batch in found]})

    async def cancel(self, request: Request) -> Response:
        place = request.path_params
        return json_response(await self._shown(await self._batches.cancel_for(place["tenant"], place["batch_id"])))

    async def _unfinished(self, tenant: str) -> list[Batch]:
        found = await self._batches.of_tenant(tenant) if tenant else (await self._batches.open(MAX_PAGE))[1]
        return sorted((batch for batch in found if not batch.ended), key=lambda batch: batch.expires_at)

    async def _newest(self, tenant: str) -> Sequence[Batch]:
        return await (self._batches.of_tenant(tenant) if tenant else self._batches.newest())

    async def _shown(self, batch: Batch) -> dict[str, Any]:
        eta = None if batch.ended else await self._etas.eta(batch)
        return {"tenant": batch.tenant, **batch_json(batch), "eta_seconds": eta}
