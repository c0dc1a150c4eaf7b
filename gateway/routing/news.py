"""What a replica reports to the routers, what a router knows about a request, and its record of each replica."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum
from math import exp
from typing import NamedTuple

from engine.core.messages.requests import AdapterHash, Lane

WORKS_ON_S = 0.5
"""Seconds after its last news for which a replica is assumed to go on computing the prompts that wait there. News come
twice in that time."""
WINDOW_S, LEAST_WINDOW_S = 5.0, 1.0
"""Window, in seconds and with exponential decay, over which a link's utilisation is measured, and the shortest window
that is assumed after a link's first transfer."""


class Ask(NamedTuple):
    """One request, as far as a router needs to know it: lengths in tokens (that of the answer is expected), adapter,
    keys of its prompt's prefixes, and session, whose requests stay on one replica."""

    prompt_tokens: int
    lane: Lane = Lane.INTERACTIVE
    adapter_hash: AdapterHash | None = None
    """The adapter's content hash; None is the base model."""
    adapter_bytes: int = 0
    """Size of the adapter's weights."""
    prefix_keys: tuple[int, ...] = ()
    """Keys of the prompt's leading blocks of `PREFIX_TOKENS` tokens (see prefixes.py), the shortest prefix first."""
    session: str | None = None
    """Requests with the same session stay on one replica while it serves them about as soon as others."""
    tenant: str = ""
    """The tenant whose session it is."""
    output_tokens: int = 0
    """Expected length of the answer."""
    may_split: bool = False
    """True means that one replica may compute the prompt, and another one continue the answer."""


class Role(Enum):
    """The part of split requests that a replica computes. Other requests may run on any replica."""

    PREFILL = "prefill"
    """The replica computes prompts, and hands them over with their first tokens."""
    DECODE = "decode"
    """The replica continues answers."""
    BOTH = "both"
    NONE = "none"
    """The replica cannot exchange KV, and serves whole requests only."""


@dataclass(frozen=True, slots=True)
class News:
    """A replica's report on itself at one moment. The defaults describe an idle replica about which nothing is known.

    Durations are in seconds, predicted by the engine's own step-time model: `wait_s` is that until the first token of
    an interactive request with an empty prompt. Pairs are for the interactive and the batch lane.
    """

    on_device: Set[AdapterHash] = frozenset()
    on_host: Set[AdapterHash] = frozenset()
    """Adapters in device memory and in host memory."""
    free_pages: int = 0
    num_pages: int = 1
    waiting: tuple[int, int] = (0, 0)
    """Number of waiting requests by lane."""
    running: tuple[int, int] = (0, 0)
    """Number of running requests by lane."""
    wait_s: float = 0.0
    """Predicted time until the first token of an interactive request with an empty prompt that arrives now."""
    prompt_token_s: float = 0.0
    """Predicted device time of one prompt token, including its part of the weights that a step reads."""
    decoding: int = 0
    """Number of interactive requests that have their first token, and thus decode."""
    decode_step_s: float = 0.0
    """Predicted duration of a step without prompts that computes one decode more than the replica runs now."""
    prompt_share: float = 0.0
    """Share of the last seconds in which the device computed prompts."""
    kv_bytes_per_s: float = 0.0
    """Rate at which KV came from other replicas lately; 0 if none did."""
    copy_bytes_per_s: float = 10e9
    """Rate at which adapters are copied from host memory to the device."""
    read_bytes_per_s: float = 0.5e9
    """Rate at which adapters are read from disk."""


@dataclass(slots=True)
class LinkUse:
    """One direction of a replica's link, as far as this router's transfers use it. Times are in seconds on the router's
    clock."""

    until: float = 0.0
    """When the last transfer is predicted to have ended."""
    _seconds: float = 0.0
    """Seconds of transfers, with exponential decay until `_noted_at`."""
    _noted_at: float = 0.0
    _first_at: float | None = None

    def take(self, seconds: float, until: float, now: float) -> None:
        """Count a KV transfer, decided on at `now`, that occupies the link for `seconds` and is predicted to end at
        `until`."""
        if self._first_at is None:
            self._first_at = self._noted_at = now
        self._seconds = self._seconds * exp((self._noted_at - now) / WINDOW_S) + seconds
        self._noted_at, self.until = now, until

    def share(self, now: float) -> float:
        """Return the link's recent utilisation by this router's transfers, as a share of the time, with exponential
        decay over `WINDOW_S` seconds. A transfer counts in full once it is decided, so that more than 1 means that more
        transfers were placed on the link than it can carry."""
        if self._first_at is None:
            return 0.0
        window = WINDOW_S * (1 - exp((self._first_at - now) / WINDOW_S))
        return self._seconds * exp((self._noted_at - now) / WINDOW_S) / max(window, LEAST_WINDOW_S)


