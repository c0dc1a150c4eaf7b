"""What administrators of one tenant may reach: their tenant, and nothing that tells whether there are others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.accounts.record import AccountRecord
from gateway.api_schema.operation import Operation
from gateway.core.administrators import Administrator
from gateway.core.errors import ApiError, Fault, invalid_request, permission_denied, tenant_not_found
from gateway.core.limits import EACH
from gateway.core.tenants import ID_DIGITS

FindKey = Callable[[str], AccountRecord]
"""Returns the record of the key with an id. Raises ApiError (KEY_NOT_FOUND)."""


def check_scope(who: Administrator, operation: Operation, names: Mapping[str, str], key: FindKey) -> None:
    """Raise ApiError unless an administrator may call an operation on the object that `names` stand for.

    Administrators of one tenant get PERMISSION_DENIED for operations on the whole installation and for the tenant's own
    limits, INVALID_REQUEST if they leave out the tenant, and for what belongs to another tenant the same error as for
    what does not exist.
    """
    if not who.tenant:
        return
    if not operation.of_tenant:
        raise permission_denied(f"this needs an administrator of the installation; {who.name} administers {who.tenant}")
    if "id" in names and operation.noun == "keys":
        _check_key(who, names["id"], key)
        return
    tenant = names.get("name" if operation.noun == "tenants" else "tenant", "")
    if not tenant:
        raise invalid_request(f"name the tenant that you administer: {who.tenant}", "tenant")
    if tenant != who.tenant:
        raise tenant_not_found(tenant)
    if operation.noun == "limits" and operation.is_change:
        if not (names.get("key") or names.get("adapter")):
            raise permission_denied("limits of the whole tenant need an administrator of the installation")
        if names.get("key", EACH) not in ("", EACH):
            _check_key(who, names["key"], key)


def _check_key(who: Administrator, key_id: str, key: FindKey) -> None:
    absent = ApiError(Fault.KEY_NOT_FOUND, f"{key_id[:80]!r} is no key's", "key")
    if len(key_id) < ID_DIGITS:  # beginnings of ids would tell which ids other tenants' keys have
        raise absent
    try:
        owner = key(key_id).key
    except ApiError:
        raise absent from None
    if owner is None or owner.tenant != who.tenant:
        raise absent
