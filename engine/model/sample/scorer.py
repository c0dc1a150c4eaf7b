"""Computes logprobs of prompt tokens after a step has computed its residual stream, in slices of `SLICE_ROWS` rows,
because the logits of a whole chunk would take gigabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.messages.prompt_logprobs import row_bytes
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import PromptRows
from engine.model.batch.results import ResultBlocks, StepResults
from engine.model.batch.rows import ScoredChunk
from engine.model.sample.draws import ranked
from lora_kernels.pinned import upload
from lora_kernels.tokens import TrainedTokens

SLICE_ROWS = 128
"""Rows whose logits exist at the same time."""
RESULT_BYTES = 1 << 20
"""Size of a block for the results of a step. Those of 8,192 rows with 5 alternatives take 0.4 MB; where a step has
more, the host waits for the copy."""

NAN_BITS = 0x7FC00000
"""Bits of NaN in fp32, as an int32."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Logits = Callable[[Tensor, TrainedTokens | None, Longs], Tensor]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request whose prompt logprobs are wanted: its prompt ids (int32 [num_prompt]), its number of alternatives, the
    first row whose logprob is wanted, and whether the logprobs end the request, because it generates no tokens."""

    ids: Ints
    width: int
    first: int
    is_all: bool


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of a step that predict prompt tokens of a request: from `first` to before `end`, the first of which is at
    position `start` of the sequence. There may be none."""

    request_id: str
    prompt: _Prompt
    first: int
    end: int
    start: int

    @property
    def targets(self) -> Ints:
        """Return the ids of the tokens that the rows predict, int32 [end - first]."""
        return self.prompt.ids[self.start + 1 : self.start + 1 + self.end - self.first]


@dataclass(frozen=True, slots=True)
class Scores:
    """Prompt logprobs of one step, while they are copied: `host` is int32 [num_rows, 2 + 2 * width], the rows of all
    `spans` in the format of prompt_logprobs.py, with the largest width."""

    spans: tuple[_Span, ...]
    host: Tensor
    results: StepResults

    def read(self) -> dict[str, PromptRows | None]:
        """Return the step's logprobs of prompt tokens by request id; None for those of logits that are NaN or +inf. The
        device must have finished the step."""
        self.results.check()
        ends = np.cumsum([0, *(span.end - span.first for span in self.spans)]).tolist()
        rows = self.host.numpy()
        parts = zip(self.spans, pairwise(ends), strict=True)
        return {span.request_id: _prompt_rows(span, rows[first:end]) for span, (first, end) in parts}


def _prompt_rows(span: _Span, rows: Ints) -> PromptRows | None:
    if np.isnan(rows[:, 0].view(np.float32)).any():
        return None
    return PromptRows(span.request_id, span.start, _cut(rows, span.prompt.width).tobytes())


