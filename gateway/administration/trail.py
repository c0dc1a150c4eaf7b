"""The way of administrators' calls, over HTTP and gRPC: their scope and, for a change, an entry of the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from gateway.accounts.record import AccountRecord
from gateway.administration.scope import check_scope
from gateway.administration.views import (
    Views,
    account_fields,
    account_object,
    changed_fields,
    object_name,
)
from gateway.api_schema.accounts import ROTATE_KEY
from gateway.api_schema.admins import AuditEntry
from gateway.api_schema.operation import Operation
from gateway.audit.log import AuditLog
from gateway.core.administrators import Administrator
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import EACH
from gateway.registry.log import Seeded
from gateway.services import Services

A = TypeVar("A")
KEY_NAMED_BY = {"keys": "id", "limits": "key"}
"""Names in a call that stand for a tenant's key, by the noun of its operation."""


class AdminCall(NamedTuple):
    """One call of an administrator: who calls, from where, and the names in the call (see `object_name`)."""

    who: Administrator
    operation: Operation
    names: Mapping[str, str]
    protocol: str
    address: str
    request_id: str


class AdminTrail:
    """Runs administrators' calls. What they change is recorded before it begins and when it has ended."""

    def __init__(self, services: Services) -> None:
        self._accounts = services.accounts
        self._audit = services.audit
        self._views = Views(services)
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, call: AdminCall, act: Callable[[], Awaitable[A]], made_id: Callable[[A], str]) -> A:
        """Carry out a call with `act`, and return its answer; `made_id` returns the id in that answer of a key that was
        created. A change continues if its caller leaves. Raises ApiError as `check_scope` and `act` do, and
        AUDIT_UNAVAILABLE if a change cannot be recorded; it is not made then."""
        check_scope(call.who, call.operation, call.names, self._accounts.key)
        if not call.operation.is_change:
            return await act()
        task = asyncio.create_task(self._changed(call, act, made_id))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or has left

    async def _changed(self, call: AdminCall, act: Callable[[], Awaitable[A]], made_id: Callable[[A], str]) -> A:
        noun, names = call.operation.noun, self._full_names(call)
        before = await self._views.look(noun, names)
        entry = self._entry(call, names)
        pending = await self._audit.begin(entry)
        try:
            answer = await act()
        except Exception as error:
            # The call may have failed after its change was made.
            was, now = changed_fields(before, await self._views.look(noun, names))
            settled = {"before": was, "after": now, "result": _code(error)}
            await self._audit.end(pending, msgspec.structs.replace(entry, **settled))
            raise
        new_id = made_id(answer) if noun == "keys" else ""
        names = {"id": new_id, **names} if new_id else names
        was, now = changed_fields(before, await self._views.look(noun, names))
        if call.operation is ROTATE_KEY:
            now["replaced_by"] = new_id
        settled = {"object": object_name(noun, names), "before": was, "after": now, "result": "ok"}
        await self._audit.end(pending, msgspec.structs.replace(entry, **settled))
        return answer

    def _full_names(self, call: AdminCall) -> Mapping[str, str]:
        """Return the names in a call with the id of the key in place of the beginning that the caller gave, because the
        log is filtered by ids."""
        field = KEY_NAMED_BY.get(call.operation.noun, "")
        given = call.names.get(field, "")
        if given in ("", EACH):
            return call.names
        try:
            return {**call.names, field: self._accounts.key(given).key_id}
        except ApiError:
            return call.names

    def _entry(self, call: AdminCall, names: Mapping[str, str]) -> AuditEntry:
        return AuditEntry(
            at=self._audit.now(),
            by=call.who.name,
            role=call.who.role,
            tenant=call.who.tenant,
            address=call.address,
            request_id=call.request_id,
            protocol=call.protocol,
            action=call.operation.action,
            object=object_name(call.operation.noun, names),
        )


def _code(error: Exception) -> str:
    if not isinstance(error, ApiError):
        return "internal_error"
    return error.code or ("invalid_request" if error.fault is Fault.INVALID_REQUEST else error.fault.name.lower())


def recording_seeds(audit: AuditLog) -> Seeded[AccountRecord]:
    """Return a function that records what the configuration changes in the accounts."""

    async def record(before: AccountRecord | None, after: AccountRecord | None) -> None:
        account = after or before
        assert account is not None, "there is a record before or after a change"
        fields = [account_fields(one) if one else {} for one in (before, after)]
        was, now = changed_fields(*fields)
        await audit.configured(account_object(account), was, now)

    return record
