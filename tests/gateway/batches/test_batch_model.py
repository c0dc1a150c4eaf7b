"""The store of batches against a model of it: workers claim, commit, crash and come too late, and tenants cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
from batch_fakes import START_MS, MovedStore, wanted
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from gateway.batches.lease import ALL_TASKS, Lease
from gateway.batches.record import ENDED, BatchError, Tally
from gateway.core.errors import ApiError, Fault
from tests.examples import examples

LEASE_MS = 10_000
SHARD = 8
MAX_OPEN = 3
ORDER = ("validating", "in_progress", "cancelling", "finalizing", *sorted(ENDED))
"""No status is followed by one before it."""

tenants = st.sampled_from(["acme", "globex"])
windows = st.sampled_from([20, 60, 600])
tasks = st.sampled_from([ALL_TASKS, *({task} for task in ALL_TASKS)])
model_lines = st.lists(st.tuples(st.sampled_from(["", "a", "b", "gone"]), st.integers(1, 12)), min_size=1, max_size=3)
"""Base models of a batch's lines; "" and "gone" are unknown to those that claim."""
open_models = st.fixed_dictionaries({name: st.booleans() for name in ("", "a", "b")}) | st.just({})
pauses = st.sampled_from([1, 999, 5_000, LEASE_MS - 1, LEASE_MS, 25_000])


@dataclass
class Job:
    """What a batch ought to be."""

    tenant: str
    expires_ms: int
    status: str = "validating"
    models: list[str] = field(default_factory=list)
    """Base model of each line."""
    outcome: str | None = None
    work: dict[str, int] = field(default_factory=lambda: {"validate": 0})
    holders: dict[str, int] = field(default_factory=dict)
    fence: int = 0
    done: set[int] = field(default_factory=set)
    failed: int = 0
    parts: set[str] = field(default_factory=set)
    finishes: int = 0
    lost: dict[str, set[int]] = field(default_factory=dict)
    """Fences of the leases that ran out, by task. A fence is removed when its holder calls the store again."""

    def is_ending(self, now: int) -> bool:
        expired = self.status in ("validating", "in_progress") and now >= self.expires_ms
        return self.status == "cancelling" or expired

    @property
    def total(self) -> int:
        return len(self.models)

    def due(self, now: int, models: Mapping[str, bool]) -> set[str]:
        """Return the tasks that a worker may claim now which wants lines of `models`."""
        if self.is_ending(now):
            return set() if any(self.work[task] > now for task in self.holders) else {"finalize"}
        due = {task for task, until in self.work.items() if until <= now}
        return {task for task in due if kind(task) != "shard" or self.is_wanted(int(task), models)}

    def is_wanted(self, shard: int, models: Mapping[str, bool]) -> bool:
        positions = set(range(shard * SHARD, min(self.total, (shard + 1) * SHARD))) - self.done
        if all(models.values()) or not positions:
            return True
        return any(models.get(self.models[position], models[""]) for position in positions)

    def turn_to(self, task: str) -> None:
        self.work, self.holders = {task: 0}, {}

    def lease(self, task: str, fence: int, now: int) -> None:
        if task in self.holders:
            self.lost.setdefault(task, set()).add(self.holders[task])
        if self.is_ending(now):
            self.turn_to("finalize")
        if task == "finalize" and self.outcome is None:
            whole = self.total and len(self.done) == self.total
            self.outcome = "cancelled" if self.status == "cancelling" else "completed" if whole else "expired"
            self.status = self.status if self.status == "cancelling" else "finalizing"
        self.work[task], self.holders[task], self.fence = now + LEASE_MS, fence, fence

    def holds(self, lease: Lease) -> bool:
        return self.holders.get(lease.task_name) == lease.fence

    def close(self, status: str) -> None:
        self.status = status
        self.finishes += 1
        self.turn_to("sweep")


def had(*kinds: str) -> Any:
    """Allow a rule only after a lease of one of these kinds was granted."""
    return precondition(lambda machine: any(lease.task in kinds for lease in machine.leases))


