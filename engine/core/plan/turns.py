"""Turns of decodes: which decodes of heavy parties are left out of a step, so that the tokens of light ones come in
time.

All interactive decodes are in every step while their tokens come in time. A tenant with many answers at once would
otherwise make the tokens of all tenants late. Beside a light party (see `Accounts.imbalance`), the decodes of the heavy
ones therefore take turns: a step has all decodes of light parties, and as many of heavy ones as fit into the longer of

- the slack of the light parties, or the share `BESIDE_PROMPTS` of it while one of them has a prompt to compute
- the time of a step with the light parties' decodes alone, divided by these parties' share of the weights

The latter is what a light party would see if the device's time were divided by weight, so that the heavy ones never
get less than their share. Heavy parties take turns by weight, and within each the row that has waited longest is next.
A step always has one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Set
from operator import itemgetter
from typing import NamedTuple

from engine.core.config import goal_of
from engine.core.fairness.accounts import Imbalance
from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

BESIDE_PROMPTS = 0.5
"""Share of the slack that decodes of heavy parties may take while a light party has a prompt."""


class Turns(NamedTuple):
    """The interactive decodes of a step, where light parties share the lane with heavy ones."""

    heavy: Set[str]
    """The heavy parties."""
    decodes: list[Sequence] | None
    """The decodes that the step has, in their order. None means all of them."""
    slack: float
    """Seconds until a token is late: the first of a light party if decodes are left out, otherwise the first of all."""


def take_turns(state: EngineState, now: float, *, owes_batch: bool) -> Turns | None:
    """Return which interactive decodes the next step has. None means that no party is light. `owes_batch` tells that
    batch work must have a part of the step: decodes of heavy parties then leave room for it."""
    found = state.ledger.accounts.imbalance(Lane.INTERACTIVE, now)
    if found is None:
        return None
    everyone = Turns(found.heavy, None, slack_of(state, now))
    stretch = state.config.scheduling.itl_stretch if owes_batch else 1.0
    running = [seq for seq in state.running.values() if seq.lane is Lane.INTERACTIVE]
    # Usually, this says cheaply that even more decodes than there are would be in time.
    if _Decodes(state, running).seconds * stretch <= BESIDE_PROMPTS * everyone.slack / state.ledger.model.margin:
        return everyone
    light, heavy = _computable(state, found.heavy)
    step = _Decodes(state, light)
    bound = _bound(state, now, found, step.seconds) / stretch
    if _Decodes(state, light + heavy).seconds <= bound:
        return everyone
    chosen = list(light)
    for seq in _by_turn(state, now, heavy):
        step.extend([seq])
        if step.seconds > bound and len(chosen) > len(light):
            break
        chosen.append(seq)
    return Turns(found.heavy, chosen, light_slack(state, now, found.heavy, chosen))


def _computable(state: EngineState, heavy: Set[str]) -> tuple[list[Sequence], list[Sequence]]:
    """Return the interactive decodes that a step may have, of light parties and of `heavy` ones: those that wait for no
    token and no mask."""
    parts: tuple[list[Sequence], list[Sequence]] = [], []
    for seq in state.running.values():
        is_decode = seq.lane is Lane.INTERACTIVE and seq.num_remaining == 1
        if is_decode and not seq.waits_for_token and not state.grammars.masks.blocks(seq):
            parts[seq.request.party in heavy].append(seq)
    return parts


def _bound(state: EngineState, now: float, found: Imbalance, alone: float) -> float:
    """Return the predicted seconds, with masks, to which decodes of heavy parties may extend a step, which takes
    `alone` seconds without them."""
    model, slack = state.ledger.model, light_slack(state, now, found.heavy)
    if _has_prompt(state, found.heavy):
        slack *= BESIDE_PROMPTS
    return max(slack / model.margin, max(alone, model.one_decode) / found.light_share)


def _has_prompt(state: EngineState, heavy: Set[str]) -> bool:
    """Return whether a prompt is to be computed beside the decodes: any that runs, or one of a light party that
    waits. Those of heavy parties that wait may find no slot."""
    if state.waiting.groups(Lane.INTERACTIVE).keys() - heavy:
        return True
    return any(seq.lane is Lane.INTERACTIVE and seq.num_remaining > 1 for seq in state.running.values())


def _by_turn(state: EngineState, now: float, decodes: Iterable[Sequence]) -> list[Sequence]:
    """Return decodes in the order in which they are next. Parties take turns by weight: each row counts for the
    tokens that its party had lately, plus the party's rows before it, divided by weight.
    The rows of a party go by the time that they have waited, and last those whose newest token is being computed."""
    get, parties = state.ledger.accounts.get, defaultdict[str, list[Sequence]](list)
    for seq in decodes:
        parties[seq.request.party].append(seq)
    turns = []
    for party, members in parties.items():
        account = get(Lane.INTERACTIVE, party)
        rows = [(seq.num_pending > 0, _waits_since(state, seq), seq.device_seconds, seq.id, seq) for seq in members]
        had = account.lately(now, state.ledger.turns_window) + sum([is_pending for is_pending, *_ in rows])
        rows.sort(key=itemgetter(0, 1, 2, 3))
        turns += [((had + place) / account.weight, *row) for place, row in enumerate(rows)]
    return [seq for *_, seq in sorted(turns, key=itemgetter(0, 1, 2, 3, 4))]


def _waits_since(state: EngineState, seq: Sequence) -> float:
    """Return when a sequence got its newest token, or arrived, in seconds on the engine's clock. Its goals are left
    out: a row whose caller may wait for a day would never be next."""
    request, goals = seq.request, state.config.interactive
    if seq.num_generated:
        return seq.due - goal_of(request.itl, goals.itl_s)
    return seq.due - goal_of(request.ttft, goals.ttft_s)


class _Decodes:
    """The decodes of a step, and what they are predicted to take."""

    def __init__(self, state: EngineState, decodes: list[Sequence]) -> None:
        self._state = state
        self._count = self._context = self._rows = 0
        self._masks_s = 0.0
        self._adapters: set[AdapterHash] = set()
        self.extend(decodes)

    def extend(self, decodes: list[Sequence]) -> None:
        self._count += len(decodes)
        self._context += sum([len(seq.tokens) for seq in decodes])
        self._masks_s += self._state.ledger.token_prices.masks_s(decodes)
        used = [adapter_hash for seq in decodes if (adapter_hash := seq.request.adapter_hash)]
        if used:
            adapters = self._state.adapters
            self._rows += sum([adapters[adapter_hash].rank for adapter_hash in used])
            self._adapters.update(used)

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step, with the masks of its grammars."""
        model = self._state.ledger.model
        launched = float(model.is_launched(0.0, self._count))
        work = 0.0, self._count, self._context, 0.0, len(self._adapters), self._rows
        return model.predict(StepFeatures(*work, launched=launched)) + self._masks_s


