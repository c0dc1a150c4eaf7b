"""New API keys, of tenants and of administrators."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from gateway.accounts.record import AccountRecord

KEY_BYTES = 32
GONE = "-"
"""Seed (see `RecordStore.seed`) that is stored for a record when it is removed because the configuration no longer
contains it."""


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new API key and its record. Only this object has the secret, on its way to the operator who created the key."""

    secret: str
    account: AccountRecord

    def __repr__(self) -> str:
        return f"IssuedKey({self.account.key_id})"


def new_secret() -> str:
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
