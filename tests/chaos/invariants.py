"""What must be true after a trial. Each check returns descriptions of what is wrong; an empty list means success."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.core.errors import Fault as ApiFault
from tests.chaos.census import Census
from tests.chaos.deployment import Deployment
from tests.chaos.faults import Harm
from tests.chaos.load import Outcome
from tests.chaos.patience import Late, until
from tests.chaos.records import (
    Record,
    RequestLog,
    open_leases,
    slots_taken,
    undelivered_tokens,
    used_tokens,
)
from tests.chaos.settings import CALLERS, LEASE_SECONDS

TABLE = {(fault.row.http_status, fault.row.code) for fault in ApiFault}
INTERNAL = 500
LINE = "batch_"
"""With which the ids of a batch's requests begin."""
SETTLE_SECONDS = 5.0
QUIET_SECONDS = LEASE_SECONDS + 10.0
"""For settlements to arrive, and for the leases of the dead to end."""


@dataclass
class Books:
    """Bounds of what the ledger should hold for each tenant, accumulated over the trials."""

    least: dict[str, float] = field(default_factory=lambda: dict.fromkeys((caller.name for caller in CALLERS), 0))
    most: dict[str, float] = field(default_factory=lambda: dict.fromkeys((caller.name for caller in CALLERS), 0))
    unsettled: float = 0
    """Leases that may be left behind by gateways that died."""

    def begin_anew(self, used: dict[str, int], leases: int) -> None:
        self.least, self.most, self.unsettled = dict(used), dict(used), leases


