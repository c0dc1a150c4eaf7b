"""Routers for simulations: ours, and those of other systems as their documents describe them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from engine.core.messages.requests import AdapterHash, Request
from engine.core.state.engine_state import EngineState
from engine.core.watch.report import adapters_in_memory, load_report
from gateway.routing.news import Ask, News, Replica, Role
from gateway.routing.placement import Placement
from gateway.routing.prefixes import PrefixIndex, matched_tokens, prefix_keys
from gateway.routing.router import Router
from gateway.routing.split import Splitting
from lab.sim.cluster import Choice, Chooser

PREFIXES_REMEMBERED = 100_000
"""Prefix keys that a router remembers for each replica."""


def read_news(state: EngineState) -> News:
    """Return the news that an engine with this state would report to a router now, with default copy rates."""
    load, (on_device, on_host) = load_report(state), adapters_in_memory(state)
    return News(
        on_device=on_device,
        on_host=on_host,
        free_pages=load.free_pages,
        num_pages=state.config.num_pages,
        waiting=load.waiting,
        running=load.running,
        wait_s=load.wait_s,
        prompt_token_s=load.prompt_token_s,
        decoding=load.decoding,
        decode_step_s=load.decode_step_s,
        prompt_share=load.prompt_share,
    )


class OurRouter:
    """The gateway's `Router`, as a router of the simulated cluster. `reasons` counts its decisions by reason."""

    def __init__(
        self,
        adapter_bytes: Mapping[AdapterHash, int],
        rates: tuple[float, float],
        seed: int = 0,
        splitting: Splitting | None = None,
        roles: Sequence[Role] = (),
    ) -> None:
        """Args:
        adapter_bytes: sizes of adapters by their hashes.
        rates: bytes per second of copies to the device and of reads from disk.
        splitting: how requests are split, or None.
        roles: of the first replicas, in order; others are BOTH.
        """
        self.router = Router(seed, splitting)
        self._roles = roles
        self.reasons: Counter[str] = Counter()
        self._replicas: dict[int, Replica] = {}
        self._numbers: dict[int, int] = {}
        """The simulation's number of each replica, by the replica's index in the router."""
        self._bytes = adapter_bytes
        self._rates = rates

    def join(self, replica: int) -> None:
        self._replicas[replica] = joined = self.router.join(
            f"replica-{replica}", PREFIXES_REMEMBERED, self._roles[replica] if replica < len(self._roles) else Role.BOTH
        )
        self._numbers[joined.index] = replica

    def leave(self, replica: int) -> None:
        self.router.leave(self._replicas.pop(replica))

    def hear(self, replica: int, state: EngineState, now: float) -> None:
        copies, reads = self._rates
        self.router.tick(now)
        news = replace(read_news(state), copy_bytes_per_s=copies, read_bytes_per_s=reads)
        self.router.hear(self._replicas[replica], news, now)

    def choose(self, request: Request, now: float) -> Choice:
        decision = self.router.choose(make_ask(request, self._bytes), now)
        self.reasons[decision.reason.value] += 1
        decode = None if decision.decode is None else self._numbers[decision.decode.index]
        return Choice(self._numbers[decision.replica.index], decode)

    def finish(self, replica: int, request: Request) -> None:
        if replica in self._replicas:
            self.router.finish(self._replicas[replica], request.lane)


def make_ask(request: Request, adapter_bytes: Mapping[AdapterHash, int]) -> Ask:
    return Ask(
        prompt_tokens=len(request.prompt_ids) + len(request.produced),
        lane=request.lane,
        adapter_hash=request.adapter_hash,
        adapter_bytes=adapter_bytes.get(request.adapter_hash or "", 0),
        prefix_keys=prefix_keys(request.prompt_ids, request.adapter_hash, request.tenant),
        output_tokens=request.params.max_tokens,
        may_split=not request.produced,
    )


class _Compared(ABC):
    """What the other systems' routers have in common: the replicas, and how many requests each has not finished."""

    def __init__(self, seed: int = 0) -> None:
        self.unfinished: dict[int, int] = {}
        self.random = Random(seed)

    def join(self, replica: int) -> None:
        self.unfinished[replica] = 0

    def leave(self, replica: int) -> None:
        del self.unfinished[replica]

    def hear(self, replica: int, state: EngineState, now: float) -> None:  # noqa: B027
        """Ignore the state of a replica. Routers that need news of it override this."""

    def choose(self, request: Request, now: float) -> Choice:
        replica = self.pick(request)
        self.unfinished[replica] += 1
        return Choice(replica)

    def finish(self, replica: int, request: Request) -> None:
        if replica in self.unfinished:
            self.unfinished[replica] -= 1

    @abstractmethod
    def pick(self, request: Request) -> int:
        """Return the number of the replica that serves the request."""

    def least_loaded(self) -> int:
        """Return a replica with the fewest unfinished requests, at random among equals."""
        least = min(self.unfinished.values())
        return self.random.choice([replica for replica, count in self.unfinished.items() if count == least])

    def better_of_two(self) -> int:
        """Return that of two random replicas which has fewer unfinished requests."""
        drawn = self.random.sample(sorted(self.unfinished), min(2, len(self.unfinished)))
        return min(drawn, key=self.unfinished.__getitem__)


