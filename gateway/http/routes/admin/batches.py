"""The HTTP API below /admin/v1/batches, with which operators list and cancel the batches of every tenant."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from gateway.api_schema.batches import CANCEL_ANY, LIST_ALL, MAX_PAGE, WHICH, AdminBatch, AdminBatches
from gateway.batches.eta import EtaEstimator
from gateway.batches.record import Batch, shown_batch
from gateway.batches.service import Batches
from gateway.core.errors import invalid_request
from gateway.http.routes.admin.from_rows import Answers


class AdminBatchesApi:
    """Handlers that list and cancel batches of any tenant; they never return the content of a batch's lines. `AdminApi`
    lets only administrators reach them."""

    def __init__(self, batches: Batches, etas: EtaEstimator) -> None:
        self._batches = batches
        self._etas = etas

    def answers(self) -> Answers:
        return {LIST_ALL: self.listing, CANCEL_ANY: self.cancel}

    async def listing(self, request: Request) -> AdminBatches:
        """Return batches, of all tenants or of the query's `tenant`, each with its tenant and estimated end.

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
        return AdminBatches([await self._shown(batch) for batch in found])

    async def cancel(self, request: Request) -> AdminBatch:
        place = request.path_params
        return await self._shown(await self._batches.cancel_for(place["tenant"], place["batch_id"]))

    async def _unfinished(self, tenant: str) -> list[Batch]:
        found = await self._batches.of_tenant(tenant) if tenant else (await self._batches.open(MAX_PAGE))[1]
        return sorted((batch for batch in found if not batch.ended), key=lambda batch: batch.expires_at)

    async def _newest(self, tenant: str) -> Sequence[Batch]:
        return await (self._batches.of_tenant(tenant) if tenant else self._batches.newest())

    async def _shown(self, batch: Batch) -> AdminBatch:
        eta = None if batch.ended else await self._etas.eta(batch)
        return AdminBatch(**msgspec.structs.asdict(shown_batch(batch, eta)), tenant=batch.tenant)
