"""One engine of a pool: its connection, its state, and its news as the router reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence, Set
from enum import Enum

from engine.core.messages.requests import AdapterHash, Lane
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient
from gateway.api_schema.engines import EngineOverview
from gateway.engines.progress import Progress
from gateway.routing.news import News, Replica, Role

CONFIGURED = "configuration"
"""What `added_by` says of an engine that the configuration names or the gateway has started."""


class EngineState(Enum):
    """State of an engine, as one gateway sees it."""

    CONNECTING = "connecting"
    """The engine is not reachable, or it has not loaded the model and the adapters yet."""
    HANGING = "hanging"
    """The engine's requests were moved because it had stood still, and it has not moved since. It gets no requests."""
    MISMATCHED = "mismatched"
    """The engine serves another model than the other engines of the pool, or the same with other number formats, speaks
    another version of the protocol, or serves as many gateways as it can."""
    DRAINING = "draining"
    """The engine gets no new requests."""
    SERVING = "serving"


class AdapterTiers:
    """Where the adapters of one engine process are, as its news say."""

    def __init__(self) -> None:
        self.on_device: Set[AdapterHash] = frozenset()
        self.on_host: Set[AdapterHash] = frozenset()
        self._tiers: dict[AdapterHash, int] = {}

    def note(self, changes: Iterable[pb.AdapterPlace]) -> None:
        """Update the sets of adapters on the device and in host memory. They become new sets, because the router may
        hold the previous ones."""
        for place in changes:
            if place.tier == pb.ADAPTER_TIER_DISK:
                self._tiers.pop(place.adapter, None)
            else:
                self._tiers[place.adapter] = place.tier
        self.on_device = {name for name, tier in self._tiers.items() if tier == pb.ADAPTER_TIER_DEVICE}
        self.on_host = self._tiers.keys() - self.on_device

    def clear(self) -> None:
        """Forget all adapters, because the connection to the engine process has ended."""
        self._tiers.clear()
        self.on_device = frozenset()


class PooledEngine:
    """One engine of a pool. The pool connects it, hands it the adapters, and reads its state from here."""

    def __init__(self, name: str, client: EngineClient, address: str, added_by: str, role: Role = Role.BOTH) -> None:
        self.name = name
        self.client = client
        self.address = address
        self.added_by = added_by
        self.role = role
        """The part of split requests that the engine should compute."""
        self.replica: Replica | None = None
        """The router's record of the engine. None means that the router does not know it: it is not connected."""
        self.draining = False
        self.is_reachable = False
        """True while the client has a connection, on which the adapters may still be being loaded."""
        self.held: set[AdapterHash] = set()
        """Adapters that this gateway has loaded into the engine process."""
        self.told = asyncio.Event()
        """Set once the engine process has sent news."""
        self.news = News()
        """The last news of the engine process, for the router."""
        self.life = ""
        """Id of the engine process that was connected last; empty if none was."""
        self.known_life = ""
        """Id of the last engine process in which the pool's lane modes and goals were set."""
        self.progress = Progress()
        self._tiers = AdapterTiers()
        self._message = pb.EngineNews()

    @property
    def serving(self) -> bool:
        """Return whether the engine takes new requests."""
        return self.replica is not None and not self.draining

    @property
    def state(self) -> EngineState:
        if self.client.mismatch:
            return EngineState.MISMATCHED
        if self.replica is None:
            return EngineState.HANGING if self.hangs else EngineState.CONNECTING
        return EngineState.DRAINING if self.draining else EngineState.SERVING

    @property
    def hangs(self) -> bool:
        """Return whether the engine process stood still, and has not moved since."""
        return self.progress.hangs(self.client.info.life)

    def overview(self) -> EngineOverview:
        info, news = self.client.info, self._message
        return EngineOverview(
            name=self.name,
            address=self.address,
            state=self.state.value,
            problem=self.client.mismatch,
            model=info.model,
            device=info.device,
            life=info.life,
            running=sum(lane.running for lane in news.lanes),
            waiting=sum(lane.waiting for lane in news.lanes),
            streams=self.client.num_streams,
            free_pages=news.free_pages,
            total_pages=info.num_pages,
            adapters_on_device=len(self._tiers.on_device),
            predicted_wait_seconds=news.wait_seconds,
            added_by=self.added_by,
            weights=info.weights,
            role=self.role.value,
            tensor_parallel=info.tensor_parallel,
            pipeline_parallel=info.pipeline_parallel,
        )

    def lose(self) -> None:
        """Forget what was known of the engine process, because the connection to it has ended."""
        self.is_reachable = self.draining = False
        self.held.clear()
        self.told.clear()
        self._tiers.clear()
        self._message = pb.EngineNews()
        self.progress.lose()

    def hear(self, message: pb.EngineNews) -> None:
        """Update the engine's state from its news message, and set `news`, the part of it that the router reads."""
        if message.adapters or not self.told.is_set():
            self._tiers.note(message.adapters)
        self._message, self.draining = message, message.draining
        self.progress.hear(message.steps, is_busy=any(lane.running for lane in message.lanes))
        loads = {lane.lane: (lane.waiting, lane.running) for lane in message.lanes}
        (waiting, running), (batch_waiting, batch_running) = (loads.get(lane.value, (0, 0)) for lane in Lane)
        self.news = News(
            on_device=self._tiers.on_device,
            on_host=self._tiers.on_host,
            free_pages=message.free_pages,
            num_pages=max(1, self.client.info.num_pages),
            waiting=(waiting, batch_waiting),
            running=(running, batch_running),
            wait_s=message.wait_seconds,
            prompt_token_s=message.prompt_token_seconds,
            decoding=message.decoding,
            decode_step_s=message.decode_step_seconds,
            prompt_share=message.prompt_share,
            kv_bytes_per_s=message.kv_bytes_per_second,
            **_known_rates(message),
        )
        self.told.set()


def _known_rates(message: pb.EngineNews) -> dict[str, float]:
    """Return the rates of adapter loads that the engine has measured, as arguments of `News`."""
    rates = {
        "copy_bytes_per_s": message.copy_bytes_per_second,
        "read_bytes_per_s": message.read_bytes_per_second,
    }
    return {name: rate for name, rate in rates.items() if rate}


def mismatch(engine: PooledEngine, others: Sequence[PooledEngine]) -> str:
    """Return the reason why an engine cannot serve in one pool with `others`: its model differs from theirs, or it is
    the same process at another address. Empty means that it can."""
    if not others:
        return ""
    info = engine.client.info
    if twin := next((other.name for other in others if other.life == info.life), ""):
        return f"it is the same process as {twin}"
    first = others[0].client.info
    names = ["model_hash", "dtype", "vocab_size", "max_model_len"]
    if info.weights and first.weights:  # engines of older versions do not name them
        names.append("weights")
    pairs = [(name, getattr(first, name), getattr(info, name)) for name in names]
    return "; ".join(f"it differs in {name} ({theirs}, not {ours})" for name, ours, theirs in pairs if ours != theirs)
