"""Masks that take too long for a step: whose are computed next, concurrently with the steps.

A mask has the tokens that a request's grammar allows next. Usually the executor computes it within the step, in 20 to
100 microseconds. Where it would take longer, the request's sequence is left out of the steps until its mask is there:

    running --StepResult.masking--> waiting --StepPlan.masks--> under way --MaskReady--> running

Only that sequence waits. Tenants take turns by the device time that they were charged, and masks are charged like
device time. While steps compute something, masks are computed during half of the time at most, because they take a core
that steps need on a CPU.
"""

from __future__ import annotations

from collections.abc import Container

from engine.core.state.sequence import Sequence

SLICE_S = 0.01
"""Seconds of masks, as predicted, that a plan has the executor compute: about one step on a CPU. At least one mask is
computed, and the next ones are chosen when it is done, so that no tenant waits behind another's whole queue."""
SMOOTHING = 0.25
"""Weight of the newest mask in the predicted seconds of a sequence's first slow mask."""


class SlowMasks:
    """The running sequences that wait for slow masks, and the masks under way. Only `commit/step.py`, `commit/masks.py`
    and `commit/apply.py` change them."""

    def __init__(self) -> None:
        self.waiting: dict[str, Sequence] = {}
        """Running sequences whose next mask is neither computed nor under way, by request id."""
        self.under_way: dict[str, Sequence] = {}
        """Sequences whose mask the executor is computing, by request id, including those that have ended or were
        preempted since: the executor answers each of them."""
        self._seconds = SLICE_S
        """Predicted seconds of a sequence's first slow mask: a moving average."""
        self._rests_until = 0.0
        """Time on the engine's clock until which no mask is begun while steps compute something."""

    def blocks(self, seq: Sequence) -> bool:
        """Return whether a running sequence must be left out of a step: its mask is not there or, as the mask after a
        pending token cannot be there either, it has a pending token."""
        if not seq.masks_slowly:
            return False
        return seq.num_pending > 0 or seq.id in self.waiting or self.under_way.get(seq.id) is seq

    def choose(self, now: float, apart_from: Container[str], *, computes: bool) -> tuple[str, ...]:
        """Return the ids of the sequences whose masks a plan has the executor compute: the first ones by lane, device
        time of tenant and class, and due time, until they are predicted to take `SLICE_S` seconds. There are none while
        masks are under way or, if the plan `computes` chunks, while masks rest. Changes nothing."""
        if not self.waiting or self.under_way or (computes and now < self._rests_until):
            return ()
        chosen: list[str] = []
        seconds = 0.0
        for seq in sorted((seq for name, seq in self.waiting.items() if name not in apart_from), key=_turn):
            chosen.append(seq.id)
            seconds += seq.mask_seconds or self._seconds
            if seconds >= SLICE_S:
                break
        return tuple(chosen)

    def wait(self, seq: Sequence) -> None:
        """Let a running sequence wait for a mask, unless its mask is under way."""
        seq.masks_slowly = True
        if self.under_way.get(seq.id) is not seq:
            self.waiting[seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        """Record that a sequence has stopped running. If its mask is under way, the executor still answers."""
        self.waiting.pop(seq.id, None)

    def begin(self, request_id: str) -> None:
        self.under_way[request_id] = self.waiting.pop(request_id)

    def end(self, request_id: str, seconds: float, now: float) -> Sequence | None:
        """Record that the executor has answered for a mask, which took `seconds` of a core's time, and return its
        sequence; None if no mask of this id is under way."""
        seq = self.under_way.pop(request_id, None)
        if seq is not None:
            seq.mask_seconds = seconds
            self._seconds += SMOOTHING * (seconds - self._seconds)
            self._rests_until = max(now, self._rests_until) + seconds
        return seq


def _turn(seq: Sequence) -> tuple[int, float, float, float, str]:
    account = seq.account
    return seq.request.lane, account.tenant.served, account.served, seq.due, seq.id
