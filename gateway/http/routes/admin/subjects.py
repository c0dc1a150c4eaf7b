"""The HTTP API for administrators: vLLM's two adapter routes, and everything else under /admin/v1."""

from __future__ import annotations

from starlette.routing import Route

from gateway.accounts.admin import AccountAdmin
from gateway.administration.trail import AdminTrail
from gateway.http.routes.admin.accounts import AccountsApi
from gateway.http.routes.admin.adapters import AdaptersApi
from gateway.http.routes.admin.administrators import AdministratorsApi
from gateway.http.routes.admin.batches import AdminBatchesApi
from gateway.http.routes.admin.engines import EnginesApi
from gateway.http.routes.admin.from_rows import Administration
from gateway.http.routes.admin.gateways import GatewaysApi
from gateway.http.routes.admin.limits import LimitsApi
from gateway.http.routes.admin.traffic import OverviewApi, TrafficApi
from gateway.http.routes.admin.usage import UsageApi
from gateway.http.settings import PortSettings
from gateway.limiter.admin import LimitAdmin
from gateway.services import Services


class AdminApi:
    """Routes of the admin API, which only administrators may call. Adapter names may contain slashes, so the action is
    the last path segment."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        gateway, operations, accounts = services.gateway, services.operations, services.accounts
        limits = LimitAdmin(gateway.limiter, accounts.counts_as)
        overview = OverviewApi(operations, limits, gateway.adapters, services.usage)
        trail = AdminTrail(services)
        self._administration = Administration(accounts, trail, settings.max_control_bytes, overview.forget)
        self._parts = (
            AdaptersApi(gateway.adapters),
            LimitsApi(limits),
            EnginesApi(operations, gateway.models),
            GatewaysApi(services.gateways),
            AccountsApi(AccountAdmin(accounts, gateway.limiter.drop)),
            AdministratorsApi(accounts, services.audit),
            UsageApi(services.usage),
            TrafficApi(operations),
            overview,
            AdminBatchesApi(services.batches, services.etas),
        )

    def routes(self) -> list[Route]:
        rows = [row for part in self._parts for row in part.answers().items()]
        return [self._administration.route(operation, answering) for operation, answering in rows]
