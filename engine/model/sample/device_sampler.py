"""The sampler for a GPU: sampling parameters, counters and sampled tokens stay on the device, where kernels update
them. One stream makes it safe to reuse slots; the host reads tokens later from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.messages.requests import SamplingParams, TokenLogprobs
from engine.core.messages.step import SampledToken
from engine.model.batch.results import ALIGNMENT, ResultBlocks, StepResults
from engine.model.sample.masks import TokenMasks, num_words
from engine.model.sample.sampler import (
    GREEDY_BELOW,
    NO_PROPOSALS,
    Proposals,
    TokenCounts,
    bias_of,
    has_filters,
    stops_of,
)
from lora_kernels.gpu.triton_logprobs import logprobs
from lora_kernels.gpu.triton_sampling import MAX_VOCAB, SampledRows, SamplingTiles, sample
from lora_kernels.pinned import HostBlock, upload
from lora_kernels.sampling_words import DRAWN, FILTERED, GREEDY, SlotWords, pack_edits

TOP_LOGPROBS = 20
"""Number of likeliest tokens per row for which result blocks have room: the most that OpenAI's API allows."""
ROW_BYTES = 8 + 4 * (1 + 2 * TOP_LOGPROBS)
ALIGN = 4
"""Slots and lines of a `RowUploads` block are each padded to a multiple of this many int32, which are 16 bytes."""
EVERY_TOKEN = -1
"""Value that a row of `RowUploads` has in place of the index of its mask if the row allows every token."""


class RowUploads:
    """Uploads the sampler slots, mask lines and grammar masks of up to `max_rows` sampled rows in one copy to a block
    at a fixed address. Of two blocks on the host, one is filled while the other is copied."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._room, self._words = -(-max_rows // ALIGN) * ALIGN, num_words(vocab_size)
        size = self._room * (2 + self._words)
        self._block = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = cycle((HostBlock(size, device), HostBlock(size, device)))

    def upload(self, slots: npt.NDArray[np.int32], masks: TokenMasks | None) -> SampledRows:
        """Start to copy the rows' slots (int32 [num_rows]) and masks (None: every row allows every token). Does not
        wait for a GPU, on which the result is valid for kernels that are launched before the next upload."""
        rows, room, host = len(slots), self._room, next(self._hosts)
        host.wait()
        numbers, used = host.numbers.numpy(), 2 * room
        numbers[:rows] = slots
        lines = numbers[room : room + rows]
        lines[:] = EVERY_TOKEN
        if masks is not None:
            lines[list(masks.rows)] = np.arange(len(masks.rows))
            used += masks.words.size
            numbers[2 * room : used] = masks.words.ravel()
        host.send(self._block, used)
        by_line = self._block[2 * room :].view(room, self._words)
        return SampledRows(self._block[:rows], self._block[room : room + rows], by_line)


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Logprobs of a step's sampled tokens that are being copied to the host."""

    packed: Tensor
    """int32 [num_wanted, 1 + 2 * width]. See `triton_logprobs.logprobs`."""
    rows: tuple[int, ...]
    """Row of the logits for each row of `packed`."""
    widths: tuple[int, ...]
    """Number of likeliest tokens that each row's request asked for."""

    def read(self) -> dict[int, TokenLogprobs]:
        """Return logprobs of the chosen and of the likeliest tokens, by row of the logits. The copy to the host must be
        complete."""
        ints = self.packed.numpy()
        floats, width = ints.view(np.float32), (ints.shape[1] - 1) // 2
        found = {}
        for i, (row, number) in enumerate(zip(self.rows, self.widths, strict=True)):
            ids, values = ints[i, 1 : 1 + width].tolist(), floats[i, 1 + width :].tolist()
            top = tuple(zip(ids, values, strict=True))[:number]
            found[row] = TokenLogprobs(float(floats[i, 0]), top)
        return found


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """The tokens of one step. Kernels of the same stream may read `ids` at once; the host has the tokens later."""

    ids: Tensor
    """int64 [len(request_ids)], on the device."""
    ready: torch.cuda.Event | None
    """Event after the kernels, which also store to host memory, and after the copy of logprobs. None means that there
    is nothing to wait for."""
    request_ids: tuple[str, ...]
    host_ids: Tensor
    """The same tokens in host memory, in unsound rows as -1 minus the token (see `sample`)."""
    host_logprobs: HostLogprobs | None
    """None means that no request wants logprobs."""
    results: StepResults
    """The block with `host_ids` and `host_logprobs`, which later steps use again."""

    def to_host(self) -> list[SampledToken]:
        """Wait until host memory has the tokens. Return one token for each of `request_ids`, with its logprobs if
        requested. Raises RuntimeError if later steps have overwritten them."""
        if self.ready is not None:
            self.ready.synchronize()
        self.results.check()
        tokens = self.host_ids.tolist()
        found = {} if self.host_logprobs is None else self.host_logprobs.read()
        pairs = enumerate(zip(self.request_ids, tokens, strict=True))
        return [SampledToken(name, max(code, -1 - code), found.get(row), code >= 0) for row, (name, code) in pairs]


@dataclass(frozen=True, slots=True)
class _SamplerEntry:
    """A request's slot, whether it draws with top-k, top-p or min-p, how many likeliest tokens its logprobs list (None
    means no logprobs), and the device memory of the slot's `edits` (bans, biases) and `seen` (counts)."""

    slot: int
    is_filtered: bool
    logprobs: int | None
    edits: Tensor | None
    seen: Tensor | None


