"""Calls about administrators and the audit log."""

from __future__ import annotations

from gateway.api_schema import admins as api
from gateway.api_schema.common import Deleted
from gateway.client.call import Call


def admins() -> Call[list[api.ShownAdministrator]]:
    """Return all administrators, with their roles."""
    return Call.of(api.LIST_ADMINS, field="admins")


def admin(name: str) -> Call[api.ShownAdministrator]:
    """Return one administrator."""
    return Call.of(api.GET_ADMIN, name)


def create_admin(name: str, role: str, *, tenant: str = "") -> Call[api.NewAdministrator]:
    """Create an administrator of the installation, or of one tenant, and return the key, which cannot be read again
    later. `role` is viewer, operator, accounts or owner."""
    return Call.of(api.CREATE_ADMIN, body=api.NewAdministratorBody(name=name, role=role, tenant=tenant))


def change_admin(name: str, role: str) -> Call[api.ShownAdministrator]:
    """Give an administrator another role. Administrators cannot demote themselves, nor the last owner."""
    return Call.of(api.CHANGE_ADMIN, name, body=api.AdministratorBody(role=role))


def rotate_admin(name: str) -> Call[api.NewAdministrator]:
    """Replace an administrator's key by a new one, and return it. The old one is refused at once."""
    return Call.of(api.ROTATE_ADMIN, name)


def delete_admin(name: str) -> Call[Deleted]:
    """Delete an administrator, whose key is refused at once. Administrators cannot delete themselves, nor the last
    owner."""
    return Call.of(api.DELETE_ADMIN, name)


def audit(
    *, since: str = "", by: str = "", object: str = "", limit: int = api.PAGE, before: str = "", after: str = ""
) -> Call[api.AuditPage]:
    """Return changes that administrators made: the newest first, older than the entry `before`; or with `after`, those
    after an entry, the oldest first. `object` is one such as tenants/acme, or all below a noun such as tenants."""
    texts = {"since": since, "by": by, "object": object, "before": before, "after": after}
    return Call.of(api.LIST_AUDIT, query={**texts, "limit": limit})
