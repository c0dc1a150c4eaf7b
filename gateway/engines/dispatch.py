"""Routes each request of a pool to an engine, and submits it there, or splits it between two: the first computes the
prompt and the first token; the second fetches the KV meanwhile and continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from engine.core.memory.adapters import begin_of
from engine.core.memory.prefix import realm_of
from engine.core.messages.requests import AdapterHash, KvSource, Lane, Request
from engine.pb import engine_pb2 as pb
from engine.rpc.stream import Arrivals, EngineUnavailable, Handover
from engine.rpc.target import kv_address
from gateway.engines.replica import PooledEngine
from gateway.routing.news import Ask, Role
from gateway.routing.prefixes import PREFIX_TOKENS, prefix_keys
from gateway.routing.router import Decision, NoReplica, Reason, Router
from gateway.routing.split import SplitMode, Splitting

FETCH_SECONDS = 60.0
"""Seconds that the second engine of a split request waits for the first pages of the prompt's KV, from the submission
of the prompt to the first engine."""
REST_SECONDS = 5.0
"""Seconds that the second engine waits for the remaining pages, from the first token on, before it computes them
itself."""
ASSUMED_BYTES_PER_S, LATENCY_S = 1e9, 0.005
"""Rate of KV transfers that is assumed until an engine has measured one, and the seconds that every transfer takes,
however short."""


class Rest:
    """A `Handover`: the rest of a split request, which a second engine will continue. The router counts it as load of
    that engine until it ends or is dropped."""

    def __init__(self, engine: PooledEngine, request_id: str, source: KvSource, finish: Callable[[], None]) -> None:
        self.engine, self.request_id, self.source = engine, request_id, source
        self._finish: Callable[[], None] | None = finish

    def take(self) -> Callable[[], None] | None:
        """Claim the rest for submission, and return the callback to call at its end. None means that it was dropped or
        claimed before."""
        finish, self._finish = self._finish, None
        return finish

    def drop(self) -> None:
        if (finish := self.take()) is not None:
            self.engine.client.drop_kv(self.request_id)
            finish()


NO_ADAPTER = pb.AdapterInfo()


class Dispatch:
    """A router over the engines of a pool. Engines are known to it from `join` to `leave`."""

    def __init__(
        self,
        engines: Mapping[str, PooledEngine],
        adapters: Mapping[AdapterHash, pb.AdapterInfo],
        split: SplitMode = SplitMode.AUTO,
    ) -> None:
        """
        Args:
            engines: those of the pool by name, which change with it.
            adapters: describes the pool's adapters, which change with it.
            split: which requests are split between engines that exchange KV.
        """
        self.decisions: dict[Reason, int] = dict.fromkeys(Reason, 0)
        """Number of requests by the reason for which their engine was chosen."""
        self._engines = engines
        self._adapters = adapters
        self._router = Router()
        self._split = split
        self._clock = time.monotonic

    def join(self, engine: PooledEngine) -> None:
        """Add an engine to the router, so that it gets requests from now on. Until it has sent news, the router treats
        it as an engine whose news are stale."""
        info = engine.client.info
        keys = info.num_pages * info.block_size // PREFIX_TOKENS
        engine.replica = self._router.join(engine.name, keys, _role(engine))
        kv_bytes = info.page_bytes / max(1, info.block_size)
        self._router.splitting = Splitting(self._mode(), ASSUMED_BYTES_PER_S, LATENCY_S, kv_bytes)
        told_at = self._clock() if engine.told.is_set() else float("-inf")
        self._router.hear(engine.replica, engine.news, told_at)

    def leave(self, engine: PooledEngine) -> None:
        """Remove an engine from the router, so that it gets no more requests. Does nothing if the router does not know
        it."""
        if engine.replica is not None:
            self._router.leave(engine.replica)
            engine.replica = None
            self._router.splitting = self._router.splitting._replace(mode=self._mode())

    def hear(self, engine: PooledEngine, message: pb.EngineNews) -> None:
        """Pass the news of an engine to the router, after `PooledEngine.hear` has read them from the same message."""
        now = self._clock()
        if (replica := engine.replica) is not None:
            self._router.hear(replica, engine.news, now)
            self._router.learn(replica, message.prefix_keys)
        self._router.tick(now)

    def submit(self, request: Request, session: str, *, share_prefixes: bool) -> Arrivals:
        """Submit a request to the engine that the router chooses. `share_prefixes` says whether tenants share prefixes.
        Raises EngineUnavailable if no engine takes it."""
        ask = self.ask_for(request, session, share_prefixes=share_prefixes)
        engine, decision = self.choose(ask)
        rest = self._prepare_split(request, engine, decision)
        if rest is None:
            decision = decision.unsplit(ask)
        else:
            params = request.params._replace(max_tokens=1, min_tokens=min(1, request.params.min_tokens))
            request = request._replace(params=params, expected_tokens=None)
        self._router.send(decision, ask, self._clock())
        finish = partial(self._router.finish, decision.replica, request.lane)
        try:
            arrivals = engine.client.submit(request, ask.prefix_keys, finish)
        except BaseException:
            finish()
            if rest is not None:
                rest.drop()
            raise
        arrivals.engine, arrivals.reason, arrivals.handover = engine.name, decision.reason.value, rest
        self.decisions[decision.reason] += 1
        return arrivals

    def go_on(self, request: Request, rest: Handover) -> Arrivals | None:
        """Submit the rest of a split request to its second engine. Return None if that engine takes no requests any
        more, or if the rest was dropped."""
        assert isinstance(rest, Rest), "handovers come from `submit`"
        engine = rest.engine
        if not engine.serving:
            rest.drop()
        if (finish := rest.take()) is None:
            return None
        try:
            arrivals = engine.client.submit(request, (), finish)
        except EngineUnavailable:
            finish()
            return None
        arrivals.engine = engine.name  # without a reason: the decision is counted where the request was split
        return arrivals

    def _prepare_split(self, request: Request, engine: PooledEngine, decision: Decision) -> Rest | None:
        """Let the second engine of a decision begin to fetch the KV that `engine` will compute. Return the handover to
        it, or None if the request is not split."""
        second = None if decision.decode is None else self._engines[decision.decode.name]
        if second is None or decision.decode is None or not _can_continue(second, engine, request):
            return None
        address = kv_address(engine.client.info.kv_address, engine.address)
        request_id = f"{request.id}/rest"
        source = KvSource(address, FETCH_SECONDS, computes=True)
        try:
            second.client.fetch_kv(request._replace(id=request_id, kv_source=source))
        except EngineUnavailable:
            return None
        finish = partial(self._router.finish, decision.decode, request.lane)
        return Rest(second, request_id, source._replace(seconds=REST_SECONDS), finish)

    def ask_for(self, request: Request, session: str, *, share_prefixes: bool) -> Ask:
        """Return what the router has to know about a request."""
        adapter_hash, expected = request.adapter_hash, request.expected_tokens
        adapter = self._adapters.get(adapter_hash or "", NO_ADAPTER)
        keys: tuple[int, ...] = ()  # most requests for vectors find and leave no prefixes
        if request.pooling is None or request.pooling.shares_pages:
            begin = begin_of(adapter.invocation, request.prompt_ids) or 0
            realm = realm_of(request, share_prefixes=share_prefixes)
            keys = prefix_keys(request.prompt_ids, adapter_hash, realm, begin)
        return Ask(
            prompt_tokens=len(request.prompt_ids) + len(request.produced),
            lane=request.lane,
            adapter_hash=adapter_hash,
            adapter_bytes=adapter.bytes,
            prefix_keys=keys,
            session=session or None,
            tenant=request.tenant,
            output_tokens=request.params.max_tokens if expected is None else expected,
            may_split=_may_split(request),
        )

    def _mode(self) -> SplitMode:
        """Return the split mode in force: the configured one, or NEVER if no engine of the pool serves its KV to
        others."""
        roles = [replica.role for replica in self._router.replicas.values()]
        return self._split if Role.PREFILL in roles or Role.BOTH in roles else SplitMode.NEVER

    def choose(self, ask: Ask) -> tuple[PooledEngine, Decision]:
        """Return the engine for a request, and the decision: the router's choice or, if that lacks the adapter, one
        that has it, preferably not draining. Raises EngineUnavailable if there is none."""
        try:
            decision = self._router.decide(ask, self._clock())
        except NoReplica as error:
            raise EngineUnavailable(str(error)) from error
        chosen = self._engines[decision.replica.name]
        if ask.adapter_hash is None or ask.adapter_hash in chosen.held:
            return chosen, decision
        for engine in sorted(self._engines.values(), key=lambda engine: engine.draining):
            if ask.adapter_hash in engine.held and (replica := engine.replica) is not None:
                return engine, Decision(replica, Reason.HOLDER, 0)
        raise EngineUnavailable("no engine that takes requests has the adapter")


def _role(engine: PooledEngine) -> Role:
    """Return the part of split requests that an engine should compute, as far as it can: it computes prompts for others
    only if it gives their KV, and continues answers only if it can fetch it."""
    info = engine.client.info
    gives = bool(info.kv_address) and engine.role is not Role.DECODE
    takes = bool(info.kv_identity) and engine.role is not Role.PREFILL
    if gives and takes:
        return Role.BOTH
    return Role.PREFILL if gives else Role.DECODE if takes else Role.NONE


def _may_split(request: Request) -> bool:
    """Return whether a request may be split: an interactive one that has not run on an engine yet, and generates more
    than one token of text."""
    params = request.params
    is_text = request.pooling is None and params.prompt_logprobs is None and params.max_tokens > 1
    return is_text and request.lane is Lane.INTERACTIVE and not (request.produced or request.moves or request.suspect)


def _can_continue(second: PooledEngine, first: PooledEngine, request: Request) -> bool:
    """Return whether `second` can continue the answer of a split request whose prompt `first` computes: it has the
    adapter, room for the whole request, and KV pages of the same format."""
    info, tokens = second.client.info, len(request.prompt_ids) + request.params.max_tokens
    fits = request.expected_tokens is not None or tokens <= min(
        info.max_model_len, (info.num_pages - 1) * info.block_size
    )
    has_adapter = request.adapter_hash is None or request.adapter_hash in second.held
    return fits and has_adapter and first is not second and info.kv_identity == first.client.info.kv_identity
