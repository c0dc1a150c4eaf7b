"""What must hold while requests run, and when the last of them has ended: all has come back and is charged once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations
from operator import contains

from scripted_edges import USAGE
from settled_world import CLOUD, Visit, World

from gateway.requests.record import RequestRecord

FREE = frozenset(
    (
        "engine_unavailable",
        "engine_crashed",
        "preempted",
        "lane_queue_full",
        "queue_timeout",
        "adapter_unavailable",
        "model_not_found",
    )
)
"""Error codes of requests that engines have failed, which are free."""
FREE_UPSTREAM = frozenset(("upstream_unavailable", "lane_queue_full", "invalid_request"))
"""Error codes of requests that an upstream has failed or refused, which are free before their first output."""


def check_safe(world: World) -> None:
    """Check what holds at any time."""
    for lease, tokens in world.limiter.settled.items():
        assert len(tokens) <= 1, f"the lease {lease} was settled {len(tokens)} times"
    told = Counter(record.id for record in world.watcher.records)
    assert not told or max(told.values()) == 1, "a record that was logged twice"
    assert told.keys().isdisjoint(world.gateway.live), "a record that was logged while its request runs"
    assert len(world.gateway.live) <= world.gateway.active
    for pool in world.pools:
        counts = [count for one in pool._dispatch._router.replicas.values() for count in one.unfinished.values()]
        assert min(counts, default=0) >= 0, "the router counts fewer than no requests"
    for visit in world.visits:
        if visit.task is not None and visit.task.done():
            visit.check()


def check_still(world: World) -> None:
    """Check what holds while nothing is ready to run: gateway and engines agree on what runs."""
    for pool in world.pools:
        for engine in pool._engines.values():
            wire = next(one for one in world.engines if one.name == engine.name)
            if engine.client.ready and wire.session is not None:
                assert engine.client._streams.keys() == wire.works.keys(), f"engine {engine.name} has other requests"


def check_settled(world: World) -> None:
    """Check, after the last request has ended, that everything has come back, and that what was used is charged."""
    check_safe(world)
    assert (len(world.gateway.live), world.gateway.active) == (0, 0)
    assert [len(tokens) for tokens in world.limiter.settled.values()] == [1] * len(world.limiter.settled)
    assert world.limiter._leases == {}, "a reservation that the gateway does not settle"
    assert [bucket.running.used for bucket in world.limiter._buckets.values() if bucket.running.used] == []
    for model in world.models:
        assert [shares.total for shares in model._in_lane.values()] == [0, 0], "a place in a lane"
        assert not model.adapters._versions._users, "a request that pins an adapter"
    assert world.client._running.total == 0, "a place at the upstream"
    assert world.cloud.open == [], "a response that the gateway has not closed"
    assert not world.gateway._path._deadlines._running, "a timer"
    assert not world.gateway._routes._copies and not +world.gateway._routes._copying, "a shadow copy"
    for engine in world.engines:
        assert not engine.works, f"engine {engine.name} still computes {list(engine.works)}"
        assert not engine.fetches, f"engine {engine.name} still fetches KV for {engine.fetches}"
    for pool in world.pools:
        assert [engine.client.num_streams for engine in pool._engines.values() if engine.client.num_streams] == []
        counts = [one.unfinished for one in pool._dispatch._router.replicas.values()]
        assert not any(count for one in counts for count in one.values()), "the router still counts a request"
    _check_records(world)


def _check_records(world: World) -> None:
    """Check that each request has the records of its runs, each run one charge, and each virtual model's request one
    outcome."""
    records = world.watcher.records
    runs: dict[str, list[RequestRecord]] = {visit.request.request_id: [] for visit in world.visits}
    for record in records:
        runs[record.request_id].append(record)
    started = [visit for visit in world.visits if visit.has_started]
    for visit in started:
        count = len(runs[visit.request.request_id])
        assert count == 1 if visit.is_direct else count >= 1, f"{count} records of {visit.request.request_id}"
        _check_charges(world, visit, runs[visit.request.request_id])
    outcomes = Counter(outcome.model for outcome in world.outcomes if outcome.reason != "shadow")
    tried = [visit for visit in started if any(run.served.member for run in runs[visit.request.request_id])]
    assert outcomes == Counter(visit.request.model.model for visit in tried), "an outcome for each that was tried"
    known = {record.id for record in records}
    assert {one.partition("-")[0] for engine in world.engines for one in engine.submitted} <= known, "unknown work"


def _check_charges(world: World, visit: Visit, runs: Sequence[RequestRecord]) -> None:
    """Check that every run that the limiter admitted was charged once, and what it was worth."""
    name, deferred = visit.request.request_id, visit.request.deferred
    mine = [lease for lease, grant in world.limiter.grants.items() if grant.request.request_id == name]
    charged = [tokens for lease in mine for tokens in world.limiter.settled[lease]]
    due = [charges_of(world, run) for run in runs if run.bill.is_granted]
    assert len(charged) == len(due), f"{name}: {len(charged)} leases for {len(due)} runs"
    assert not mine or sum(not world.limiter.grants[lease].request.is_counted for lease in mine) == 1, (
        f"{name} does not count as one request: {[world.limiter.grants[lease].request for lease in mine]}"
    )
    # Only a run that ended before its reservation is counted with one of no tokens.
    assert not any(world.limiter.settled[lease][0] for lease in mine if not world.limiter.grants[lease].request.tokens)
    fits = any(all(map(contains, due, order)) for order in permutations(charged))
    told = [(run.served.name, run.outcome, run.work.prompt_tokens, run.work.completion_tokens) for run in runs]
    assert fits, f"{name} was charged {charged} in place of {due}: {visit.ends}, {told}"
    counted = sum(world.limiter.used[lease].tokens for lease in mine)
    assert counted == (0 if deferred else sum(charged)), "limits and usage count different tokens"
    assert deferred is None or deferred.tokens == sum(charged)
    if visit.is_direct and visit.ends[0] == "complete":
        assert visit.delivered == runs[0].work.completion_tokens == computed_for(world, runs[0])


def computed_for(world: World, record: RequestRecord) -> int:
    """Return the number of tokens of all answers of a run, as far as engines have come with them."""
    answers: dict[str, int] = {}
    for engine in world.engines:
        for answer, tokens in engine.computed.items():
            if answer.startswith(f"{record.id}-"):
                answers[answer] = max(tokens, answers.get(answer, 0))
    return sum(answers.values())


def charges_of(world: World, record: RequestRecord) -> set[int]:
    """Return what a run may be charged: its prompt and the tokens that reached the gateway, which are no more than were
    computed, or nothing if it was never begun, or if its engine or upstream failed it."""
    used, finish, error_code = record.work.tokens, record.outcome.finish, record.outcome.error_code
    if record.times.submitted is None:
        return {0}
    if record.served.base_model == CLOUD:
        if finish in ("stop", "length"):
            assert used == sum(USAGE), "the upstream's own count"
        is_unanswered = error_code in FREE_UPSTREAM and not record.work.completion_tokens
        return {0} if is_unanswered else {0, used} if finish == "cancelled" and world.cloud.failures else {used}
    assert record.work.completion_tokens <= computed_for(world, record), "more tokens than engines have computed"
    engines = world.engines
    is_cancelled = _has_answer(record, *(engine.cancelled for engine in engines))
    was_away = not _has_answer(record, *(engine.submitted for engine in engines))
    has_failed = was_away or _has_answer(record, *(engine.failed for engine in engines))
    if error_code not in FREE:
        return {0, used} if has_failed and finish in ("cancelled", "error") else {used}
    return {0} if has_failed and not is_cancelled and not world.is_stopping else {0, used}


def _has_answer(record: RequestRecord, *ids: Iterable[str]) -> bool:
    """Return whether an answer of a run is among these ids of answers."""
    return any(one.startswith(f"{record.id}-") for these in ids for one in these)