def slack_of(state: EngineState, now: float) -> float:
    """Return the seconds from `now` until the first interactive decode is late (at least 0), or until the step's end is
    late for a request that arrives meanwhile: the lane's ITL goal if several parties use it, and otherwise, without
    decodes, its TTFT goal. The time of the step's masks is left out."""
    goals, left = state.config.interactive, times_left(state, now)
    if state.ledger.accounts.is_shared(Lane.INTERACTIVE, now):
        # Another party's next request should not wait for a long step that one party's prompts fill.
        left.append(goals.itl_s)
    elif not left:
        left.append(max(goals.ttft_s, goals.itl_s))
    return max(0.0, min(left) - state.ledger.token_prices.masks_s(state.running.values()))


def light_slack(state: EngineState, now: float, heavy: Container[str], masked: Iterable[Sequence] = ()) -> float:
    """Return the seconds from `now` until the first decode of a party that is not in `heavy` is late (at least 0), but
    at most the lane's ITL goal, without the time of the masks of those sequences in `masked` that follow grammars."""
    left = min([state.config.interactive.itl_s, *times_left(state, now, heavy)])
    return max(0.0, left - state.ledger.token_prices.masks_s(masked))


def times_left(state: EngineState, now: float, apart_from: Container[str] = ()) -> list[float]:
    """Return, for each running interactive decode, the seconds from `now` until its next token is late, without those
    of the parties in `apart_from` and those that wait for slow masks, whose tokens no shorter step would make earlier.
    A pending token will have been generated just before this step begins, so that the
    next one is due a full ITL goal later."""
    lane, goal = Lane.INTERACTIVE, state.config.interactive.itl_s
    return [
        goal_of(seq.request.itl, goal) if seq.num_pending else seq.due - now
        for seq in state.running.values()
        if seq.lane is lane
        and seq.num_computed + 1 == len(seq.tokens) + seq.num_pending
        and not seq.waits_for_token
        and not seq.masks_slowly
        and (not apart_from or seq.request.party not in apart_from)
    ]
