"""The time that the work of one lane may take in a step."""

from __future__ import annotations

from math import inf

from engine.core.messages.requests import AdapterHash, Lane
from engine.core.plan.work import Work
from engine.core.predict.step_time import StepTimeModel


class LaneTime:
    """The predicted seconds to which one lane may extend a step. Decodes of the batch lane are checked one by one, at a
    price that is updated incrementally, because a step may have hundreds.

    Attributes:
        before: predicted seconds of the step before the lane's work.
        allowed: maximum to which the lane may extend them.
        limit: like `allowed`, but 0 once a decode no longer fits.
        is_shared: whether the lane is the batch lane and the step has interactive work.
        bounds_decodes: whether the limit holds for decodes, too.
    """

    def __init__(self, lane: Lane, model: StepTimeModel, work: Work, before: float, limit: float) -> None:
        self.lane = lane
        self.before = before
        self.allowed = self.limit = limit
        self.is_shared = lane is not Lane.INTERACTIVE and not work.is_empty
        self.bounds_decodes = lane is not Lane.INTERACTIVE and limit != inf
        self._model, self._work = model, work
        self._spent: float | None = before
        """Predicted seconds of the step so far, updated incrementally for decodes. None means that another change was
        made, so that they must be predicted again."""
        self._price_of_token, self._price_holds_to = 0.0, 0.0

    def predict_again(self) -> None:
        """Note that other work than a decode of this lane was added to the step, or taken away."""
        self._spent, self._price_holds_to = None, 0.0

    def decode_fits(self, context: int, rank: int, adapter_hash: AdapterHash | None) -> bool:
        """Return whether one more decode fits, and count its price. One that does not fit closes the lane, because the
        next one would not fit either. In an empty step, any decode fits."""
        work = self._work
        tokens = work.prefill + work.decodes
        if self.limit <= 0 or not tokens:
            return not tokens
        if self._spent is None:
            self._spent = work.seconds
        if tokens >= self._price_holds_to:
            self._price_next_token(tokens + 1)
        prices = self._model.prices
        cost = prices.decode + prices.context * context + self._price_of_token + self._model.experts_price(tokens + 1)
        if adapter_hash is not None:
            cost += prices.lora_row * rank + (0.0 if adapter_hash in work.adapters else prices.adapter)
        self._spent += cost
        if self._spent > self.limit:
            self.limit = 0.0
        return self.limit > 0

    def _price_next_token(self, tokens: float) -> None:
        """Store the surcharge, in seconds, that the step-time model predicts for the last of `tokens` tokens of this
        step. It holds up to the next knot of the model."""
        self._price_of_token = self._model.token_price(tokens)
        self._price_holds_to = min((knot for knot in self._model.knots if knot >= tokens), default=inf)