class DeviceSampler:
    """A `SlotSampler` for CUDA tensors, and under Triton's interpreter also for CPU tensors. Raises ValueError if the
    vocabulary is too large for the kernels, whose block sizes are `tiles`."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: tuple[int, ...] = (),
        max_seqs: int = 64,
        tiles: SamplingTiles | None = None,
    ) -> None:
        if vocab_size >= MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size} is larger than {MAX_VOCAB - 1}")
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_ids = eos_token_ids
        """Tokens banned, like a request's own stop tokens, until the request has `min_tokens` tokens."""
        self.last_tokens = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        """int64 [max_seqs], at a fixed address. The last sampled token of each slot."""
        self._rows = RowUploads(max_seqs, vocab_size, device)
        self._words = torch.zeros(max_seqs, len(SlotWords._fields), dtype=torch.int64, device=device)
        self._tiles = tiles or SamplingTiles()
        self._results = ResultBlocks(max_seqs * ROW_BYTES + ALIGNMENT, device)
        self._entries: dict[str, _SamplerEntry] = {}
        self._free = list(range(max_seqs - 1, -1, -1))

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Add a request, or resume it: take a free slot and upload the parameters and, for penalties, the token counts.
        The first `num_prompt` of `tokens` are the prompt, the others were generated. Raises ValueError if no slot is
        free."""
        if not self._free:
            raise ValueError(f"request {request_id} finds every one of {len(self._words)} slots taken")
        stops, (bias_ids, bias) = (
            stops_of(params, self.eos_token_ids, self.vocab_size),
            bias_of(params, self.vocab_size),
        )
        forbidden = np.full(len(stops), -np.inf, dtype=np.float32)
        edits = self._upload(pack_edits(np.append(stops, bias_ids), np.append(forbidden, bias)))
        seen = self._upload_seen(tokens, num_prompt) if params.has_penalties else None
        words = SlotWords(
            kind=self._kind(params),
            seed=params.seed,
            position=len(tokens),
            num_generated=len(tokens) - num_prompt,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_k=params.top_k if params.top_k < self.vocab_size else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            num_stops=len(stops),
            num_edits=len(stops) + len(bias_ids),
            edits=edits.data_ptr(),
            seen=0 if seen is None else seen.data_ptr(),
        )
        slot = self._free.pop()
        self._words[slot] = self._upload(words.pack())
        self._entries[request_id] = _SamplerEntry(slot, words.kind == FILTERED, params.logprobs, edits, seen)

    def remove(self, request_id: str) -> None:
        """Drop a request's sampling state and free its slot. Raises KeyError if the request is not known."""
        self._free.append(self._entries.pop(request_id).slot)

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return each request's sampler slot, its index in `last_tokens`, int32 [len(request_ids)]. A request keeps its
        slot from `add` to `remove`."""
        return np.array([self._entries[request_id].slot for request_id in request_ids], dtype=np.int32)

    def start(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None = None,
        proposals: Proposals = NO_PROPOSALS,
    ) -> DeviceSample:
        """Start to choose the next token of each request, to add it to its history on the device, and to store it and
        logprobs in host memory. Raises KeyError for an unknown request, ValueError for proposals.

        Args:
            logits: [len(request_ids), vocab_size]; not changed.
            masks: None means that all tokens are allowed. Logprobs ignore masks.
        """
        if proposals:
            raise ValueError(f"the sampler of a GPU draws one token for a request, and {len(proposals)} have proposals")
        entries = [self._entries[request_id] for request_id in request_ids]
        rows = self._rows.upload(self.slots(request_ids), masks)
        any_filters = any(entry.is_filtered for entry in entries)
        results = self._results.begin()
        host_ids = results.take(len(entries), torch.int64)
        ids = sample(logits, rows, self._words, self.last_tokens, host_ids, any_filters, self._tiles)
        host_logprobs = self._start_logprobs(logits, ids, entries, results)
        ready = torch.cuda.Event() if ids.is_cuda else None
        if ready is not None:
            ready.record()
        return DeviceSample(ids, ready, tuple(request_ids), host_ids, host_logprobs, results)

    def _kind(self, params: SamplingParams) -> int:
        if params.temperature < GREEDY_BELOW:
            return GREEDY
        return FILTERED if has_filters(params) else DRAWN

    def _start_logprobs(
        self, logits: Tensor, ids: Tensor, entries: list[_SamplerEntry], results: StepResults
    ) -> HostLogprobs | None:
        wanted = [(row, entry.logprobs) for row, entry in enumerate(entries) if entry.logprobs is not None]
        if not wanted:
            return None
        rows, widths = zip(*wanted, strict=True)
        width = min(max(widths), self.vocab_size)
        packed = logprobs(logits, self._upload(np.array(rows, dtype=np.int32)), ids, width)
        return HostLogprobs(results.download(packed), rows, widths)

    def _upload_seen(self, tokens: Sequence[int], num_prompt: int) -> Tensor:
        """Return a request's token counts on the device, int32 [vocab_size]: for each of `tokens`, 1 plus twice the
        number of times it was generated; 0 for all other tokens."""
        known = TokenCounts.of(tokens[:num_prompt], tokens[num_prompt:])
        seen = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
        seen[self._upload(known.ids)] = self._upload(2 * known.counts.astype(np.int32) + 1)
        return seen

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return upload(array, self.device)
