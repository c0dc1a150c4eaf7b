"""Chooses a replica for each request: the least predicted delay among the few replicas that the adapter belongs to.

An interactive request goes where its first token is predicted soonest. One sum holds what delays it: the work that
waits at the replica, the part of its prompt that the prefix cache does not hold, and the load of its adapter. Outside
the replicas that the adapter belongs to, a load counts `STRAY_PRICE` times, because it takes room from the adapters
that belong there. If an adapter suddenly gets more requests than its replicas can serve, they overflow to others at
once; otherwise they stay. Requests of a session, of either lane, stay on one replica unless another is clearly better.

Batch work goes to its adapter's replicas as long as they hold no more of it than `BOUND` times the average (consistent
hashing with bounded loads: Mirrokni et al., SODA 2018).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random

from engine.core.messages.requests import Lane
from gateway.routing.decision import Decision, NoReplica, Reason, reason_for
from gateway.routing.news import Ask, News, Replica, Role
from gateway.routing.placement import Placement
from gateway.routing.prefixes import PrefixIndex, matched_tokens
from gateway.routing.sessions import Sessions
from gateway.routing.split import Side, SplitMode, Splitting, place

STALE_S = 3.0
"""Age of news, in seconds, beyond which they say nothing about a replica's load any more."""
NEIGHBOURS = 2
"""Replicas beyond those that an adapter belongs to that a request may overflow to."""
STRAY_PRICE = 16.0
"""Factor on the seconds of a load outside an adapter's replicas. With 4 there were a fifth more such loads."""
BOUND = 1.25
"""Ratio of a replica's batch requests to the average, above which batch work of its adapters goes to other replicas.
With 1.5 and 2.0 a simulated cluster copied 7 and 12 % fewer bytes, and generated 3 and 9 % fewer tokens."""
TIE_S = 0.002
"""Delays that differ by less than this many seconds are equal: predictions are no more precise."""
STICKY_S = 0.5
"""Seconds by which another replica must be faster before a session moves there: the usual goal for a first token."""
MAX_REPLICAS = 64
"""Maximum number of replicas of one base model."""


