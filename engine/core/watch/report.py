"""Reports on lanes, tenants and load for operators, routers and simulations: plain numbers read from the engine
state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from engine.core.commit.admission import predicted_wait
from engine.core.memory.adapters import HostCopy
from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import AdapterHash, Lane, LaneMode
from engine.core.state.engine_state import EngineState


@dataclass(frozen=True, slots=True)
class LaneReport:
    lane: Lane
    running: int
    waiting: int
    oldest_wait_s: float
    """Seconds since the arrival of the oldest waiting request; 0 if none waits."""
    ttft_attainment: float
    itl_attainment: float
    device_seconds: float
    gap: float
    """Largest difference between the virtual counters (see `TenantReport.served`) of the tenants that wait in the lane,
    in device seconds divided by weight."""
    bound: float
    """Theoretical upper bound of `gap`, in device seconds divided by weight (see `TokenPrices.bound`)."""
    mode: LaneMode
    preemptions: int
    """Preemptions of the lane's requests since the engine started."""


@dataclass(frozen=True, slots=True)
class TenantReport:
    lane: Lane
    tenant: str
    running: int
    waiting: int
    device_seconds: float
    served: float
    """The tenant's virtual counter: device seconds divided by weight, raised when the tenant returns after a pause."""


def lane_reports(state: EngineState, now: float) -> list[LaneReport]:
    return [_lane(state, lane, now) for lane in Lane]


def _lane(state: EngineState, lane: Lane, now: float) -> LaneReport:
    ledger, waiting = state.ledger, [seq for seq in state.waiting if seq.request.lane is lane]
    return LaneReport(
        lane=lane,
        running=sum(seq.request.lane is lane for seq in state.running.values()),
        waiting=len(waiting),
        oldest_wait_s=max((now - seq.request.arrival for seq in waiting), default=0.0),
        ttft_attainment=ledger.ttft[lane].value,
        itl_attainment=ledger.itl[lane].value,
        device_seconds=ledger.busy[lane],
        gap=ledger.accounts.gap(lane, {seq.request.party for seq in waiting}),
        bound=ledger.token_prices.bound(state.config.max_seqs),
        mode=state.waiting.modes[lane],
        preemptions=state.counters.preempted_in[lane],
    )


def tenant_reports(state: EngineState) -> list[TenantReport]:
    running = Counter((seq.request.lane, seq.request.tenant) for seq in state.running.values())
    waiting = Counter((seq.request.lane, seq.request.tenant) for seq in state.waiting)
    return [
        TenantReport(
            *key,
            running[key],
            waiting[key],
            device_seconds=sum(account.seconds for account in tenant.parties.values()),
            served=tenant.served,
        )
        for key, tenant in state.ledger.accounts.tenants.items()
    ]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the engine is, for routers that choose among several. Pairs are for the interactive and the batch
    lane."""

    waiting: tuple[int, int]
    running: tuple[int, int]
    free_pages: int
    """Pages that are free or hold only cached prefixes."""
    lane_wait_s: tuple[float, float]
    """Predicted seconds until a request that arrives now begins to run, by lane."""
    wait_s: float
    """Predicted seconds until the first token of an interactive request with an empty prompt that arrives now."""
    prompt_token_s: float
    """Predicted device time of one token of a long prompt, in seconds."""
    decoding: int
    """Running interactive requests that have their first token."""
    decode_step_s: float
    """Predicted seconds of a step that computes one decode more than now run, and no prompt."""
    prompt_share: float
    """Share of the last seconds in which the device computed prompts."""


def load_report(state: EngineState) -> LoadReport:
    """Return how busy the engine is now. The cost is one pass over the running requests."""
    pending, decodes, context, decoding = 0, 1, 1, 0
    for seq in state.running.values():
        interactive = seq.lane is Lane.INTERACTIVE
        if seq.num_remaining <= 1:
            decodes, context, decoding = decodes + 1, context + seq.num_tokens, decoding + interactive
        elif interactive:
            pending += seq.num_remaining
    running = Counter(seq.request.lane for seq in state.running.values())
    interactive_wait, batch_wait = (predicted_wait(state, lane) for lane in Lane)
    prompt_token_s = _prompt_token_s(state)
    prompts_s = prompt_token_s * (pending + state.waiting.num_tokens[Lane.INTERACTIVE])
    has_slots = running[Lane.INTERACTIVE] + state.waiting.count(Lane.INTERACTIVE) < state.config.max_seqs
    return LoadReport(
        waiting=(state.waiting.count(Lane.INTERACTIVE), state.waiting.count(Lane.BATCH)),
        running=(running[Lane.INTERACTIVE], running[Lane.BATCH]),
        free_pages=len(state.pool.free) + state.prefix.num_idle,
        lane_wait_s=(interactive_wait, batch_wait),
        wait_s=prompts_s if has_slots else max(prompts_s, interactive_wait),
        prompt_token_s=prompt_token_s,
        decoding=decoding,
        decode_step_s=state.ledger.model.predict(StepFeatures(decode_tokens=decodes, decode_context=context)),
        prompt_share=state.ledger.prompts.share(state.steps.now),
    )


def _prompt_token_s(state: EngineState) -> float:
    """Return the predicted device seconds of one prompt token in a step that a prompt fills up to the token budget.
    Before the step-time model is warm, return the smoothed price of recent prompt tokens. Afterwards that price would
    mislead: where only the ends of prompts are computed, because the KV before them came from another engine, a token
    pays for reading a step's weights and costs up to ten times as much."""
    tokens, ledger = state.config.token_budget, state.ledger
    launched = float(ledger.model.is_launched(tokens, tokens))
    attention = tokens * ledger.prompts.context
    step = StepFeatures(prefill_tokens=tokens, prefill_attention=attention, launched=launched)
    return ledger.model.predict(step) / tokens or ledger.token_prices.of(1, 0)


def adapters_in_memory(state: EngineState) -> tuple[Set[AdapterHash], Set[AdapterHash]]:
    """Return the adapters in device memory and those with a copy in host memory. The cost is one pass over all."""
    adapters = state.adapters
    on_device = {adapter_hash for adapter_hash, adapter in adapters.items() if adapter.pages}
    return on_device, {name for name, adapter in adapters.items() if adapter.host is HostCopy.PRESENT}