class PromptScorer:
    """Computes the logprobs of prompt tokens (`prompt_logprobs`) for running requests. `logits` is the final norm and
    head, given rows of the residual stream, the trained tokens and the rows' numbers."""

    def __init__(self, logits: Logits, vocab_size: int, device: torch.device) -> None:
        self._logits = logits
        self._vocab_size = vocab_size
        self._device = device
        self._prompts: dict[str, _Prompt] = {}
        self._results = ResultBlocks(RESULT_BYTES, device)

    def add(self, request_id: str, params: SamplingParams, prompt_ids: Sequence[int], num_scored: int = 0) -> None:
        """Add a request for logprobs of its prompt to the scorer, or begin it anew after a preemption. The caller has
        the logprobs of its first `num_scored` rows already, which are not computed again."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        width = min(params.prompt_logprobs or 0, self._vocab_size)
        self._prompts[request_id] = _Prompt(ids, width, num_scored, not params.max_tokens)

    def remove(self, request_id: str) -> None:
        """Drop a request's prompt from the scorer of prompt logprobs. Does nothing for a request that was not added."""
        self._prompts.pop(request_id, None)

    def start(
        self, residual: Tensor, chunks: Iterable[ScoredChunk], tokens: TrainedTokens | None = None
    ) -> Scores | None:
        """Compute the logprobs of prompt tokens that the rows of `chunks` predict from `residual` [num_rows,
        hidden_size], and start to copy them to the host. `tokens` are the trained tokens. None means that there are no
        entries."""
        spans = [self._span(chunk) for chunk in chunks]
        kept = [span for span, has_entry in spans if has_entry]
        if not kept:
            return None
        width = max(span.prompt.width for span in kept)
        rows = np.concatenate([np.arange(span.first, span.end) for span in kept])
        targets = np.concatenate([span.targets for span in kept])
        packed = self._packed(residual, np.stack((rows, targets)).astype(np.int64), width, tokens)
        results = self._results.begin()
        return Scores(tuple(kept), results.download(packed), results)

    def warm_up(self, dtype: torch.dtype, hidden_size: int, widths: Iterable[int]) -> None:
        """Compute prompt log-probabilities of a row of zeros once for each of `widths`, numbers of alternatives per
        token (`SamplingParams.prompt_logprobs`), so that no kernel is compiled while requests wait."""
        residual = torch.zeros(1, hidden_size, dtype=dtype, device=self._device)
        for width in widths:
            self.add("warm-up", SamplingParams(prompt_logprobs=min(width, self._vocab_size)), (0, 0))
            self.start(residual, (ScoredChunk("warm-up", 0, 1, 0, is_last=False),))
        self.remove("warm-up")

    def _span(self, chunk: ScoredChunk) -> tuple[_Span, bool]:
        """Return the rows of a chunk that predict prompt tokens whose logprobs are wanted, and whether the chunk has an
        entry in the step's result."""
        prompt = self._prompts[chunk.request_id]
        start = max(chunk.start, prompt.first)
        stop = min(chunk.start + chunk.end - chunk.first, len(prompt.ids) - 1)
        first = chunk.first + start - chunk.start
        span = _Span(chunk.request_id, prompt, first, first + max(0, stop - start), start)
        return span, stop > start or (prompt.is_all and chunk.is_last)

    def _packed(self, residual: Tensor, numbers: Longs, width: int, tokens: TrainedTokens | None) -> Tensor:
        """Return logprobs of prompt tokens in the format of prompt_logprobs.py, int32 [num_rows, 2 + 2 * width].
        `numbers` is int64 [2, num_rows]: rows of the residual stream, and the tokens that they predict. `width` is the
        number of alternatives."""
        pack = pack_on_gpu if residual.is_cuda else pack_on_cpu
        uploaded, parts = upload(numbers, self._device), []
        for first in range(0, numbers.shape[1], SLICE_ROWS):
            rows, ids = uploaded[:, first : first + SLICE_ROWS]
            x, on_host = residual.index_select(0, rows), numbers[0, first : first + SLICE_ROWS]
            parts.append(pack(self._logits(x, tokens, on_host), ids, width))
        return torch.cat(parts) if parts else residual.new_empty(0, row_bytes(width) // 4, dtype=torch.int32)


def slice_bytes(vocab_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a GPU's memory that prompt logprobs take: a slice of SLICE_ROWS rows of logits, the
    comparisons for their ranks, and the results."""
    return SLICE_ROWS * vocab_size * (dtype.itemsize + 1) + RESULT_BYTES


def pack_on_cpu(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Return logprobs of the tokens `ids` (int64 [num_rows]) and of the `width` likeliest ones, in the format of
    prompt_logprobs.py: int32 [num_rows, 2 + 2 * width], NaN where a logit is NaN or +inf."""
    scores = logits.float()
    top = ranked(scores, width)
    values = scores.gather(1, torch.cat((ids[:, None], top), 1))
    ranks = _ranks(scores, values[:, :1])
    total = scores.logsumexp(-1, keepdim=True)
    bits = (values - torch.where(total.isfinite(), total, torch.nan)).view(torch.int32)
    return torch.cat((bits[:, :1], ranks, top.int(), bits[:, 1:]), 1)


def pack_on_gpu(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Return the packed logprobs of prompt tokens that `pack_on_cpu` returns, computed by the kernels that also give
    the logprobs of sampled tokens."""
    # Imported here: a machine without CUDA may have no triton.
    from lora_kernels.gpu.triton_logprobs import logprobs

    rows = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    packed = logprobs(logits, rows, ids, width)
    packed[:, 0].masked_fill_(~logits.amax(-1).isfinite(), NAN_BITS)
    return torch.cat((packed[:, :1], _ranks(logits, logits.gather(1, ids[:, None])), packed[:, 1:]), 1)


def _ranks(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return 1 plus the number of scores in each row that are higher than the chosen one, int32 [num_rows, 1]."""
    return (scores > chosen).sum(-1, keepdim=True, dtype=torch.int32) + 1


def _cut(rows: Ints, width: int) -> Ints:
    """Return packed rows (int32 [num_rows, 2 + 2 * w]) with only the first `width` of their w alternatives."""
    has = rows.shape[1] // 2 - 1
    return np.concatenate((rows[:, : 2 + width], rows[:, 2 + has : 2 + has + width]), axis=1)