class RoundRobin(_Compared):
    """Router that picks each replica in turn."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._turn = -1

    def pick(self, request: Request) -> int:
        self._turn += 1
        return sorted(self.unfinished)[self._turn % len(self.unfinished)]


class LeastLoaded(_Compared):
    """Router that picks a replica with the fewest unfinished requests, at random among equals."""

    def pick(self, request: Request) -> int:
        return self.least_loaded()


class Hash(_Compared):
    """Router that picks the adapter's first rendezvous rank, and for the base model the better of two replicas."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._placement = Placement()

    def join(self, replica: int) -> None:
        super().join(replica)
        self._placement.join(replica, f"replica-{replica}")

    def leave(self, replica: int) -> None:
        super().leave(replica)
        self._placement.leave(replica)

    def pick(self, request: Request) -> int:
        return self.better_of_two() if request.adapter_hash is None else self._placement.ranks(request.adapter_hash)[0]


class _ByPrefix(_Compared):
    """What routers by prefixes share: an index of those that each replica was sent."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._index = PrefixIndex()

    def join(self, replica: int) -> None:
        super().join(replica)
        self._index.join(replica, PREFIXES_REMEMBERED)

    def leave(self, replica: int) -> None:
        super().leave(replica)
        self._index.leave(replica)


class RayPrefix(_ByPrefix):
    """Ray Serve's PrefixCacheAffinityRouter with its defaults: the replica with the longest matching prefix, if that is
    a tenth of the prompt, else that with the fewest unmatched tokens. Keys hold no adapter."""

    LEAST_MATCH = 0.1

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._remembered: Counter[int] = Counter()

    def pick(self, request: Request) -> int:
        keys = prefix_keys(request.prompt_ids, None)
        masks = self._index.matches(keys)
        matched = {replica: matched_tokens(masks, replica) for replica in self.unfinished}
        if max(matched.values()) >= self.LEAST_MATCH * len(request.prompt_ids):
            longest = max(matched.values())
            best = [replica for replica, tokens in matched.items() if tokens == longest]
        else:
            smallest = min(self._remembered[replica] for replica in self.unfinished)
            best = [replica for replica in self.unfinished if self._remembered[replica] == smallest]
        replica = self.random.choice(best)
        self._index.add(replica, keys)
        self._remembered[replica] += len(request.prompt_ids) - matched[replica]
        return replica


class LlmdPrefix(_ByPrefix):
    """llm-d's default scoring profile: prefix match (weight 3), queue depth (2) and KV-cache utilization (2), and its
    LoRA affinity (1): 1.0 if the adapter is on the device, otherwise 0.8. The highest sum wins."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._news: dict[int, News] = {}

    def join(self, replica: int) -> None:
        super().join(replica)
        self._news[replica] = News()

    def hear(self, replica: int, state: EngineState, now: float) -> None:
        self._news[replica] = read_news(state)

    def pick(self, request: Request) -> int:
        keys = prefix_keys(request.prompt_ids, None)
        masks = self._index.matches(keys)
        queues = {replica: sum(self._news[replica].waiting) for replica in self.unfinished}
        low, high = min(queues.values()), max(queues.values())

        def score(replica: int) -> float:
            news = self._news[replica]
            prefix = matched_tokens(masks, replica) / max(1, len(request.prompt_ids))
            queue = (high - queues[replica]) / (high - low) if high > low else 1.0
            adapter = 1.0 if request.adapter_hash in news.on_device else 0.8
            return 3 * prefix + 2 * queue + 2 * news.free_pages / news.num_pages + adapter

        scores = {replica: score(replica) for replica in self.unfinished}
        highest = max(scores.values())
        replica = self.random.choice([replica for replica, value in scores.items() if value == highest])
        self._index.add(replica, keys)
        return replica


OTHERS: Mapping[str, Callable[[int], Chooser]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "hash": Hash,
    "prefix-ray": RayPrefix,
    "prefix-llm-d": LlmdPrefix,
}
