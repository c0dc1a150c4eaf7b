"""Chooses the engine of each request of a pool, and submits it there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from engine.core.adapters import begin_of
from engine.core.prefix import realm_of
from engine.core.types import AdapterHash, Request
from engine.pb import engine_pb2 as pb
from engine.rpc.stream import Arrivals, EngineUnavailable
from gateway.engines.replica import PooledEngine
from gateway.routing.news import Ask
from gateway.routing.prefixes import PREFIX_TOKENS, prefix_keys
from gateway.routing.router import Decision, NoReplica, Reason, Router

NO_ADAPTER = pb.AdapterInfo()


class Dispatch:
    """A router over the engines of a pool. Engines are known to it from `join` to `leave`."""

    def __init__(self, engines: Mapping[str, PooledEngine], adapters: Mapping[AdapterHash, pb.AdapterInfo]) -> None:
        """`engines` are those of the pool by name, `adapters` describes its adapters; both change with the pool."""
        self.decisions: dict[Reason, int] = dict.fromkeys(Reason, 0)
        """Number of requests by the reason for which their engine was chosen."""
        self._engines = engines
        self._adapters = adapters
        self._router = Router()
        self._clock = time.monotonic

    def join(self, engine: PooledEngine) -> None:
        """Let an engine get requests from now on. Without news, it is treated as one that has long been silent."""
        info = engine.client.info
        engine.replica = self._router.join(engine.name, info.num_pages * info.block_size // PREFIX_TOKENS)
        engine.replica.hear(engine.news, self._clock() if engine.told.is_set() else float("-inf"))

    def leave(self, engine: PooledEngine) -> None:
        """Let an engine get no requests any more. Does nothing if it gets none already."""
        if engine.replica is not None:
            self._router.leave(engine.replica)
            engine.replica = None

    def hear(self, engine: PooledEngine, message: pb.EngineNews) -> None:
        """Take in a message of an engine, which `engine` has heard already."""
        now = self._clock()
        if (replica := engine.replica) is not None:
            replica.hear(engine.news, now)
            self._router.learn(replica, message.prefix_keys)
        self._router.tick(now)

    def submit(self, request: Request, session: str, *, share_prefixes: bool) -> Arrivals:
        """Submit a request to the engine that the router chooses. `share_prefixes` says whether tenants share prefixes.
        Raises EngineUnavailable if no engine takes it."""
        ask = self.ask_for(request, session, share_prefixes=share_prefixes)
        engine, decision = self.choose(ask)
        self._router.send(decision, ask)
        finish = partial(self._router.finish, decision.replica, request.lane)
        try:
            arrivals = engine.client.submit(request, ask.prefix_keys, finish)
        except BaseException:
            finish()
            raise
        arrivals.engine, arrivals.reason = engine.name, decision.reason.value
        self.decisions[decision.reason] += 1
        return arrivals

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
        )

    def choose(self, ask: Ask) -> tuple[PooledEngine, Decision]:
        """Choose an engine that has the request's adapter, one that drains if no other has. Raises EngineUnavailable if
        none has, or none takes requests."""
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