class Router:
    """Chooses replicas of one base model. Only one thread may use it."""

    def __init__(self, seed: int = 0, splitting: Splitting | None = None) -> None:
        """`seed` is that of choices at random. Without `splitting`, no request is split."""
        self.splitting = splitting or Splitting()
        self.replicas: dict[int, Replica] = {}
        self.placement = Placement()
        self.prefixes = PrefixIndex()
        self._sessions = Sessions()
        self._random = Random(seed)

    def join(self, name: str, most_keys: int = 100_000, role: Role = Role.BOTH) -> Replica:
        """Add a replica, and return its record. Its prefix cache has room for the blocks of `most_keys` prefix keys."""
        index = next(i for i in range(len(self.replicas) + 1) if i not in self.replicas)
        self.replicas[index] = replica = Replica(index, name, role=role)
        self.placement.join(index, name)
        self.prefixes.join(index, most_keys)
        return replica

    def leave(self, replica: Replica) -> None:
        """Remove a replica and everything that is known about it."""
        del self.replicas[replica.index]
        self.placement.leave(replica.index)
        self.prefixes.leave(replica.index)
        self._sessions.leave(replica.index)

    def hear(self, replica: Replica, news: News, now: float) -> None:
        """Record a replica's news. A replica that has only begun to work cannot predict its costs yet; they are then
        taken to be the least that another replica reports, because with costs of 0 it would look best for every
        request."""
        others = [each.news for each in self.replicas.values() if each is not replica]
        prompt_token_s = news.prompt_token_s or _least_known(other.prompt_token_s for other in others)
        decode_step_s = news.decode_step_s or _least_known(other.decode_step_s for other in others)
        replica.hear(replace(news, prompt_token_s=prompt_token_s, decode_step_s=decode_step_s), now)

    def choose(self, ask: Ask, now: float) -> Decision:
        """Choose a replica as `decide` does, and count the request as sent to it."""
        decision = self.decide(ask, now)
        self.send(decision, ask, now)
        return decision

    def send(self, decision: Decision, ask: Ask, now: float) -> None:
        """Count a request as sent at `now` to the replica of a decision, and remember that its prefixes and session are
        there. The caller may have decided otherwise than the router."""
        replica, home = decision.replica, decision.replica
        replica.send(ask, decision.cached_tokens, now)
        begins_at = now + replica.delay_s(ask, ask.prompt_tokens, now)
        if decision.placing is not None:
            home, transfer = decision.placing.second.replica, decision.placing.transfer
            home.send(ask, ask.prompt_tokens, now)
            begins_at = transfer.arrives_at
            for link in (replica.sends, home.receives):
                link.take(transfer.sent_s, transfer.arrives_at, now)
            self.prefixes.add(home.index, ask.prefix_keys)
        if ask.lane is Lane.INTERACTIVE and ask.output_tokens > 1:
            insort(home.answers_to_come, begins_at)
        if ask.adapter_hash is not None:
            self.placement.count(ask.adapter_hash, ask.prompt_tokens + ask.output_tokens)
        self.prefixes.add(replica.index, ask.prefix_keys)
        if ask.session is not None:
            self._sessions.put(ask.tenant, ask.session, home.index)

    def tick(self, now: float) -> None:
        """Adapt the number of replicas of each adapter to its share of the work, if a round has ended. To be called
        at least every `ROUND_S`, and not for each request: a round looks at every adapter that had work."""
        self.placement.advance(now)

    def learn(self, replica: Replica, keys: Sequence[int]) -> None:
        """Note that a replica has computed the prompts with these prefix keys, which other routers may have sent to
        it."""
        self.prefixes.add(replica.index, keys)

    def finish(self, replica: Replica, lane: Lane) -> None:
        """Remove a request from a replica's unfinished requests, because it has ended there or has moved to another
        replica."""
        replica.unfinished[lane] -= 1

    def decide(self, ask: Ask, now: float) -> Decision:
        """Choose a replica for a request, without counting it there. `now` is in seconds on the clock of
        `Replica.hear`. Raises NoReplica if every replica is draining, or there is none."""
        masks = self.prefixes.matches(ask.prefix_keys)
        fresh, stuck = self._fresh(ask, now), self._stuck_to(ask)
        is_batch = ask.lane is Lane.BATCH
        decision = self._for_batch(ask, fresh, masks) if is_batch else self._fastest(ask, fresh, masks, now)
        if stuck is not None and (decision is None or not self._outdoes(decision, stuck, ask, now)):
            decision = _decide(stuck, Reason.SESSION, masks)
        if decision is not None:
            return self._split(decision, ask, now, masks)
        known = list(self._fresh(ask, float("-inf")))
        if known:
            stale = known[0] if ask.adapter_hash else min(known, key=lambda each: sum(each.unfinished.values()))
            return _decide(stale, Reason.STALE, masks)
        raise NoReplica("every replica is draining or has ended")

    def _split(self, decision: Decision, ask: Ask, now: float, masks: list[int]) -> Decision:
        """Return a decision to split the request between two replicas if it may be split and that costs less or the
        mode is ALWAYS; otherwise return `decision`."""
        if self.splitting.mode is SplitMode.NEVER or not ask.may_split or ask.output_tokens < 2:
            return decision
        placing = place(ask, self._sides(ask, now, masks), decision.replica, self.splitting, now)
        if placing is None:
            return decision
        first = placing.first
        return Decision(first.replica, Reason.SPLIT, first.cached_tokens, placing)

    def _sides(self, ask: Ask, now: float, masks: list[int]) -> list[Side]:
        """Return the candidates for a request or its parts: of each role, the replicas that its adapter belongs to and
        `NEIGHBOURS` more, whose adapter loads cost `STRAY_PRICE` times as much."""
        homes = len(self.replicas) if ask.adapter_hash is None else self.placement.replicas(ask.adapter_hash)
        ranks, sides = dict.fromkeys(Role, 0), []
        for replica in self._fresh(ask, now):
            rank = ranks[replica.role]
            ranks[replica.role] += 1
            if rank < homes + NEIGHBOURS:
                load_s = replica.load_s(ask) * (1.0 if rank < homes else STRAY_PRICE)
                sides.append(Side(replica, matched_tokens(masks, replica.index), load_s))
        return sides

    def _stuck_to(self, ask: Ask) -> Replica | None:
        """Return the replica that a session's earlier requests went to, if it takes new requests."""
        index = None if ask.session is None else self._sessions.get(ask.tenant, ask.session)
        return None if index is None or self.replicas[index].draining else self.replicas[index]

    def _outdoes(self, decision: Decision, stuck: Replica, ask: Ask, now: float) -> bool:
        """Return whether the session of a request moves from its replica to that of a decision: the latter is faster by
        more than `STICKY_S`, the former has more than its share of batch work or its news are stale. Without this
        bound, one session could pin all the load of a tenant to one replica."""
        other = decision.replica
        if other is stuck:
            return False
        if stuck.told_at < now - STALE_S:
            return True
        if ask.lane is Lane.BATCH:
            serving = [replica for replica in self.replicas.values() if not replica.draining]
            return stuck.unfinished[Lane.BATCH] + 1 > _most_batch(serving)
        cached = matched_tokens(self.prefixes.matches(ask.prefix_keys), stuck.index)
        delay = other.delay_s(ask, decision.cached_tokens, now) + other.load_s(ask)
        return stuck.delay_s(ask, cached, now) + stuck.load_s(ask) > delay + STICKY_S

    def _fresh(self, ask: Ask, now: float) -> Iterator[Replica]:
        """Yield the replicas that take new requests and whose news are not older than `STALE_S` at `now`, in the order
        in which the request's adapter prefers them. A `now` of -inf accepts news of any age."""
        replicas, oldest = self.replicas, now - STALE_S
        for index in self.placement.ranks(ask.adapter_hash or ""):
            replica = replicas[index]
            if replica.told_at >= oldest and not replica.draining:
                yield replica

    def _fastest(self, ask: Ask, fresh: Iterator[Replica], masks: list[int], now: float) -> Decision | None:
        """Return the replica with the least predicted delay, at random if several are equal: among the fresh ones of
        the adapter and `NEIGHBOURS` more, whose loads count `STRAY_PRICE` times. None means that none is fresh."""
        homes = len(self.replicas) if ask.adapter_hash is None else self.placement.replicas(ask.adapter_hash)
        best: list[tuple[int, Replica, int]] = []
        least = float("inf")
        for rank, replica in enumerate(islice(fresh, homes + NEIGHBOURS)):
            price = 1.0 if rank < homes else STRAY_PRICE
            cached = matched_tokens(masks, replica.index)
            delay = replica.delay_s(ask, cached, now) + price * replica.load_s(ask)
            if delay < least - TIE_S:
                best, least = [(rank, replica, cached)], delay
            elif delay <= least + TIE_S:
                best.append((rank, replica, cached))
                least = min(least, delay)
        if not best:
            return None
        rank, replica, cached = self._random.choice(best) if len(best) > 1 else best[0]
        return Decision(replica, reason_for(ask, replica, cached, is_home=rank < homes), cached)

    def _for_batch(self, ask: Ask, fresh: Iterator[Replica], masks: list[int]) -> Decision | None:
        """Return the least loaded of the adapter's replicas or else the first further rank that has, with this request,
        at most `BOUND` * (average + 1) unfinished batch requests; without an adapter, the replica with the fewest.
        None means that none is fresh."""
        ranked = list(fresh)
        if not ranked:
            return None
        if ask.adapter_hash is None:
            return _decide(min(ranked, key=_load), Reason.LEAST_LOADED, masks)
        homes = self.placement.replicas(ask.adapter_hash)
        most = _most_batch(ranked)
        order = enumerate((*sorted(ranked[:homes], key=_load), *ranked[homes:]))
        # The least loaded replica has no more than the average, so that one is always found.
        rank, replica = next(pair for pair in order if pair[1].unfinished[Lane.BATCH] + 1 <= most)
        cached = matched_tokens(masks, replica.index)
        return Decision(replica, reason_for(ask, replica, cached, is_home=rank < homes), cached)


def _least_known(costs: Iterable[float]) -> float:
    """Return the least cost other than 0, which means that a replica has measured none yet; 0 if all are 0."""
    return min((cost for cost in costs if cost), default=0.0)


def _decide(replica: Replica, reason: Reason, masks: list[int]) -> Decision:
    return Decision(replica, reason, matched_tokens(masks, replica.index))


def _most_batch(replicas: Sequence[Replica]) -> float:
    """Return how many unfinished batch requests a replica may have, a new one included, before it counts as overloaded:
    `BOUND` times (the average of these replicas + 1)."""
    return BOUND * (sum([replica.unfinished[Lane.BATCH] for replica in replicas]) / len(replicas) + 1)


def _load(replica: Replica) -> tuple[int, float]:
    """Return a sort key for batch work, the least loaded replica first: its unfinished batch requests and, among equal
    ones, the predicted wait of interactive requests."""
    return replica.unfinished[Lane.BATCH], replica.news.wait_s
