"""Samples the next tokens from logits in the order of vLLM's sampler: grammar, `min_tokens`, logit bias, penalties,
then argmax or temperature, min-p, top-k, top-p and a draw."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.messages.requests import SamplingParams, TokenLogprobs
from engine.core.messages.step import SampledToken
from engine.core.plan.proposals import verified
from engine.model.sample.draws import Filters, draw, ranked, uniforms
from engine.model.sample.masks import TokenMasks
from engine.model.sample.soundness import sound_rows

# A draw looks up one uniform number, a hash of (seed, position) alone: given the same logits, a preempted, resumed or
# batched sequence repeats itself exactly.

GREEDY_BELOW = 1e-5
"""Requests with a temperature below this are greedy, because dividing by it would overflow."""
SEED_MASK = 2**64 - 1

Proposals = Mapping[str, tuple[int, ...]]
"""Maps the id of a request to its proposals, the tokens that its rows after the first were computed for."""
NO_PROPOSALS: Proposals = MappingProxyType({})

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class TokenCounts:
    """The counts that a request's sampling penalties need: the distinct tokens of its sequence (`ids`) and how often
    each was generated (`counts`), in arrays that grow. `places` maps a token to its index in the arrays."""

    ids: Int64Array
    counts: npt.NDArray[np.float32]
    places: dict[int, int]

    @classmethod
    def of(cls, prompt: Sequence[int], generated: Sequence[int]) -> TokenCounts:
        ids = np.unique(np.asarray([*prompt, *generated], dtype=np.int64))
        counts = np.zeros(len(ids), dtype=np.float32)
        np.add.at(counts, np.searchsorted(ids, np.asarray(generated, dtype=np.int64)), 1)
        return cls(ids, counts, {int(token): place for place, token in enumerate(ids)})

    def add(self, token: int) -> None:
        place = self.places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids = np.append(self.ids, token)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[place] += 1


@dataclass(slots=True)
class _SamplerRow:
    """The sampler's state of one request."""

    params: SamplingParams
    position: int
    """Index of the next token in the sequence."""
    num_generated: int
    seen: TokenCounts | None
    """Token counts for the penalties. None means that the request has no penalties."""
    banned: Int64Array
    """Tokens that must not be sampled before `min_tokens` tokens are generated."""
    bias_ids: Int64Array
    bias: npt.NDArray[np.float32]

    @property
    def is_random(self) -> bool:
        return self.params.temperature >= GREEDY_BELOW

    @property
    def is_banned(self) -> bool:
        return self.num_generated < self.params.min_tokens

    @property
    def is_plain(self) -> bool:
        """Return whether the next token is the argmax of the unchanged logits, unless a grammar masks them."""
        return not (self.is_random or self.seen or len(self.bias_ids) or self.is_banned)

    def append(self, token: int) -> None:
        self.position += 1
        self.num_generated += 1
        if self.seen:
            self.seen.add(token)


