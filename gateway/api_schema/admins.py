"""Administrators and the audit log: what administrators send and get, and the operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gateway.api_schema.common import INVALID, Deleted
from gateway.api_schema.operation import Operation, admin
from gateway.core.administrators import AdminRole
from gateway.core.errors import Fault

ADMINS = "/admin/v1/admins"
ADMIN = ADMINS + "/{name}"
AUDIT = "/admin/v1/audit"
FAULTS = INVALID | {
    Fault.ADMIN_NOT_FOUND,
    Fault.ADMIN_EXISTS,
    Fault.ADMIN_CONFLICT,
    Fault.TENANT_NOT_FOUND,
    Fault.REGISTRY_UNAVAILABLE,
}
"""Errors of the operations on administrators."""
PAGE, MAX_PAGE = 100, 1000
"""Default and maximum number of entries of one page of the audit log."""


class NewAdministratorBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/admins, which creates an administrator and a key."""

    name: str
    role: str
    """One of viewer, operator, accounts and owner."""
    tenant: str = ""
    """The only tenant to administer; empty: the whole installation."""


class AdministratorBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of PATCH /admin/v1/admins/NAME."""

    role: str


class ShownAdministrator(Struct):
    """An administrator, without the key. Times are in Unix seconds."""

    name: str
    role: AdminRole
    tenant: str
    """The only tenant that the administrator administers; empty: the whole installation."""
    key_id: str
    """First 12 hex digits of the key's SHA-256."""
    added_by: str
    """`configuration` or `administrator`."""
    created: float
    updated: float


class NewAdministrator(ShownAdministrator, kw_only=True):
    key: str
    """The key itself. No other response contains it."""


class ShownAdministrators(Struct):
    admins: list[ShownAdministrator]


class AuditEntry(Struct, kw_only=True, omit_defaults=False):
    """One change of an administrator, or of the configuration."""

    id: str = ""
    """Place in the log; later entries have higher ids."""
    at: float
    """Unix time in seconds."""
    by: str
    """Name of the administrator; `configuration` for what a configuration file changed."""
    role: str = ""
    tenant: str = ""
    """The only tenant that the administrator administers; empty: the whole installation."""
    address: str = ""
    """Network address that the call came from. Empty for the configuration's changes."""
    request_id: str = ""
    protocol: str = ""
    """`http` or `grpc`; empty for the configuration's changes."""
    action: str
    """Such as `tenants.disable`."""
    object: str
    """What was changed, as `tenants/acme`."""
    before: dict[str, Any] = {}
    """The changed fields as they were; all fields of an object that was deleted."""
    after: dict[str, Any] = {}
    """The same fields after the change; all fields of an object that was created. Long lists and texts are cut."""
    result: str = "unknown"
    """`ok`, the code of the error that ended the change, or `unknown`: the gateway ended, or lost the store, before it
    knew."""


class AuditPage(Struct):
    entries: list[AuditEntry]
    next: str | None
    """Value of `before` (or, with `after`, of `after`) that continues the list; null: this was its end."""


AUDIT_QUERY: Mapping[str, Mapping[str, Any]] = {
    "since": {"type": "string", "description": "Only changes from this time on: ISO 8601, in UTC, or Unix seconds."},
    "by": {"type": "string", "description": "Only changes of the administrator of this name."},
    "object": {"type": "string", "description": "Only changes of this object, or of all below it, as `tenants`."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "before": {"type": "string", "description": "Id of an entry: only older ones, the newest first. The default."},
    "after": {"type": "string", "description": "Id of an entry: only newer ones, the oldest first."},
}

LIST_ADMINS = admin("GET", ADMINS, "List administrators.", ShownAdministrators, FAULTS)
CREATE_ADMIN = admin(
    "POST",
    ADMINS,
    "Create an administrator.",
    NewAdministrator,
    FAULTS,
    body=NewAdministratorBody,
    status=201,
    role=AdminRole.OWNER,
)
GET_ADMIN = admin("GET", ADMIN, "Get an administrator.", ShownAdministrator, FAULTS)
CHANGE_ADMIN = admin(
    "PATCH",
    ADMIN,
    "Give an administrator another role.",
    ShownAdministrator,
    FAULTS,
    body=AdministratorBody,
    role=AdminRole.OWNER,
)
ROTATE_ADMIN = admin(
    "POST", ADMIN + "/rotate", "Replace an administrator's key.", NewAdministrator, FAULTS, role=AdminRole.OWNER
)
DELETE_ADMIN = admin("DELETE", ADMIN, "Delete an administrator.", Deleted, FAULTS, role=AdminRole.OWNER)
LIST_AUDIT = admin(
    "GET",
    AUDIT,
    "List what administrators changed.",
    AuditPage,
    INVALID | {Fault.AUDIT_UNAVAILABLE},
    query=AUDIT_QUERY,
)

OPERATIONS: tuple[Operation[Any], ...] = (
    LIST_ADMINS,
    CREATE_ADMIN,
    GET_ADMIN,
    CHANGE_ADMIN,
    ROTATE_ADMIN,
    DELETE_ADMIN,
    LIST_AUDIT,
)
