"""Finds the KV of waiting sequences that need not be computed: in the prefix cache, on the host, or in a running
sequence with the same prompt. Taking it, and what else a start needs, is one `Transaction`."""

from __future__ import annotations

from collections.abc import Callable, Container
from types import TracebackType
from typing import NamedTuple

from engine.core.messages.requests import HostPageId, PageId, PrefixKey
from engine.core.plan.page_budget import PageBudget, Saves
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence, page_keys, tail_key


class Transaction:
    """What one sequence takes from several budgets of a plan. When the `with` block ends, all of it is given back, what
    was taken last first, unless the block has called `keep`. (An `ExitStack` does the same, and takes far longer.)"""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def took(self, give_back: Callable[..., object], *what: object) -> None:
        """Record that something was taken, which `give_back(*what)` gives back."""
        self._taken.append((give_back, what))

    def keep(self) -> None:
        """Give nothing back that was taken so far."""
        self._taken.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for give_back, what in reversed(self._taken):
            give_back(*what)


class Known(NamedTuple):
    """The KV of a waiting sequence that need not be computed."""

    cached: list[PageId]
    """Leading pages in the prefix cache."""
    on_host: list[HostPageId]
    """Host pages with copies of the pages after these."""
    tail: PageId | None
    """Partly filled page to copy after these (see `KnownKv._tail`)."""
    num_tokens: int
    """Number of tokens in all of these."""
    keys_to_compute: list[PrefixKey]
    """Prefix keys of the full pages after `cached` and `on_host`."""
    is_promised: bool
    """True means that another sequence is computing the first of these pages, or that it is being fetched."""


class KnownKv:
    """Finds the known KV of the waiting sequences that one plan may start, and remembers what those that it starts will
    compute. `preempted` has the sequences that the plan preempts."""

    def __init__(
        self, state: EngineState, now: float, pages: PageBudget, host: Saves, preempted: Container[str]
    ) -> None:
        self._state = state
        self._config = state.config
        self._now = now
        self._pages = pages
        self._host = host
        self._preempted = preempted
        self._promised: set[PrefixKey] = set()

    def promise(self, keys: list[PrefixKey]) -> None:
        """Record that a sequence that the plan starts computes the pages of these keys."""
        self._promised.update(keys)

    def find(self, seq: Sequence, taking: Transaction) -> Known:
        """Return how much of a waiting sequence's KV is known. Its copies on the host are taken."""
        keys = self._keys(seq)
        cached = self._pages.still_cached(self._state.prefix.match(keys)) if self._config.prefix_caching else []
        on_host = self._host.match(keys[len(cached) :])
        count = len(cached) + len(on_host)
        taking.took(self._host.let_go, keys[len(cached) : count])
        is_promised = count < len(keys) and self._is_promised(keys[count], seq)
        tail = None if is_promised else self._tail(seq, count)
        num_tokens = count * self._config.block_size if tail is None else len(seq.request.prompt_ids) - 1
        return Known(cached, on_host, tail, num_tokens, keys[count:], is_promised)

    def _keys(self, seq: Sequence) -> list[PrefixKey]:
        """Return the prefix keys of a sequence's full pages that need not be computed if they are cached already,
        leaving at least one token to compute. The list is empty if there is neither a prefix cache nor host pages."""
        if not (self._config.prefix_caching or self._state.host.num_pages):
            return []
        return page_keys(seq, seq.num_skippable // self._config.block_size, self._config.block_size)

    def _is_promised(self, key: PrefixKey, seq: Sequence) -> bool:
        """Return whether a sequence that this plan starts, or a running one of the same lane or a higher one, is
        computing the page of this key, or the page is being fetched from another engine. Waiting for the page is then
        cheaper than computing it."""
        if self._state.moves.is_awaited(key, self._now):
            return True
        if not self._config.prefix_caching:
            return False
        owner = self._state.running.get(self._state.prefix.promised.get(key, ""))
        if owner is None or owner.id in self._preempted:
            return key in self._promised
        return owner.lane <= seq.lane

    def _tail(self, seq: Sequence, known: int) -> PageId | None:
        """Return the partly filled page in which a running sequence with the same prompt has the KV of the prompt's
        end, so that `seq` copies it instead of computing that KV. None means that there is no such page, or that the
        `known` leading pages of `seq` with known KV are not just the full pages of its prompt."""
        count = len(seq.request.prompt_ids) - 1
        if not self._state.prefix.tails or known != count // self._config.block_size or seq.num_skippable < count:
            return None
        key = tail_key(seq, self._config.block_size)
        owner = self._state.running.get(self._state.prefix.tails.get(key, "")) if key else None
        return owner.pages[known] if owner else None  # where this plan preempts the owner, too: copies come first