@dataclass(slots=True)
class Sampler:
    """Samples at once: turns a step's logits into tokens on the host. Keeps the histories of its requests."""

    vocab_size: int
    """Columns of the logits. Stop tokens and biased tokens beyond it cannot occur and are ignored."""
    device: torch.device
    """Device of the logits."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens banned, like a request's own stop tokens, until the request has `min_tokens` tokens."""
    _rows: dict[str, _SamplerRow] = field(default_factory=dict, init=False, repr=False)

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Add a request to the sampler, or resume it after a preemption. `tokens` are its known tokens, the
        `num_prompt` of its prompt first."""
        bias_ids, bias = bias_of(params, self.vocab_size)
        self._rows[request_id] = _SamplerRow(
            params=params,
            position=len(tokens),
            num_generated=len(tokens) - num_prompt,
            seen=TokenCounts.of(tokens[:num_prompt], tokens[num_prompt:]) if params.has_penalties else None,
            banned=stops_of(params, self.eos_token_ids, self.vocab_size),
            bias_ids=bias_ids,
            bias=bias,
        )

    def remove(self, request_id: str) -> None:
        """Drop a request's history. Raises KeyError if the request is not known."""
        del self._rows[request_id]

    def sample(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None = None,
        proposals: Proposals = NO_PROPOSALS,
    ) -> list[SampledToken]:
        """Choose the next tokens of each request, add them to its history, and return them, with logprobs of the
        unchanged logits where requested.

        Args:
            logits: [len(request_ids), vocab_size]; not changed.
            masks: None means that all tokens are allowed.
            proposals: request id -> the tokens that its further rows were computed for. Tokens are chosen up to the
                first that differs. Such a request has no penalties.
        """
        rows = list(self._follow(request_ids)) if proposals else [self._rows[name] for name in request_ids]
        tokens = self._choose(logits, rows, masks)
        logprobs = _logprobs(logits, [row.params.logprobs for row in rows], tokens)
        results = zip(request_ids, tokens.tolist(), logprobs, sound_rows(logits), strict=True)
        sampled = [SampledToken(*result) for result in results]
        if proposals:
            sampled = verified(sampled, proposals)
        for one in sampled:
            self._rows[one.request_id].append(one.token)
        return sampled

    def _follow(self, request_ids: Sequence[str]) -> Iterator[_SamplerRow]:
        """Yield, for each row, the state that its request will have once the tokens of the request's earlier rows are
        appended: a request with proposals has several rows, each for the next position."""
        before: Counter[str] = Counter()
        for request_id in request_ids:
            row, count = self._rows[request_id], before[request_id]
            yield replace(row, position=row.position + count, num_generated=row.num_generated + count)
            before[request_id] += 1

    def _choose(self, logits: Tensor, rows: list[_SamplerRow], masks: TokenMasks | None) -> Int64Array:
        """Return the next token of each row of logits, int64 [n]. Greedy rows that no penalty, bias, ban or mask edits
        need only an argmax of the unchanged logits."""
        tokens = np.empty(len(rows), dtype=np.int64)
        masked = set(masks.rows) if masks else ()
        if plain := [i for i, row in enumerate(rows) if row.is_plain and i not in masked]:
            tokens[plain] = _argmax(_take(logits, plain))
        if shaped := [i for i, row in enumerate(rows) if not row.is_plain or i in masked]:
            scores = _take(logits, shaped).to(torch.float32, copy=True)
            if masks:
                masks.apply(scores, [bisect_left(shaped, row) for row in masks.rows])
            tokens[shaped] = _choose_shaped(scores, [rows[i] for i in shaped])
        return tokens


def _choose_shaped(scores: Tensor, rows: list[_SamplerRow]) -> Int64Array:
    """Return the next tokens (int64) of rows whose logits are edited (bans, biases, penalties, masks) or that are drawn
    at random. Changes `scores` (fp32 [len(rows), vocab_size]) in place."""
    _ban(scores, rows)
    _add_bias(scores, rows)
    _penalise(scores, rows)
    tokens = np.empty(len(rows), dtype=np.int64)
    if greedy := [i for i, row in enumerate(rows) if not row.is_random]:
        tokens[greedy] = _argmax(_take(scores, greedy))
    if drawn := [i for i, row in enumerate(rows) if row.is_random]:
        tokens[drawn] = _draw(_take(scores, drawn), [rows[i] for i in drawn])
    return tokens


def _draw(scores: Tensor, rows: list[_SamplerRow]) -> Int64Array:
    """Draw the next token of each row with its request's filters, int64 [n]. Divides `scores` (fp32 [n, vocab_size]) by
    the temperatures in place."""
    seeds = np.array([[row.params.seed & SEED_MASK] for row in rows], dtype=np.uint64)
    positions = np.array([[row.position] for row in rows], dtype=np.uint64)
    uniform = _upload(uniforms(seeds, positions), scores)
    scores /= _upload(np.array([[row.params.temperature] for row in rows], dtype=np.float32), scores)
    return draw(scores, uniform, Filters.of([row.params for row in rows])).numpy()


