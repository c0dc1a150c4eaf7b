"""However a request runs, it is settled once, its stream ends once, and everything that it held comes back.

A request's charge goes through these states, most requests' from top to bottom:

open       The record exists, and nothing is charged: a request that ends now is free.
checked    The limiter has room for another request (`check_requests`). A request that its caller spoils or leaves from
           here on, before it is reserved, is reserved and settled with 0 tokens, so that it counts as a request.
started    Only if the limiter is almost sure to grant it: the engine works already. If the limiter refuses, or the
           caller leaves, that work is dropped and not charged, as if the request were only checked.
reserved   The limiter has granted a lease, which must be settled.
submitted  An engine or the upstream has the request. From here on the prompt is charged, and the tokens as they come,
           whether the model, the caller, a time limit, an administrator or the gateway ends the request.
refunded   The engine or the upstream failed or refused, which is free.
settled    The lease is settled before the caller's block is left, once: with nothing for a request that was never
           submitted or is refunded, else with prompt and tokens. If the limiter cannot book it, that is logged.

Each run of a virtual model's member is such a request, with a charge of its own; a shadow copy has none. With
Hypothesis's profile `nightly`, other and more examples are tried than in CI, and those that fail are shrunk.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import structlog
from fakes import ids_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace
from records import make_request
from settled_checks import check_safe, check_settled, check_still
from settled_world import ADAPTER, BASE, ROUTES, SMALL, Visit, World
from structlog.testing import LogCapture
from virtual_loop import VirtualLoop
from wire_engine import WireChannels

from engine.core.messages.requests import ErrorCode, Lane, Pooling, SamplingParams
from gateway.core.usage import DeferredUsage
from gateway.requests.types import Chat, GenerateRequest
from tests.examples import examples, is_nightly

STEPS = 40
YES, NO = ids_of("y")[0], ids_of("n")[0]
CHAT = Chat(({"role": "user", "content": "hi"},))

turns = st.sampled_from([None, None, 0, 1, 2, 3, 5, 8])
"""Turns of the loop after an event until the next one; None means until nothing is ready."""
which = st.integers(0, 5)
"""Number of a visit, an engine or the like among those that there are."""
REFUSALS = (
    None,
    ErrorCode.LANE_QUEUE_FULL,
    ErrorCode.QUEUE_TIMEOUT,
    ErrorCode.ADAPTER_UNAVAILABLE,
    ErrorCode.CANCELLED,
)
"""How an engine ends a request without an answer. None means that it gives the request up, as when its adapter is
unloaded; with CANCELLED, an administrator has told it to."""
FORMS: dict[str, dict[str, Any]] = {
    "chat": {"prompts": (CHAT,)},
    "ids": {"prompts": (ids_of("hi"),)},
    "line": {"prompts": (CHAT,), "lane": Lane.BATCH, "deferred": DeferredUsage()},
    "vectors": {"prompts": (ids_of("hi"),) * 3, "n": 1, "max_tokens": 0, "pooling": Pooling()},
}
LIMITS: tuple[dict[str, float], ...] = ({}, {}, {"deadline": 3.0}, {"stall": 2.0})


def wish(model: str, form: str, limits: dict[str, float], logprobs: int | None, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(logprobs=None if form == "vectors" else logprobs)
    fields |= {"request_id": "", "seed": 1, "sampling": sampling}
    return make_request(model, **fields | limits | FORMS[form])


wishes = st.builds(
    wish,
    model=st.sampled_from([BASE, BASE, BASE, ADAPTER, SMALL, *ROUTES]),
    form=st.sampled_from(["chat", "chat", "ids", "vectors", "line"]),
    limits=st.sampled_from(LIMITS),
    logprobs=st.sampled_from([None, None, 1]),
    lane=st.sampled_from([Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BATCH]),
    n=st.sampled_from([1, 1, 2]),
    max_tokens=st.sampled_from([6, 6, 6, None, 1, 0]),
    coalesce=st.booleans(),
)


class Settling(RuleBasedStateMachine):
    """Callers, engines, an upstream, the limiter and an operator do one thing after the other."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.world = World(self.loop, self.folder)
        self.loop.run_until_complete(self.world.start())
        self.loop.quiet()
        self.is_broken = False
        self.logs = LogCapture()
        structlog.configure(processors=[self.logs])

    def go_on(self, count: int | None) -> None:
        if count is None:
            self.loop.quiet()
        else:
            self.loop.turns(count)

    @rule(wish=wishes, slow=st.booleans(), count=turns)
    def begin(self, wish: GenerateRequest, slow: bool, count: int | None) -> None:
        named = replace(wish, request_id=f"visit {len(self.world.visits)}", deferred=wish.deferred and DeferredUsage())
        self.world.begin(Visit(named, slow))
        self.go_on(count)

    @precondition(lambda self: self.world.running)
    @rule(number=which, how=st.sampled_from(["cancel", "cancel", "twice", "break"]), count=turns)
    def leaves(self, number: int, how: str, count: int | None) -> None:
        """A caller leaves, wherever its request is."""
        running = self.world.running
        visit = running[number % len(running)]
        visit.leaving = True
        visit.turn.release()
        if how != "break":
            visit.task.cancel()
            if how == "twice":
                self.loop.turn()
                visit.task.cancel()
        self.go_on(count)

    @precondition(lambda self: any(visit.slow for visit in self.world.running))
    @rule(number=which, count=turns)
    def reads(self, number: int, count: int | None) -> None:
        slow = [visit for visit in self.world.running if visit.slow]
        slow[number % len(slow)].turn.release()
        self.go_on(count)

    @precondition(lambda self: self.world.works)
    @rule(number=which, amount=st.sampled_from([0, 1, 1, 2, 6]), yes=st.booleans(), stop=st.booleans(), count=turns)
    def computes(self, number: int, amount: int, yes: bool, stop: bool, count: int | None) -> None:
        """An engine begins a request, sends tokens of it, or ends it."""
        works = self.world.works
        engine, work = works[number % len(works)]
        if not amount:
            engine.admit(work)
        elif not work.submit.params.max_tokens:
            engine.pool(work)
        else:
            engine.tokens(work, amount, YES if yes else NO, stop=stop)
        self.go_on(count)

    @precondition(lambda self: self.world.works)
    @rule(number=which, code=st.sampled_from(REFUSALS), count=turns)
    def refuses(self, number: int, code: ErrorCode | None, count: int | None) -> None:
        """An engine refuses a request or ends it, also in the middle of its answer."""
        works = self.world.works
        engine, work = works[number % len(works)]
        if code is None:
            engine.abort(work)
        else:
            engine.refuse(work, code)
        self.go_on(count)

    @rule(number=which, crashed=st.booleans(), blamed=which, stays_away=st.booleans(), count=turns)
    def is_lost(self, number: int, crashed: bool, blamed: int, stays_away: bool, count: int | None) -> None:
        """An engine process ends, and the next one starts at once or at the next such event."""
        engine = self.world.engines[number % 3]
        if engine.up:
            engine.lose(crashed=crashed, during=tuple(engine.works)[: blamed % 3])
            self.go_on(count)
            if stays_away:
                return
        engine.restart()
        self.loop.passes(0.2)

    @rule(number=which, count=turns)
    def drains(self, number: int, count: int | None) -> None:
        """An operator begins or ends the drain of an engine."""
        engine = self.world.engines[number % 3]
        if engine.up:
            engine.draining = not engine.draining
            engine.tell()
        self.go_on(count)

    @rule(manner=st.sampled_from(["at once", "at once", "late", "late", "refuses", "away"]), likely=st.booleans())
    def limiter_turns(self, manner: str, likely: bool) -> None:
        """The limiter answers in another manner from now on; it refuses the next two calls only."""
        limiter = self.world.limiter
        limiter.manner, limiter.likely, limiter.strikes = manner, likely, 2

    @precondition(lambda self: self.world.limiter.waiting)
    @rule(calls=st.sampled_from([1, 1, 9]), count=turns)
    def limiter_answers(self, calls: int, count: int | None) -> None:
        self.world.limiter.release(calls)
        self.go_on(count)

    @precondition(lambda self: self.world.cloud.open)
    @rule(
        number=which,
        what=st.sampled_from(["says", "says", "finishes", "finishes", "cuts", "500", "400", "gone"]),
        count=turns,
    )
    def upstream(self, number: int, what: str, count: int | None) -> None:
        exchanges = self.world.cloud.open
        exchange = exchanges[number % len(exchanges)]
        if not exchange.status.done():
            self.world.cloud.failures += what in ("500", "400", "gone")
            exchange.status.set_result({"500": 500, "400": 400, "gone": 0}.get(what, 200))
        if what == "says":
            exchange.say("word ")
        elif what == "finishes":
            exchange.finish()
        elif what == "cuts":
            self.world.cloud.failures += 1
            exchange.cut()
        self.go_on(count)

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.0, 2.5, 6.0, 25.0]), silent=st.booleans())
    def time_passes(self, seconds: float, silent: bool) -> None:
        """Seconds pass, in which engines send news once a second, or one hangs."""
        if silent:
            self.world.engines[0].hangs = not self.world.engines[0].hangs
        while seconds > 0:
            self.world.news()
            self.loop.passes(min(1.0, seconds))
            seconds -= 1.0

    @precondition(lambda self: len(self.world.visits) > 9 and not self.world.is_stopping)
    @rule(count=turns)
    def gateway_stops(self, count: int | None) -> None:
        self.world.is_stopping = True
        self.loop.call_soon(self.world.gateway.end_requests)
        self.go_on(count)

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.is_broken = True
        check_safe(self.world)
        if not self.loop._ready:
            check_still(self.world)
        self.is_broken = False

    def teardown(self) -> None:
        """Left alone, every request ends, and nothing is left of it."""
        try:
            if not self.is_broken:
                self.world.wind_up(YES)
                check_settled(self.world)
                self.loop.run_until_complete(self.world.close())
                self.check_loop()
        finally:
            structlog.reset_defaults()
            self.loop.end()

    def check_loop(self) -> None:
        """Check that no task is left, no exception was lost, and no bug was logged."""
        tasks = asyncio.all_tasks(self.loop)
        assert not tasks, f"tasks that are left: {tasks}"
        gc.collect()
        assert self.loop.complaints == []
        bugs = [entry["event"] for entry in self.logs.entries if entry.get("exc_info")]
        assert {"settle_failed"} >= set(bugs), f"bugs in the log: {bugs}"
        assert bugs.count("settle_failed") == self.world.limiter.failures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ADAPTER).mkdir()
    (tmp_path / ADAPTER / "adapter_config.json").write_text("{}")
    return tmp_path


def test_any_history_of_requests(folder: Path):
    class Machine(Settling):
        pass

    Machine.folder = folder
    how = settings(
        max_examples=examples(25),
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=not is_nightly(),
        phases=[Phase.generate, Phase.shrink] if is_nightly() else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with patch("engine.rpc.link.ChannelFactory", WireChannels):
        run_state_machine_as_test(Machine, settings=how)