class Auditor:
    """Checks one deployment before and after each trial."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._log = RequestLog(deployment)
        self._census = Census(deployment)
        self._books = Books()

    async def complaints(self, outcomes: Sequence[Outcome], harm: Harm) -> list[str]:
        """Check everything once all callers have gone, and wait for what may take a moment."""
        wrong = await self._quiet()
        self._log.read_on()
        wrong += [f"{self._log.torn} torn lines in the request log"] if self._log.torn and Harm.LOG not in harm else []
        for outcome in outcomes:
            records = self._log.records.pop(outcome.ask.id, [])
            wrong += [f"{outcome.ask.id}: {text}" for text in self._judge(outcome, records, harm)]
            self._enter(outcome, records, harm)
        self._enter_lines(harm)
        wrong += [f"a record that belongs to no request: {record}" for record in self._log.records.values()]
        self._log.records.clear()
        self._log.torn = 0
        wrong += await self._ledger(harm)
        return wrong + await self._engines() + await self._census.complaints()

    async def _quiet(self) -> list[str]:
        async def is_quiet() -> bool:
            for stats in await self._deployment.engine_stats():
                if stats.kv_fetching or stats.kv_leases or any(lane.running or lane.waiting for lane in stats.lanes):
                    return False
            return not await slots_taken(self._deployment) and not await undelivered_tokens(self._deployment)

        try:
            await until(is_quiet, QUIET_SECONDS, "requests, slots and settlements to end")
        except Late as late:
            engines = await self._deployment.engine_stats()
            lanes = [(lane.running, lane.waiting) for stats in engines for lane in stats.lanes]
            moves = [(stats.kv_fetching, stats.kv_leases) for stats in engines]
            owed, slots = await undelivered_tokens(self._deployment), await slots_taken(self._deployment)
            return [f"{late}: lanes {lanes}, fetches and leases {moves}, slots {slots}, undelivered {owed}"]
        return []

    def _judge(self, outcome: Outcome, records: Sequence[Record], harm: Harm) -> list[str]:
        wrong = list(outcome.oddities)
        may_break = Harm.CONNECTIONS in harm
        if outcome.ending == "forsaken" or (outcome.ending == "broken" and not may_break):
            wrong.append(f"{outcome.ending} after {outcome.ended - outcome.began:.1f} s, {len(outcome.tokens)} tokens")
        if outcome.ending == "refused" and (outcome.status, outcome.code) not in TABLE:
            wrong.append(f"refused with {outcome.status} {outcome.code}, which no table has")
        if self._deployment.kind.roles and outcome.code not in (None, "rate_limit_exceeded"):
            wrong.append(f"{outcome.ending} with {outcome.code}, though other engines could have served it")
        if outcome.status == INTERNAL or outcome.code == "internal_error":
            wrong.append("an internal error")
        if self._deployment.kind.fake and outcome.ending == "answered" and outcome.tokens != outcome.ask.expected():
            wrong.append("another answer than the one it has")
        return wrong + _judge_records(outcome, records, harm)

    def _enter(self, outcome: Outcome, records: Sequence[Record], harm: Harm) -> None:
        """Add the most and the least that the ledger may hold for this request."""
        name, books = outcome.ask.caller.name, self._books
        if not records:
            books.most[name] += len(outcome.ask.prompt) + outcome.ask.max_tokens
            books.unsettled += Harm.CONNECTIONS in harm
            return
        tokens = sum(record["actual_tokens"] for record in records)
        books.most[name] += tokens
        books.least[name] += 0 if Harm.CONNECTIONS | Harm.AWAY in harm else tokens

    def _enter_lines(self, harm: Harm) -> None:
        """Add the bounds for batch lines. A line may run twice and is charged for one run. A killed gateway's runs
        leave no record."""
        books, lines = self._books, [name for name in self._log.records if name.startswith(LINE)]
        for runs in map(self._log.records.pop, lines):
            tenant, tokens = runs[0]["tenant"], [record["actual_tokens"] for record in runs]
            books.most[tenant] += max(tokens)
            books.least[tenant] += 0 if Harm.CONNECTIONS | Harm.AWAY in harm else min(tokens)
        if lines and harm & (Harm.CONNECTIONS | Harm.LOG):
            books.most = dict.fromkeys(books.most, math.inf)
            books.unsettled = math.inf if Harm.CONNECTIONS in harm else books.unsettled

    async def _ledger(self, harm: Harm) -> list[str]:
        """Return what is still wrong with the ledger after the time in which failed settlements are sent again."""
        wrong: list[str] = []

        async def is_right() -> bool:
            wrong[:] = await self._misbooked(harm)
            return not wrong

        with suppress(Late):
            await until(is_right, SETTLE_SECONDS, "settlements to arrive")
        self._books.begin_anew(await used_tokens(self._deployment), await open_leases(self._deployment))
        return wrong

    async def _misbooked(self, harm: Harm) -> list[str]:
        used, leases, books = await used_tokens(self._deployment), await open_leases(self._deployment), self._books
        wrong = [f"{leases} leases are open, {books.unsettled} may be"] if leases > books.unsettled else []
        if Harm.BOOKS not in harm:
            wrong += [
                f"{name} has {tokens} tokens in the ledger, not {books.least[name]} to {books.most[name]}"
                for name, tokens in used.items()
                if not books.least[name] <= tokens <= books.most[name]
            ]
        return wrong

    async def _engines(self) -> list[str]:
        wrong = []
        for number, stats in enumerate(await self._deployment.engine_stats()):
            found = list(stats.violations)
            found += [f"{stats.kv_pages} pages that belong to no request"] if stats.kv_pages else []
            found += [f"adapter {each.adapter} is pinned" for each in stats.adapters if each.pinned]
            wrong += [f"engine {number}: {text}" for text in found]
        return wrong


def _judge_records(outcome: Outcome, records: Sequence[Record], harm: Harm) -> list[str]:
    """Check that a request has exactly one record, and that it agrees with what the caller was told."""
    if len(records) > 1:
        return [f"{len(records)} records"]
    if not records:
        excused = harm & (Harm.CONNECTIONS | Harm.LOG) or outcome.ending == "left"
        return [] if excused else [f"no record of a request that was {outcome.ending}"]
    [record] = records
    told = (record["status"], record["error"])
    if outcome.ending == "answered" and (record["status"], record["actual_tokens"]) != (200, outcome.used or None):
        return [f"answered with {outcome.used} tokens, recorded as {told}, {record['actual_tokens']} tokens"]
    if outcome.ending == "refused" and outcome.status != record["status"]:
        return [f"refused with {outcome.status} {outcome.code}, recorded as {told}"]
    if outcome.ending == "failed" and outcome.code != record["error"]:
        return [f"failed with {outcome.code}, recorded as {told}"]
    return []
