"""Reports to routers: how busy this engine is, its adapters in memory, prompts it has computed, and if it drains. After
the first, messages hold only changes: a hundred bytes with ten thousand adapters."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from engine.core.memory.adapters import Adapter
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.state.engine_state import EngineState
from engine.core.watch.report import adapters_in_memory, load_report
from engine.engine import Engine
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import LANES

NEWS_SECONDS = 0.25
"""Seconds between two status reports to a gateway. A report costs the engine 0.1 ms with 32 running requests."""
MAX_KEPT_KEYS = 1 << 16
"""Maximum number of prefix keys that are kept for feeds which begin later: those of 16 million prompt tokens."""

DISK, HOST, DEVICE = pb.ADAPTER_TIER_DISK, pb.ADAPTER_TIER_HOST, pb.ADAPTER_TIER_DEVICE

Tiers = dict[AdapterHash, pb.AdapterTier]
"""Tier of each adapter in memory; the others are on disk."""


class PrefixLog:
    """Log of the prefix keys of the most recent prompts of this engine, at most `MAX_KEPT_KEYS`, in order of arrival,
    which status reports send to routers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: deque[int] = deque(maxlen=MAX_KEPT_KEYS)
        self._count = 0
        """Number of keys that were ever added."""

    def add(self, keys: Sequence[int]) -> None:
        with self._lock:
            self._keys.extend(keys)
            self._count += len(keys)

    def since(self, count: int) -> tuple[list[int], int]:
        """Return the prefix keys added after the first `count` ones, as far as they are still kept, and the total
        number of keys added so far, which a `NewsFeed` passes as `count` the next time."""
        with self._lock:
            if self._count == count:  # islice would walk over all keys
                return [], count
            new = min(self._count - count, len(self._keys))
            return list(islice(self._keys, len(self._keys) - new, None)), self._count


class Draining:
    """Switches the draining of this engine on and off: while it is on, gateways send no new requests and move those
    that run here. It can also stop the engine once no requests are left."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._stopping: threading.Event | None = None
        """Set to call off a stop that waits for the last requests."""
        self._is_final = False
        """True once a drain has begun that cannot be ended."""
        self._until = 0.0
        """Time on the engine's clock, in seconds, at which the engine stops even if it still has requests."""
        self.is_on = False
        """True means that gateways send no new requests and move those that run here."""

    def begin(self, *, stop: bool, seconds: float, final: bool = False) -> None:
        """Begin to drain this engine: gateways send no new requests and move those that run here. With `stop`, stop the
        engine once it has no requests left, or after `seconds`. Called again, it sets the seconds anew, from now on.
        `final` means that `end` cannot end the drain, which who runs the process began."""
        with self._lock:
            self.is_on = True
            self._is_final = self._is_final or final
            if not stop:
                return
            self._until = self._engine.clock() + seconds
            if self._stopping is None:
                called_off = self._stopping = threading.Event()
                threading.Thread(target=self._stop_when_empty, args=(called_off,), daemon=True).start()

    def end(self) -> bool:
        """End draining this engine, and call off a stop that has not begun. Return False, without change, if the drain
        is final."""
        with self._lock:
            if self._is_final:
                return False
            self.is_on = False
            if self._stopping is not None:
                self._stopping.set()
                self._stopping = None
            return True

    def _stop_when_empty(self, called_off: threading.Event) -> None:
        # The first look is late enough for every gateway to have heard that the engine drains.
        while not called_off.wait(2 * NEWS_SECONDS):
            if self._engine.clock() >= self._until or not self._engine.look(lambda state: state.sequences):
                self._engine.stop()
                return


class NewsFeed:
    """Makes this engine's status reports (load, adapters in memory, prefix keys, draining) to one gateway, by which its
    router chooses. Each lists only what changed since the last."""

    def __init__(self, engine: Engine, draining: Draining, prefixes: PrefixLog, page_bytes: int = 0) -> None:
        self._engine = engine
        self._draining = draining
        self._prefixes = prefixes
        self._page_bytes = page_bytes
        self.has_begun = False
        """True once the first report was made."""
        self._keys_sent = 0
        self._tiers_sent: Tiers = {}
        self._rates = 0.0, 0.0
        self._version: tuple[int, ...] = ()
        """Counters of adapter moves, and totals of adapters, at the last report. While they stay the same, no adapter
        has changed its tier."""

    def next(self) -> pb.EngineNews:
        """Return the next status report of this engine for the gateway. The first one lists all adapters in memory and
        all prefix keys that are kept; later ones list only changes of adapters and new keys."""
        self.has_begun = True
        news, tiers = self._engine.look(self._read)
        news.adapters.extend(self._changes(tiers))
        keys, self._keys_sent = self._prefixes.since(self._keys_sent)
        news.prefix_keys.extend(keys)
        news.draining = self._draining.is_on
        return news

    def _read(self, state: EngineState) -> tuple[pb.EngineNews, Tiers]:
        """Return a report that has only the engine's load as yet (`next` adds adapters and prefix keys), and the tier
        of each adapter in memory."""
        counters, load = state.counters, load_report(state)
        moves = (counters.adapters.loads, counters.adapters.evictions, counters.adapters.fetches)
        version = (*moves, counters.adapters.host_evictions, len(state.adapters), state.adapter_pages)
        if version != self._version:
            self._version, self._rates = version, adapter_rates(state.adapters.values())
            on_device, on_host = adapters_in_memory(state)
            tiers = dict.fromkeys(on_host, HOST) | dict.fromkeys(on_device, DEVICE)
        else:
            tiers = self._tiers_sent
        lanes = zip(Lane, load.running, load.waiting, load.lane_wait_s, strict=True)
        copy_rate, read_rate = self._rates
        news = pb.EngineNews(
            lanes=[
                pb.LaneLoad(lane=LANES[lane], running=running, waiting=waiting, wait_seconds=wait)
                for lane, running, waiting, wait in lanes
            ],
            free_pages=load.free_pages,
            wait_seconds=load.wait_s,
            prompt_token_seconds=load.prompt_token_s,
            copy_bytes_per_second=copy_rate,
            read_bytes_per_second=read_rate,
            steps=counters.steps,
            kv_bytes_per_second=state.moves.pages_per_second * self._page_bytes,
            decoding=load.decoding,
            decode_step_seconds=load.decode_step_s,
            prompt_share=load.prompt_share,
        )
        return news, tiers

    def _changes(self, tiers: Tiers) -> Iterator[pb.AdapterPlace]:
        sent, self._tiers_sent = self._tiers_sent, tiers
        if sent is tiers:
            return
        for adapter_hash, tier in tiers.items():
            if sent.get(adapter_hash) != tier:
                yield pb.AdapterPlace(adapter=adapter_hash, tier=tier)
        for adapter_hash in sent.keys() - tiers.keys():
            yield pb.AdapterPlace(adapter=adapter_hash, tier=DISK)


def adapter_rates(adapters: Collection[Adapter]) -> tuple[float, float]:
    """Return the bytes per second at which adapters were copied to the device, and read from disk, averaged over each
    one's last; 0 if there was none. Routers predict loads from them."""
    copied = [(adapter.num_bytes, adapter.loaded.seconds) for adapter in adapters if adapter.loaded.seconds]
    read = [(adapter.num_bytes, adapter.fetched.seconds) for adapter in adapters if adapter.fetched.seconds]
    return _rate(copied), _rate(read)


def _rate(moves: Sequence[tuple[int, float]]) -> float:
    seconds = sum(taken for _, taken in moves)
    return sum(num_bytes for num_bytes, _ in moves) / seconds if seconds else 0.0
