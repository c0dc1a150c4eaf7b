"""Everything that the audit log asks of its store."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from gateway.api_schema.admins import AuditEntry
from gateway.audit.log import AuditLog, AuditQuery
from gateway.audit.store import RedisAuditStore, Retention


async def walk_audit(client: Redis) -> None:
    """Begin and end changes, also of a tenant's administrator, trim the log, and read it from both ends."""
    audit = AuditLog(RedisAuditStore(client, Retention(entries=2)))
    entry = AuditEntry(at=audit.now(), by="ci", action="tenants.change", object="tenants/acme")
    for result in ("first", "second", "third"):
        pending = await audit.begin(entry)
        assert (await audit.page(AuditQuery(limit=1))).entries[0].result == "unknown"
        await audit.end(pending, msgspec.structs.replace(entry, result=result))
    newest, older = (await audit.page(AuditQuery())).entries
    assert (newest.result, older.result) == ("third", "second")
    assert (await audit.page(AuditQuery(before=newest.id))).entries == [older]
    assert (await audit.page(AuditQuery(after=older.id))).entries == [newest]
    for result in ("fourth", "fifth"):
        pending = await audit.begin(msgspec.structs.replace(entry, tenant="acme"))
        await audit.end(pending, msgspec.structs.replace(entry, tenant="acme", result=result))
    assert [one.result for one in (await audit.page(AuditQuery())).entries] == ["fifth", "third"]
