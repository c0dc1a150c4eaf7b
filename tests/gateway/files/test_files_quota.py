"""What tenants are charged for after uploads, failures, deletes and lost leases in any order: exactly what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault
from gateway.files import registry
from gateway.files.record import BATCH, FileRecord, new_file_id
from gateway.files.registry import UNBOUNDED, FileQuota, FileRegistry, FileUse, Reservation
from tests.examples import examples

TENANTS = ("acme", "globex")
QUOTA = FileQuota(bytes=100, files=4)
FULL = Fault.INSUFFICIENT_QUOTA

tenants = st.sampled_from(TENANTS)
sizes = st.integers(0, 60)


def the_quota_machine(url: str) -> type[RuleBasedStateMachine]:
    """A machine over the server at `url`."""

    class Charges(RuleBasedStateMachine):
        """The registry beside a dictionary of what ought to be charged."""

        uploads, files = Bundle("uploads"), Bundle("files")

        @initialize()
        def begin(self) -> None:
            self.loop = asyncio.new_event_loop()
            self.client = Redis.from_url(url)
            self.run(self.client.flushall())
            self.registry = FileRegistry(self.client)
            self.charged: dict[str, dict[str, int]] = {tenant: {} for tenant in TENANTS}
            """Bytes by token: of uploads and of files alike."""
            self.kept: dict[str, FileRecord] = {}
            self.pinned: set[str] = set()

        def run(self, work: Coroutine[Any, Any, Any]) -> Any:
            return self.loop.run_until_complete(work)

        def attempt(self, work: Coroutine[Any, Any, Any]) -> Any:
            """What it returns, or the fault it is refused with."""
            try:
                return self.run(work)
            except ApiError as error:
                return error.fault

        @rule(target=uploads, tenant=tenants, size=sizes, unbounded=st.booleans(), same_id=st.booleans())
        def reserve(self, tenant: str, size: int, unbounded: bool, same_id: bool) -> Any:
            charged = self.charged[tenant]
            file_id = "file-" + "0" * 24 if same_id else new_file_id()
            token = f"{file_id}.{new_file_id()[-8:]}"
            upload = Reservation(tenant, file_id, token, UNBOUNDED if unbounded else QUOTA)
            found = self.attempt(self.registry.reserve(upload, size))
            if not unbounded and (len(charged) >= QUOTA.files or sum(charged.values()) + size > QUOTA.bytes):
                assert found is FULL
                return multiple()
            charged[token] = size
            return upload

        @rule(upload=uploads, size=sizes)
        def hold(self, upload: Reservation, size: int) -> None:
            charged = self.charged[upload.tenant]
            found = self.attempt(self.registry.hold(upload, size))
            if upload.token not in charged or upload.token in self.files_of(upload.tenant):
                assert found is Fault.REGISTRY_UNAVAILABLE
                return
            more = size - charged[upload.token]
            if more > 0 and sum(charged.values()) + more > upload.quota.bytes:
                assert found is FULL
            else:
                assert found is None
                charged[upload.token] = size

        @rule(upload=consumes(uploads))
        def drop(self, upload: Reservation) -> None:
            for _ in range(2):
                self.run(self.registry.drop(upload))
            if upload.token not in self.files_of(upload.tenant):
                self.charged[upload.tenant].pop(upload.token, None)

        @rule(upload=uploads)
        def lose(self, upload: Reservation) -> None:
            """Its gateway was killed a while ago."""
            self.run(self.client.zadd(f"loralane:file-leases:{{{upload.tenant}}}", {upload.token: 1}, xx=True))
            if upload.token not in self.files_of(upload.tenant):
                self.charged[upload.tenant].pop(upload.token, None)

        @rule(target=files, upload=uploads, size=sizes)
        def keep(self, upload: Reservation, size: int) -> Any:
            """A reply that was lost is asked for again."""
            charged = self.charged[upload.tenant]
            first = self.kept.get(f"{upload.tenant} {upload.file_id}")
            record = FileRecord(upload.file_id, upload.tenant, size, 1, "a", BATCH, None, upload.token)
            found = [self.run(self.registry.keep(record, 1000)) for _ in range(2)]
            assert found[0] == found[1]
            if first is not None:
                assert found[0] == first
                if upload.token != first.token:
                    charged.pop(upload.token, None)
                return first
            if upload.token not in charged:
                assert found[0] is None
                return multiple()
            assert found[0] == record
            charged[upload.token] = size
            self.kept[f"{upload.tenant} {upload.file_id}"] = record
            return record

        @rule(record=files, holder=st.sampled_from("ab"), seconds=st.sampled_from([0, 60]))
        def pin(self, record: FileRecord, holder: str, seconds: float) -> None:
            found = self.attempt(self.registry.pin(record.tenant, record.id, holder, seconds))
            key = f"{record.tenant} {record.id}"
            assert found == self.kept.get(key, Fault.FILE_NOT_FOUND)
            (self.pinned.add if seconds and key in self.kept else self.pinned.discard)(f"{key} {holder}")

        @rule(record=files, holder=st.sampled_from("ab"))
        def unpin(self, record: FileRecord, holder: str) -> None:
            self.run(self.registry.unpin(record.tenant, record.id, holder))
            self.pinned.discard(f"{record.tenant} {record.id} {holder}")

        @rule(record=files)
        def remove(self, record: FileRecord) -> None:
            key = f"{record.tenant} {record.id}"
            found = self.attempt(self.registry.remove(record.tenant, record.id))
            if key not in self.kept:
                assert found is Fault.FILE_NOT_FOUND
            elif {f"{key} a", f"{key} b"} & self.pinned:
                assert found is Fault.FILE_IN_USE
            else:
                self.forget(key, found)

        @rule(record=files)
        def expire(self, record: FileRecord) -> None:
            key = f"{record.tenant} {record.id}"
            if key not in self.kept:
                return
            self.run(self.client.zadd(f"loralane:file-expiry:{{{record.tenant}}}", {record.id: 1}))
            if not {f"{key} a", f"{key} b"} & self.pinned:
                gone, _ = self.run(self.registry.sweep(record.tenant, []))
                self.forget(key, *gone)
            else:
                token = self.kept[key].token  # which need not be this record's: the id may have been given again
                assert self.run(self.registry.sweep(record.tenant, [token])) == ([], {token})
                self.run(self.client.zrem(f"loralane:file-expiry:{{{record.tenant}}}", record.id))

        def forget(self, key: str, record: FileRecord) -> None:
            assert record == self.kept.pop(key)
            del self.charged[record.tenant][record.token]

        def files_of(self, tenant: str) -> set[str]:
            return {record.token for record in self.kept.values() if record.tenant == tenant}

        @invariant()
        def what_is_charged_is_what_is_there(self) -> None:
            for tenant, charged in self.charged.items():
                assert self.run(self.registry.use(tenant)) == FileUse(sum(charged.values()), len(charged))
                ids = self.run(self.registry.ids(tenant, "", False))
                assert {record.token for record in self.run(self.registry.read(tenant, ids))} == self.files_of(tenant)

        def teardown(self) -> None:
            for key in self.run(self.client.keys("*")):
                assert b"{acme}" in key or b"{globex}" in key
            self.run(self.client.aclose())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    return Charges


def test_charges_are_exact_whatever_happens(valkey_server, monkeypatch):
    monkeypatch.setattr(registry, "CALL_SECONDS", 60.0)  # a busy machine is not without a store
    machine = the_quota_machine(valkey_server.connection_url)
    machine.TestCase.settings = settings(
        max_examples=examples(40), stateful_step_count=30, deadline=None, database=None
    )
    machine.TestCase().runTest()
