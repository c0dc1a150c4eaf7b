"""The HTTP API for administrators and the audit log, below /admin/v1/admins and /admin/v1/audit."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request

from gateway.accounts.admin import shown_admin
from gateway.accounts.registry import AccountRegistry
from gateway.accounts.secrets import IssuedKey
from gateway.api_schema import admins as api
from gateway.api_schema.common import Deleted
from gateway.audit.log import AuditLog, AuditQuery
from gateway.core.errors import ApiError, invalid_request
from gateway.core.tenants import Principal
from gateway.http.caller import api_key
from gateway.http.lists import parse_number
from gateway.http.routes.admin.from_rows import Answers

ENTRY_ID = re.compile(r"[0-9]{1,15}(-[0-9]{1,15})?")


class AdministratorsApi:
    """Handlers of the operations on administrators, and of the audit log. `AdminApi` lets only administrators of the
    role that a row names reach them."""

    def __init__(self, accounts: AccountRegistry, audit: AuditLog) -> None:
        self._accounts = accounts
        self._admins = accounts.administrators
        self._audit = audit

    def answers(self) -> Answers:
        return {
            api.LIST_ADMINS: self.list,
            api.CREATE_ADMIN: self.create,
            api.GET_ADMIN: self.show,
            api.CHANGE_ADMIN: self.change,
            api.ROTATE_ADMIN: self.rotate,
            api.DELETE_ADMIN: self.delete,
            api.LIST_AUDIT: self.audit,
        }

    async def list(self, request: Request) -> api.ShownAdministrators:
        return api.ShownAdministrators([shown_admin(record) for record in self._admins.records.values()])

    async def show(self, request: Request) -> api.ShownAdministrator:
        return shown_admin(self._admins.get(request.path_params["name"]))

    async def create(self, request: Request, body: api.NewAdministratorBody) -> api.NewAdministrator:
        return shown_once(await self._admins.create(body.name, body.role, body.tenant))

    async def change(self, request: Request, body: api.AdministratorBody) -> api.ShownAdministrator:
        return shown_admin(await self._admins.change(request.path_params["name"], body.role, self._caller(request)))

    async def rotate(self, request: Request) -> api.NewAdministrator:
        return shown_once(await self._admins.rotate(request.path_params["name"]))

    async def delete(self, request: Request) -> Deleted:
        await self._admins.delete(request.path_params["name"], self._caller(request))
        return Deleted(True)

    async def audit(self, request: Request) -> api.AuditPage:
        return await self._audit.page(_query(request))

    def _caller(self, request: Request) -> str:
        """Return the name of the administrator who calls."""
        return administrator_name(self._accounts.authenticate(api_key(request)))


def administrator_name(principal: Principal) -> str:
    assert principal.administrator is not None, "only administrators reach this"
    return principal.administrator.name


def shown_once(new: IssuedKey) -> api.NewAdministrator:
    """Return a new administrator and the key itself, which no other response contains."""
    return api.NewAdministrator(**msgspec.structs.asdict(shown_admin(new.account)), key=new.secret)


def _query(request: Request) -> AuditQuery:
    given = request.query_params
    for name in ("before", "after"):
        if name in given and not ENTRY_ID.fullmatch(given[name]):
            raise invalid_request(f"{name} must be the id of an entry, such as 1764570000000-0", name)
    if "before" in given and "after" in given:
        raise invalid_request("choose one of before and after", "after")
    return AuditQuery(
        since=_time(given.get("since", "")),
        by=given.get("by", ""),
        object=given.get("object", "").rstrip("/"),
        limit=parse_number(given.get("limit", str(api.PAGE)), "limit", 1, api.MAX_PAGE),
        before=given.get("before", ""),
        after=given.get("after", ""),
    )


def _time(text: str) -> float:
    """Return the Unix time of a text in ISO 8601 (in UTC, unless it says otherwise) or in Unix seconds; 0 if it is
    empty. Raises ApiError (INVALID_REQUEST)."""
    if not text:
        return 0.0
    try:
        if re.fullmatch(r"[0-9]{9,12}(\.[0-9]+)?", text):
            return float(text)
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise _bad_time() from error


def _bad_time() -> ApiError:
    return invalid_request("since must be a time, such as 2026-07-01, 2026-07-01T12:00:00Z or Unix seconds", "since")
