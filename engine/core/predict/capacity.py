"""Computes from an engine's sizes how much its memory holds, and how long its steps are predicted to take."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from engine.core.config import CoreConfig
from engine.core.messages.features import StepFeatures
from engine.core.predict.step_time import StepTimeModel

HEADROOM = 0.85
"""Share of an engine's pages, and of the load that a device can serve, that capacity planning uses; the rest is
spare."""
USUAL_CONTEXT = 1024
"""Tokens of context that a decode is taken to have: a median prompt of the Azure conversation trace (Patel et al.,
Splitwise, ISCA 2024, section III)."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of an engine's memory, and the predicted duration of its steps, from which operators are told what the
    engine holds and serves.

    Attributes:
        num_pages, block_size, page_bytes: pages that sequences and adapters can take, tokens of a page, and bytes.
        max_model_len, max_seqs: most tokens of a sequence, and most sequences at once.
        host_pages: pages of the host tier.
        adapter_pages: most pages that adapters take together.
        adapter_bytes_per_rank: bytes of an adapter of rank 1 on all projections.
        host_adapter_bytes: most bytes of packed adapters in host memory.
        free_bytes: host memory that weights leave free for all of these, on a CPU; 0 means that it is not known.
        decode_s: predicted seconds of a step of `max_seqs` decodes; 0 means that it is not known.
        prompt_tokens: longest prompt that is predicted to be computed alone within the TTFT goal of interactive work.
    """

    num_pages: int
    block_size: int
    page_bytes: int
    max_model_len: int
    max_seqs: int
    host_pages: int = 0
    adapter_pages: int = 0
    adapter_bytes_per_rank: int = 0
    host_adapter_bytes: int = 0
    free_bytes: int = 0
    decode_s: float = 0.0
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV fits into all pages of the engine."""
        return self.num_pages * self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def sequences(self, tokens: float) -> int:
        return sequences(self.num_pages, self.block_size, tokens)

    def pages_of_adapter(self, rank: int) -> int:
        """Return the pages that an adapter of a rank takes, at least 1."""
        return max(1, -(-rank * self.adapter_bytes_per_rank // self.page_bytes))


def sequences(pages: int, block_size: int, tokens: float) -> int:
    """Return how many sequences of `tokens` tokens each fit into the share `HEADROOM` of `pages`."""
    return int(HEADROOM * pages / -(-tokens // block_size))


def capacity_of(core: CoreConfig, page_bytes: int, adapter_bytes_per_rank: int, free_bytes: int) -> Capacity:
    return Capacity(
        num_pages=core.usable_pages,
        block_size=core.block_size,
        page_bytes=page_bytes,
        max_model_len=core.max_model_len,
        max_seqs=core.max_seqs,
        host_pages=core.host_pages,
        adapter_pages=core.adapter_pages,
        adapter_bytes_per_rank=adapter_bytes_per_rank,
        host_adapter_bytes=core.host_adapter_bytes,
        free_bytes=free_bytes,
    )


def decode_seconds(model: StepTimeModel, core: CoreConfig) -> float:
    """Return the predicted seconds of a step of `max_seqs` decodes, or of as many as the pages hold, with a context of
    USUAL_CONTEXT tokens each. 0 means that the model has not seen enough steps."""
    context = min(USUAL_CONTEXT, core.max_model_len)
    seqs = min(core.max_seqs, max(1, sequences(core.usable_pages, core.block_size, context)))
    return model.predict(StepFeatures(decode_tokens=seqs, decode_context=seqs * context))


def prompt_within(model: StepTimeModel, core: CoreConfig, seconds: float) -> int:
    """Return the length in tokens of the longest prompt that is predicted to be computed alone within `seconds`, in
    chunks of the token budget. 0 means that the model has not seen enough steps, or that not even one token fits."""
    if not model.is_warm:
        return 0
    left, start = seconds, 0
    while start < core.max_model_len:
        chunk = min(core.token_budget, core.max_model_len - start)
        taken = _chunk_seconds(model, start, chunk)
        if taken > left:
            fits = bisect_right(range(1, chunk), left, key=lambda tokens: _chunk_seconds(model, start, tokens))
            return start + fits
        left, start = left - taken, start + chunk
    return start


def _chunk_seconds(model: StepTimeModel, start: int, tokens: int) -> float:
    return model.predict(StepFeatures(prefill_tokens=tokens, prefill_attention=tokens * start + tokens**2 / 2))
