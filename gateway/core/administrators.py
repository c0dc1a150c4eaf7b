"""Administrators: their names, and the roles that say what they may do."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from gateway.core.errors import permission_denied
from gateway.core.names import TENANT_NAME

CONFIGURATION = "configuration"
"""The name under which the audit log has the changes of the configuration. No administrator may have it."""


class AdminRole(StrEnum):
    """What an administrator may do, and what an operation needs. Every role may read what `viewer` may."""

    VIEWER = "viewer"
    """Reads everything administrative. No answer to a reader contains a secret."""
    OPERATOR = "operator"
    """Changes lanes, engines and adapters, and cancels requests and batches."""
    ACCOUNTS = "accounts"
    """Changes tenants, their keys, classes and limits."""
    OWNER = "owner"
    """Changes everything, administrators included."""

    def includes(self, needed: AdminRole) -> bool:
        """Return whether an administrator of this role may call an operation that needs another."""
        return self is AdminRole.OWNER or needed in (self, AdminRole.VIEWER)


class Administrator(Struct, frozen=True):
    """A person or program that administers, known by its name. Raises ValueError for an invalid name or role."""

    name: str
    role: AdminRole
    tenant: str = ""
    """The only tenant that the administrator administers. Empty means the whole installation."""

    def __post_init__(self) -> None:
        if not TENANT_NAME.fits(self.name):
            raise ValueError(f"administrator name {self.name[:80]!r} must be {TENANT_NAME.words}")
        if self.name == CONFIGURATION:
            raise ValueError(f"the administrator name {CONFIGURATION} stands for the configuration in the audit log")

    @property
    def is_owner(self) -> bool:
        """True for an owner of the whole installation. Only owners make administrators, so that one must remain."""
        return self.role is AdminRole.OWNER and not self.tenant

    def check(self, needed: AdminRole) -> None:
        """Raise ApiError (PERMISSION_DENIED), which names the role needed, unless this administrator may call an
        operation that needs it."""
        if not self.role.includes(needed):
            wanted = needed if needed is AdminRole.OWNER else f"{needed} or {AdminRole.OWNER}"
            raise permission_denied(f"this needs the role {wanted}; administrator {self.name} has {self.role}")


def role_named(text: str) -> AdminRole:
    """Return the role of a name. Raises ValueError for an unknown one."""
    if text not in list(AdminRole):
        raise ValueError(f"role must be one of {', '.join(AdminRole)}, not {text[:80]!r}")
    return AdminRole(text)