@dataclass(slots=True, eq=False)
class Replica:
    """A router's record of one replica: the last news with the time when they came, the work that the router has sent
    since, and its unfinished requests. A draining replica gets no new requests."""

    index: int
    """Position of the replica's bit in masks of replicas. It never changes, and is used again after a removal."""
    name: str
    news: News = field(default_factory=News)
    told_at: float = float("-inf")
    """When the news arrived, in seconds on the router's clock."""
    prompts_until: float = float("-inf")
    """Predicted time at which the replica will have computed the prompts that wait there, those of interactive requests
    sent since the news included, in seconds on the router's clock."""
    answers_to_come: list[float] = field(default_factory=list)
    """Predicted first-token times, ascending, in seconds on the router's clock, of interactive answers that this
    replica will decode and that had not begun by the last news. Another replica may compute the prompt."""
    loading: set[AdapterHash] = field(default_factory=set)
    """Adapters of requests sent since the news, which the replica loads because of them."""
    unfinished: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    """Requests of this router that the replica has not finished, by lane."""
    role: Role = Role.BOTH
    sends: LinkUse = field(default_factory=LinkUse)
    receives: LinkUse = field(default_factory=LinkUse)
    """The replica's link, over which it sends and receives the KV of requests that are split."""
    draining: bool = False
    """True means that the replica finishes what it has and gets no new requests."""

    def hear(self, news: News, now: float) -> None:
        """Replace the news by those that came at `now`, in seconds on the router's clock, and forget the work sent
        before them. Unfinished requests stay counted, and so do answers that are predicted to begin later."""
        self.news, self.told_at = news, now
        self.prompts_until = now + news.wait_s
        del self.answers_to_come[: bisect_right(self.answers_to_come, now)]
        self.loading.clear()

    def holds(self, adapter_hash: AdapterHash) -> bool:
        """Return whether the adapter is in device memory, or will be there for a request already sent."""
        return adapter_hash in self.news.on_device or adapter_hash in self.loading

    def load_s(self, ask: Ask) -> float:
        """Return the seconds of bringing the request's adapter into device memory; 0 if there is nothing to bring."""
        if ask.adapter_hash is None or self.holds(ask.adapter_hash):
            return 0.0
        copy_s = ask.adapter_bytes / self.news.copy_bytes_per_s
        if ask.adapter_hash in self.news.on_host:
            return copy_s
        return copy_s + ask.adapter_bytes / self.news.read_bytes_per_s

    def delay_s(self, ask: Ask, cached_tokens: int, now: float) -> float:
        """Return the predicted seconds from `now` until the request's first token: the time for the prompts that wait
        here, and that for its own prompt without the `cached_tokens` in the replica's prefix cache. The load of its
        adapter is left out."""
        return max(0.0, self.prompts_until - self._known(now)) + self._computed_s(ask, cached_tokens)

    def decodes(self, until: float) -> int:
        """Return the number of interactive answers that this replica is predicted to decode at `until`, in seconds on
        the router's clock: those that had begun by the last news, and those to come by `until`. The latter are at most
        the unfinished requests, because answers of cancelled requests never begin."""
        to_come = min(bisect_left(self.answers_to_come, until), self.unfinished[Lane.INTERACTIVE])
        return self.news.decoding + to_come

    def has_room(self) -> bool:
        """Return whether free pages hold the KV of one request more, beside those that wait and answers that are to
        come, if each needs as many pages as a running request has on average."""
        news, running = self.news, sum(self.news.running)
        to_come = min(len(self.answers_to_come), self.unfinished[Lane.INTERACTIVE]) + news.waiting[Lane.INTERACTIVE]
        return not running or (to_come + 1) * (news.num_pages - news.free_pages) <= running * news.free_pages

    def send(self, ask: Ask, cached_tokens: int, now: float) -> None:
        """Count a request that is sent to the replica at `now`: as unfinished, the computation of its prompt beyond
        `cached_tokens` if it is interactive, and the load of its adapter if the replica does not hold it."""
        self.unfinished[ask.lane] += 1
        if ask.lane is Lane.INTERACTIVE:
            self.prompts_until = max(self.prompts_until, self._known(now)) + self._computed_s(ask, cached_tokens)
        if ask.adapter_hash is not None and not self.holds(ask.adapter_hash):
            self.loading.add(ask.adapter_hash)

    def _known(self, now: float) -> float:
        """Return the time up to which the replica is assumed to have worked on its waiting prompts: `now`, but at most
        `WORKS_ON_S` after the last news."""
        return min(now, self.told_at + WORKS_ON_S)

    def _computed_s(self, ask: Ask, cached_tokens: int) -> float:
        return max(0, ask.prompt_tokens - cached_tokens) * self.news.prompt_token_s
