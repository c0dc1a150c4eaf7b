"""A gateway whose administrators have each role, with real registries and an audit log of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes import ACME, GLOBEX, GatewayApp, build_gateway_app

from gateway.accounts.record import ACCOUNTS
from gateway.accounts.registry import AccountRegistry
from gateway.administration.trail import recording_seeds
from gateway.api_schema.admins import AuditEntry
from gateway.audit.log import AuditLog, AuditQuery
from gateway.audit.store import AuditStore, MemoryAuditStore
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.tenants import hash_key
from gateway.registry.memory import MemoryRecordStore

OWNER_KEY = "sk-the-first-owner-of-all"


@dataclass
class AdminRoom:
    app: GatewayApp
    accounts: AccountRegistry
    audit: AuditLog
    secrets: dict[str, str]
    """Keys of the administrators `boss`, and one of each role, by name."""

    async def entries(self, **query: object) -> list[AuditEntry]:
        return (await self.audit.page(AuditQuery(**query))).entries

    async def admin(self, name: str, role: AdminRole, tenant: str = "") -> str:
        """Create an administrator and return the key."""
        self.secrets[name] = (await self.accounts.administrators.create(name, role, tenant)).secret
        return self.secrets[name]


@asynccontextmanager
async def admin_room(root: Path, store: AuditStore | None = None) -> AsyncIterator[AdminRoom]:
    """Yield a gateway with the tenants acme and globex, the owner `boss`, and administrators named after the roles."""
    audit = AuditLog(store or MemoryAuditStore())
    accounts = AccountRegistry(MemoryRecordStore(ACCOUNTS), lambda tenants: None, seeded=recording_seeds(audit))
    await accounts.start()
    try:
        await accounts.administrators.seed([(Administrator("boss", AdminRole.OWNER), hash_key(OWNER_KEY))])
        for tenant in (ACME, GLOBEX):
            await accounts.create(tenant)
        room = AdminRoom(await build_gateway_app(root, accounts=accounts, audit=audit), accounts, audit, {})
        room.secrets["boss"] = OWNER_KEY
        for role in AdminRole:
            await room.admin(role.value, role)
        yield room
    finally:
        await accounts.close()