def _logprobs(logits: Tensor, wanted: Sequence[int | None], tokens: Int64Array) -> list[TokenLogprobs | None]:
    """Return logprobs, from the model's unchanged logits, of each row's chosen token and of the `wanted[row]` likeliest
    ones; None where `wanted` is None."""
    results: list[TokenLogprobs | None] = [None] * len(wanted)
    rows = [i for i, number in enumerate(wanted) if number is not None]
    if not rows:
        return results
    raw = logits[rows].float()
    all_logprobs = raw.log_softmax(-1)
    chosen = all_logprobs.gather(1, _upload(tokens[rows], raw)[:, None])[:, 0].tolist()
    ids = ranked(raw, min(max(number or 0 for number in wanted), raw.shape[1]))
    values = all_logprobs.gather(1, ids).tolist()
    for i, logprob, top_ids, top_values in zip(rows, chosen, ids.tolist(), values, strict=True):
        top = tuple(zip(top_ids, top_values, strict=True))[: wanted[i]]
        results[i] = TokenLogprobs(logprob, top)
    return results


def _ban(scores: Tensor, rows: list[_SamplerRow]) -> None:
    if banned := [(i, row.banned) for i, row in enumerate(rows) if row.is_banned and len(row.banned)]:
        scores[_entries(banned, scores)] = -torch.inf


def _add_bias(scores: Tensor, rows: list[_SamplerRow]) -> None:
    if biased := [(i, row.bias_ids) for i, row in enumerate(rows) if len(row.bias_ids)]:
        values = _upload(np.concatenate([rows[i].bias for i, _ in biased]), scores)
        scores.index_put_(_entries(biased, scores), values, accumulate=True)


def _penalise(scores: Tensor, rows: list[_SamplerRow]) -> None:
    """Apply the repetition penalty to every known token, then frequency and presence penalties to generated ones, in
    place."""
    pairs = [(i, row.seen, row.params) for i, row in enumerate(rows) if row.seen]
    if not pairs:
        return
    entries = _entries([(i, seen.ids) for i, seen, _ in pairs], scores)
    each = np.array([params.penalties for *_, params in pairs], dtype=np.float32)
    spread = np.repeat(each, [len(seen.ids) for _, seen, _ in pairs], axis=0)
    repetition, frequency, presence = _upload(np.ascontiguousarray(spread.T), scores)
    counts = _upload(np.concatenate([seen.counts for _, seen, _ in pairs]), scores)
    values = scores[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[entries] = values - frequency * counts - presence * (counts > 0)


def _entries(tokens: list[tuple[int, Int64Array]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and column indices into scores of all (row, token ids) pairs, concatenated, on the device of
    `like`."""
    rows = np.repeat([row for row, _ in tokens], [len(ids) for _, ids in tokens])
    both = _upload(np.stack([rows, np.concatenate([ids for _, ids in tokens])]), like)
    return both[0], both[1]


def _argmax(scores: Tensor) -> Int64Array:
    """Return each row's best token (int64), the lowest id if equal. NumPy's argmax is several times faster than
    torch's."""
    if scores.device.type == "cpu":
        return scores.float().numpy().argmax(-1)
    return scores.argmax(-1).cpu().numpy()


def _take(scores: Tensor, rows: list[int]) -> Tensor:
    """Return the given rows of `scores`, whose numbers are ascending. Does not copy if they are all rows."""
    return scores if len(rows) == len(scores) else scores[rows]


def _upload(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def stops_of(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> Int64Array:
    """Return the ids that must not be sampled before `min_tokens` tokens: all of `eos_token_ids`, even with
    `ignore_eos`, and the request's stop tokens. They are sorted int64, without ids outside the vocabulary."""
    stops = {token for token in (*eos_token_ids, *params.stop_token_ids) if 0 <= token < vocab_size}
    return np.array(sorted(stops), dtype=np.int64)


def bias_of(params: SamplingParams, vocab_size: int) -> tuple[Int64Array, npt.NDArray[np.float32]]:
    """Return the ids of biased tokens (int64) and the values added to their logits (fp32), without tokens beyond the
    vocabulary."""
    bias = [(token, value) for token, value in params.logit_bias if 0 <= token < vocab_size]
    ids = np.array([token for token, _ in bias], dtype=np.int64)
    return ids, np.array([value for _, value in bias], dtype=np.float32)


def has_filters(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.min_p > 0 or params.top_k > 0
