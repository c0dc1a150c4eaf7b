"""Policies with which the engine's own, by lanes, is compared: one queue in a fixed order, and batches that start
together. Engines that serve have none of them; simulations and benchmarks give them to an engine by a `Mode`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.config import CoreConfig
from engine.core.messages.requests import Lane
from engine.core.policy.policies import LanePolicy, Policy, behind, split_running
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence
from engine.core.state.waiting import Key, Order
from engine.engine import Engine
from engine.executor.base import Executor

LANES, CONTINUOUS = "lanes", "continuous"
POLICIES = (LANES, "fcfs", "sjf", "priority")
SCHEDULERS = (CONTINUOUS, "dynamic", "static")
STATIC_WINDOWS = 20
"""Maximum wait of a static batch for more requests, as a multiple of `Mode.window_s`. Without a maximum, the last
requests of a run, too few for a full batch, would never start."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How an engine orders and gathers requests. Raises ValueError, which names the value, if there is no such
    mode."""

    policy: str = LANES
    """lanes: as engines serve. fcfs (first come first served), sjf (shortest job first) and priority: one queue in that
    order under a static token budget."""
    scheduler: str = CONTINUOUS
    """continuous: requests join and leave at any step. static: `max_seqs` requests are gathered and start together, and
    the next ones wait until the last has ended. dynamic: like static, with the requests that came within `window_s`."""
    window_s: float = 0.05
    """Seconds that the first request of a dynamic batch waits for others. A static batch waits `STATIC_WINDOWS` times
    as long."""
    sjf_stretch: float = 1000.0
    """Under `sjf`, a request goes before those that arrive later than this multiple of its predicted device seconds
    after it, however short they are, so that a long one is not starved."""

    def __post_init__(self) -> None:
        for name, allowed in (("policy", POLICIES), ("scheduler", SCHEDULERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    @property
    def order(self) -> Order | None:
        """The place of waiting requests in the only queue. None means that there is a queue for each lane and party."""
        if self.policy == LANES:
            return None
        shortest = partial(sjf_key, stretch=self.sjf_stretch)
        keys: dict[str, Callable[[Sequence], Key]] = {"fcfs": fcfs_key, "sjf": shortest, "priority": priority_key}
        return Order(_only_lane, _only_party, keys[self.policy])

    def make_policy(self) -> Policy:
        policy: Policy = LanePolicy() if self.policy == LANES else QueuePolicy()
        if self.scheduler == CONTINUOUS:
            return policy
        return Batched(policy, self.window_s * (STATIC_WINDOWS if self.scheduler == "static" else 1))


AS_SERVED = Mode()
"""How engines order and gather requests."""


def engine_under(mode: Mode, core: CoreConfig, executor: Executor, **options: Any) -> Engine:
    """Return an engine that serves by a mode. `options` are those of `Engine`."""
    return Engine(EngineState.create(core, mode.order), executor, mode.make_policy(), **options)


def _only_lane(seq: Sequence) -> Lane:
    return Lane.INTERACTIVE


def _only_party(seq: Sequence) -> str:
    return ""


def fcfs_key(seq: Sequence) -> Key:
    return (seq.request.arrival, seq.id)


def sjf_key(seq: Sequence, stretch: float) -> Key:
    """Return the sort key of shortest job first: the arrival time plus `stretch` times the request's predicted device
    seconds, so that only requests which arrive within that time go first."""
    return (seq.request.arrival + stretch * seq.expected_seconds, seq.id)


def priority_key(seq: Sequence) -> Key:
    """Return the sort key of the priority policy: by lane, then by priority (a lower value first), then by arrival."""
    return (float(seq.request.lane), float(seq.request.priority), seq.request.arrival, seq.id)


class QueuePolicy:
    """Serves all requests from one queue in a fixed order, with a token budget per step; decodes go before prefills.
    Only a running sequence that must grow preempts others, the last first."""

    timed, gathers = False, False

    def order_running(self, state: EngineState, lane: Lane) -> tuple[list[Sequence], list[Sequence]]:
        return split_running(seq for seq in state.running.values() if seq.lane is lane)

    def order_ahead(self, state: EngineState, lane: Lane, now: float, prompts: Listed[Sequence]) -> Iterable[Sequence]:
        return ()

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return (seq for queue in state.waiting.groups(lane).values() for seq in queue)

    order_fetches = order_waiting

    def victims(self, state: EngineState, needy: Sequence) -> list[Sequence]:
        return behind(state, needy) if needy.id in state.running else []


class Batched:
    """Wraps a policy for the static and dynamic schedulers: once no sequence runs and `may_form_batch` permits it, a
    batch starts together, including prompts that get no tokens yet. Steps are limited only by tokens."""

    def __init__(self, policy: Policy, window_s: float) -> None:
        self._policy, self._window_s = policy, window_s
        self.timed, self.gathers = False, True
        self.order_running = policy.order_running
        self.order_ahead = QueuePolicy().order_ahead
        self.order_fetches = policy.order_fetches
        self.victims = policy.victims

    def order_waiting(self, state: EngineState, lane: Lane, now: float) -> Iterable[Sequence]:
        return self._policy.order_waiting(state, lane, now) if may_form_batch(state, now, self._window_s) else ()


def may_form_batch(state: EngineState, now: float, window_s: float) -> bool:
    """Return whether a new batch may start at `now`: nothing runs, and either `max_seqs` requests wait or the oldest
    one has waited for `window_s`."""
    if state.running or not len(state.waiting):
        return False
    oldest = min(queue[0].request.arrival for lane in state.waiting.lanes.values() for queue in lane.values())
    return len(state.waiting) >= state.config.max_seqs or now - oldest >= window_s