class BatchMachine(RuleBasedStateMachine):
    """Drives the store and a model of it through random calls. It keeps every lease, so that the holder of a lost lease
    may come back with it at any later time."""

    client: Redis
    store: MovedStore
    loop: asyncio.AbstractEventLoop

    @initialize(models=model_lines, window=windows)
    def begin(self, models: list[tuple[str, int]], window: int) -> None:
        """Start with one batch whose lines are ready, so that short runs reach the interesting states, too."""
        self.run(self.store.begin_anew())
        self.now = START_MS
        self.asked = 0
        self.jobs: dict[str, Job] = {}
        self.leases: list[Lease] = []
        self.commits: list[tuple[Lease, list[str], list[int], Tally]] = []
        self.seen: dict[str, str] = {}
        self.times: dict[str, dict[str, int]] = {}
        self.create("acme", window)
        self.claim(ALL_TASKS)
        self.becomes_valid(self.leases[0], models)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def refused(self, work: Any, fault: Fault) -> None:
        with pytest.raises(ApiError) as refusal:
            self.run(work)
        assert refusal.value.fault is fault

    def lease(self, data: st.DataObject, *kinds: str) -> tuple[Lease, Job]:
        """Any lease there ever was, often one that is held."""
        found = [lease for lease in self.leases if lease.task in kinds]
        held = [lease for lease in found if self.jobs[lease.batch_id].holds(lease)]
        lease = data.draw(st.sampled_from(held or found) | st.sampled_from(found), "lease")
        return lease, self.jobs[lease.batch_id]

    @rule(ms=pauses)
    def time_passes(self, ms: int) -> None:
        self.now += ms
        self.run(self.store.set_time(self.now))

    @rule(tenant=tenants, window=windows)
    def create(self, tenant: str, window: int) -> None:
        self.asked += 1
        new = replace(wanted(tenant, f"{window}s"), id=f"batch_{self.asked:024x}")
        num_open = sum(job.tenant == tenant and job.status not in ENDED for job in self.jobs.values())
        if num_open == MAX_OPEN:
            self.refused(self.store.create(new, MAX_OPEN), Fault.INSUFFICIENT_QUOTA)
            return
        batch = self.run(self.store.create(new, MAX_OPEN))
        assert self.run(self.store.create(new, MAX_OPEN)) == batch, "a reply that was lost, and asked for again"
        self.jobs[batch.id] = Job(tenant, (self.now // 1000 + window) * 1000)
        assert batch.expires_at * 1000 == self.jobs[batch.id].expires_ms

    @rule()
    def claim_anything(self) -> None:
        self.claim(ALL_TASKS)

    @rule(want=tasks, models=open_models)
    def claim(self, want: set[str], models: Mapping[str, bool] = MappingProxyType({})) -> None:
        lease = self.run(self.store.claim("worker", want, models=lambda tenant: dict(models)))
        due = {
            key: {task for task in job.due(self.now, models) if kind(task) in want} for key, job in self.jobs.items()
        }
        if models and not any(models.values()):
            assert lease is None
        elif lease is None:
            assert not any(due.values())
        else:
            self.leased(lease, due[lease.batch_id])

    def leased(self, lease: Lease, due: set[str]) -> None:
        job = self.jobs[lease.batch_id]
        assert lease.task_name in due
        assert lease.fence > job.fence
        job.lease(lease.task_name, lease.fence, self.now)
        if lease.task in ("shard", "finalize"):
            assert set(lease.open_positions()) == set(range(lease.first, lease.last)) - job.done
        assert lease.batch.outcome == job.outcome
        assert lease.losses == len(job.lost.get(lease.task_name, ()))
        self.leases.append(lease)

    @had("validate")
    @rule(data=st.data(), models=model_lines)
    def validated(self, data: st.DataObject, models: list[tuple[str, int]]) -> None:
        self.becomes_valid(self.lease(data, "validate")[0], models)

    def becomes_valid(self, lease: Lease, models: list[tuple[str, int]]) -> None:
        job = self.jobs[lease.batch_id]
        held, total = job.holds(lease), sum(lines for _, lines in models)
        recorded = [] if [name for name, _ in models] == [""] else models
        assert self.run(self.store.validated(lease, total, None, recorded)) is held
        if held and job.is_ending(self.now):
            job.turn_to("validate")
        elif held:
            job.status, job.holders = "in_progress", {}
            job.models = [name for name, lines in models for _ in range(lines)]
            job.work = {f"{shard:06d}": 0 for shard in range(-(-total // SHARD))}

    @had("validate")
    @rule(data=st.data())
    def invalid(self, data: st.DataObject) -> None:
        lease, job = self.lease(data, "validate")
        held = job.holds(lease)
        assert self.run(self.store.invalid(lease, [BatchError("invalid_json_line", "what?", None, 3)])) is held
        if held and job.status == "cancelling":
            job.turn_to("validate")
        elif held:
            job.close("failed")

    @had(*ALL_TASKS)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease, job = self.lease(data, *ALL_TASKS)
        standing = "lost"
        if job.holds(lease):
            is_stopping = lease.task != "finalize" and job.is_ending(self.now)
            standing = "ending" if is_stopping else "yours"
        if standing == "yours":
            job.work[lease.task_name] = self.now + LEASE_MS
        assert self.run(self.store.renew([lease])) == {lease: standing}

    @had("shard")
    @rule(data=st.data(), num_failed=st.integers(0, 2))
    def commit(self, data: st.DataObject, num_failed: int) -> None:
        lease, job = self.lease(data, "shard")
        left = sorted(set(range(lease.first, lease.last)) - job.done)
        if not left:
            return
        positions = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True), "positions")
        failed = min(num_failed, len(positions))
        commit = (lease, [f"part {len(self.commits)}"], positions, Tally(len(positions) - failed, failed, 7, 2, 1))
        self.commits.append(commit)
        self.send(*commit)

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        """Send a commit again, as a worker does that has lost the reply or was suspended before it read it."""
        lease, parts, positions, tally = data.draw(st.sampled_from(self.commits), "commit")
        if parts[0] not in self.jobs[lease.batch_id].parts and set(positions) & self.jobs[lease.batch_id].done:
            return  # no worker that holds the lease would send positions that others have committed
        self.send(lease, parts, positions, tally)

    def send(self, lease: Lease, parts: list[str], positions: list[int], tally: Tally) -> None:
        job = self.jobs[lease.batch_id]
        held = job.holds(lease)
        assert self.run(self.store.commit(lease, parts, positions, tally)) is (held or parts[0] in job.parts)
        if held and parts[0] not in job.parts:
            assert not job.done & set(positions)
            job.parts.add(parts[0])
            job.done |= set(positions)
            job.failed += tally.failed

    @had(*ALL_TASKS)
    @rule(data=st.data(), wait_ms=st.sampled_from([0, 0, 3000]))
    def release(self, data: st.DataObject, wait_ms: int) -> None:
        lease, job = self.lease(data, *ALL_TASKS)
        self.run(self.store.release(lease, wait_ms / 1000))
        job.lost.get(lease.task_name, set()).discard(lease.fence)
        if not job.holds(lease):
            return
        del job.holders[lease.task_name]
        job.work[lease.task_name] = self.now + wait_ms if wait_ms else 0
        if lease.task == "shard" and set(range(lease.first, lease.last)) <= job.done:
            del job.work[lease.task_name]
            job.lost.pop(lease.task_name, None)
            if not job.work:
                job.turn_to("finalize")

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.jobs)), "batch")
        job = self.jobs[batch_id]
        if job.status in ("finalizing", "completed", "expired", "failed"):
            self.refused(self.store.cancel(job.tenant, batch_id), Fault.BATCH_CONFLICT)
            return
        job.status = "cancelled" if job.status == "cancelled" else "cancelling"
        assert self.run(self.store.cancel(job.tenant, batch_id)).status == job.status

    @had("finalize")
    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        lease, job = self.lease(data, "finalize")
        held = job.holds(lease)
        if held:
            assert set(self.run(self.store.parts(lease))) == job.parts
        assert self.run(self.store.finished(lease, "file-out", None)) is held
        if held:
            job.close(job.outcome)

    @had("sweep")
    @rule(data=st.data())
    def swept(self, data: st.DataObject) -> None:
        lease, job = self.lease(data, "sweep")
        held = job.holds(lease)
        assert self.run(self.store.swept(lease)) is held
        if held:
            job.work, job.holders, job.parts = {}, {}, set()

    @invariant()
    def all_is_as_it_ought_to_be(self) -> None:
        for batch_id, job in getattr(self, "jobs", {}).items():
            batch = self.run(self.store.get(job.tenant, batch_id))
            assert (batch.status, batch.lines.total, batch.outcome) == (job.status, job.total, job.outcome)
            assert batch.tally.completed + batch.tally.failed == len(job.done) <= job.total or not job.total
            assert batch.tally.failed == job.failed
            if job.work:
                assert self.run(self.client.bitcount(f"loralane:batchbits:{{{job.tenant}}}:{batch_id}")) == len(
                    job.done
                )
            assert job.finishes == (job.status in ENDED)
            before = self.seen.get(batch_id, "validating")
            assert ORDER.index(batch.status) >= ORDER.index(before)
            assert before == batch.status or before not in ENDED
            self.seen[batch_id] = batch.status
            times = {**batch.times, "created_at": batch.created_at, "expires_at": batch.expires_at}
            assert times.items() >= self.times.get(batch_id, {}).items(), "what has happened has happened when it did"
            self.times[batch_id] = times

    def teardown(self) -> None:
        """Left alone, every batch ends, once; nothing of it is left but what is remembered."""
        self.time_passes(LEASE_MS + 700_000)
        for _ in range(3 * len(self.jobs)):
            lease = self.run(self.store.claim("the last", ALL_TASKS))
            if lease is None:
                break
            assert lease.task in ("finalize", "sweep"), "every window is over"
            ending = self.store.finished(lease, None, None) if lease.task == "finalize" else self.store.swept(lease)
            assert self.run(ending)
        assert self.run(self.store.claim("the last", ALL_TASKS)) is None
        left = {key.decode().split(":")[1] for key in self.run(self.client.keys("loralane:*"))}
        assert left <= {"batch", "batches", "batchnewest"}


def kind(task: str) -> str:
    return "shard" if task.isdecimal() else task


def test_any_history_of_batches(valkey_server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.batches.store.SHARD_SIZE", SHARD)
    loop = asyncio.new_event_loop()
    client = Redis.from_url(valkey_server.connection_url)

    class Machine(BatchMachine):
        pass

    Machine.client, Machine.loop = client, loop
    Machine.store = MovedStore(client, lease_seconds=LEASE_MS / 1000, timeout=30.0)
    try:
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=examples(35), stateful_step_count=50, deadline=None)
        )
    finally:
        loop.run_until_complete(client.aclose())
        loop.close()
