"""The amounts of work in a step that is being planned."""

from __future__ import annotations

from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import AdapterHash
from engine.core.predict.step_time import StepTimeModel
from engine.core.state.sequence import Sequence


class Work:
    """The work that a plan has granted so far, by which the step's duration is predicted."""

    __slots__ = ("_model", "adapters", "attention", "context", "decodes", "moved", "prefill", "rows", "scored")

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self.prefill = self.decodes = self.context = self.attention = self.rows = self.moved = self.scored = 0.0
        self.adapters: dict[AdapterHash, int] = {}
        """Number of chunks of each adapter."""

    @property
    def is_empty(self) -> bool:
        return not (self.prefill or self.decodes)

    @property
    def features(self) -> StepFeatures:
        return StepFeatures(
            self.prefill,
            self.decodes,
            self.context,
            self.attention,
            float(len(self.adapters)),
            self.rows,
            self.moved,
            self.scored,
            float(self._model.is_launched(self.prefill, self.prefill + self.decodes)),
        )

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step, without masks."""
        return self._model.predict(self.features)

    def add_decode(self, context: int, rank: int, adapter_hash: AdapterHash | None) -> None:
        self.decodes += 1
        self.context += context
        if adapter_hash:
            self.rows += rank
            self.adapters[adapter_hash] = self.adapters.get(adapter_hash, 0) + 1

    def add(self, seq: Sequence, start: int, count: int, rank: int, sign: int) -> None:
        """Add a chunk of `count` tokens from position `start` on, or take it away if `sign` is -1."""
        if count == 1:
            self.decodes += sign
            self.context += sign * (start + 1)
        else:
            self.prefill += sign * count
            self.attention += sign * count * (start + count / 2)
            if not seq.is_scored:
                self.scored += sign * count
        if adapter_hash := seq.request.adapter_hash:
            self.rows += sign * rank * count
            self.adapters[adapter_hash] = self.adapters.get(adapter_hash, 0) + sign
            if not self.adapters[adapter_hash]:
                del self.adapters[adapter_hash]
