"""Steps that are recorded once and replayed, against the same steps launched one by one or computed by torch, under
Triton's interpreter. The folder of the tiny model is the first argument of the script (replay_worker.py).

What is recorded is called again (rerun.py). That side never knows a token when it plans the step that computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from graph_engine import an_engine_ahead_of_replays
from rerun import Launches, Rerun
from torch import Tensor

from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, SampledToken, ScheduledChunk
from engine.model.batch.rows import UNKNOWN
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.decode.decoder import Decoder
from engine.model.layers.lora import target_names, target_widths
from engine.model.memory.arena import AdapterForm, Arena, page_shape
from engine.model.memory.host import Blob
from engine.model.sample.device_sampler import DeviceSample, DeviceSampler
from engine.model.sample.masks import TokenMasks, pack_bits
from engine.model.spec.config import read_spec
from engine.model.steps.forward import Steps, forward_over
from engine.model.steps.graphs import StepGraphs, StepParts
from engine.model.weights.reader import open_weights
from lora_kernels.backend import Backend
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning
from lora_kernels.gpu.triton_sampling import SamplingTiles
from lora_kernels.layout import pack_adapter, plan_layout
from lora_kernels.reference import ReferenceBackend
from lora_kernels.token_rows import TokenIds

CPU = torch.device("cpu")
BLOCK, NUM_PAGES, MAX_SEQS, MAX_LEN, VOCAB = 16, 80, 4, 64, 97
OF_4, OF_2, OF_1, PLAIN = 0, 2, 4, 1
"""Numbers of what is recorded: two for each rung, the largest first; with adapters, and without."""
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.2, seed=5, repetition_penalty=1.2)
FILTERED = SamplingParams(temperature=1.2, seed=6, top_k=9)
LOGPROBS = SamplingParams(temperature=0.7, seed=8, logprobs=2)


class Watched(DeviceSampler):
    """Remembers the logits of the last step."""

    logits = torch.empty(0)

    def start(self, logits: Tensor, request_ids: Sequence[str], masks: TokenMasks | None = None) -> DeviceSample:
        self.logits = logits.clone()
        return super().start(logits, request_ids, masks)


@cache
def tiny_decoder() -> Decoder:
    folder = Path(sys.argv[1])
    spec = read_spec(folder)
    return build_decoder(spec, open_weights(folder, spec), torch.float32, CPU)


@dataclass(frozen=True)
class Setup:
    """Sizes and tunings of the device side. `token_budget`: 1 means that steps with prompts are not captured.
    `tolerance`: 0 means that logits and pages must be the same bit for bit. `warms_up`: see Rerun. `against_torch`: the
    side that is not recorded has torch's backend, which takes a fraction of the interpreter's time."""

    make_decoder: Callable[[], Decoder] = tiny_decoder
    token_budget: int = 1
    lora: LoraTuning = field(default_factory=lambda: LoraTuning(most_programs=4))
    prefill: PrefillTuning | None = None
    dtype: torch.dtype = torch.float32
    fp8_kv: bool = False
    tolerance: float = 1e-4
    warms_up: bool = False
    against_torch: bool = True


class SteppedArena:
    """One engine's device side, without a scheduler. Pages that no sequence owns are NaN. `sampling` has the names of
    the kernels that sampled the last step."""

    sampling: Sequence[str] = ()
    residual: Tensor | None = None
    """The residual stream of the last step."""

    def __init__(self, is_recorded: bool, setup: Setup) -> None:
        decoder, self.is_recorded, dtype = setup.make_decoder(), is_recorded, setup.dtype
        self.spec = decoder.spec
        shape, targets = page_shape(decoder.spec, BLOCK, setup.fp8_kv), len(target_names(decoder.spec))
        self.arena = Arena(shape, NUM_PAGES, 4, dtype, CPU, AdapterForm(targets))
        self.arena.pages[1:] = torch.nan
        decode = DecodeTuning(block_n=16, split_tokens=32, max_splits=4, programs=3)
        backend: Backend = TritonBackend(setup.lora, PagedAttention(decode, setup.prefill))
        if setup.against_torch and not is_recorded:
            backend = ReferenceBackend()
        self.sampler = Watched(VOCAB, CPU, (2, 3), MAX_SEQS, SamplingTiles(128, 128))
        self.state = BatchState(MAX_SEQS, MAX_LEN, BLOCK)
        self.recorder, graphs = Rerun(warms_up=setup.warms_up), None
        if is_recorded:
            parts = StepParts(decoder, self.arena, backend, self.sampler)
            graphs = StepGraphs(parts, self.recorder, MAX_SEQS, MAX_LEN, setup.token_budget)
        self.steps = Steps(forward_over(decoder, self.arena, backend), self.sampler.last_tokens, graphs)

    def load(
        self, name: str, rank: int, pages: Sequence[int], is_scaled: bool = False, tokens: TokenIds | None = None
    ) -> None:
        """A random adapter of every projection, the same for the same name."""
        spec, generator = self.spec, torch.Generator().manual_seed(ord(name))
        ranks = np.full((spec.layers, len(target_names(spec))), rank, dtype=np.int32)
        widths, scaled = target_widths(spec), np.full(ranks.shape, is_scaled)
        layout = plan_layout(ranks, widths, self.arena.shape.elements, scaled, tokens=tokens)
        random = partial(torch.randn, generator=generator)
        places = {place: widths[place[1]].tolist() for place in np.ndindex(ranks.shape)}
        blocks = {place: (random(rank, into) * 0.2, random(out, rank) * 0.2) for place, (into, out) in places.items()}
        scales = {place: random(2, out) * 0.1 for place, (_, out) in places.items() if is_scaled}
        rows = random(tokens.num_rows, tokens.width) if tokens else ()
        blob = pack_adapter(layout, blocks, self.arena.shape.elements, self.arena.pages.dtype, scales, rows)
        self.arena.load_adapter(name, layout, Blob.of(blob), tuple(pages[: layout.num_pages]))

    def admit(self, admission: Admission) -> None:
        name = admission.request_id
        self.sampler.add(name, admission.params, admission.tokens, admission.num_prompt)
        self.state.admit(admission, self.arena.adapter_slot(admission.adapter_hash), int(self.sampler.slots([name])[0]))

    def release(self, name: str) -> None:
        self.state.release(name)
        self.sampler.remove(name)

    def step(self, chunks: Sequence[ScheduledChunk], allowed: Mapping[str, Sequence[int]]) -> list[SampledToken]:
        batch = self.state.gather(chunks)
        logits, self.residual, _ = self.steps.compute(batch, self.steps.find(batch))
        masks = mask(allowed, batch.sample_ids) if allowed else None
        if not batch.sample_ids:
            return []
        launches = Launches()
        with launches.kernels():
            sample = self.sampler.start(logits, batch.sample_ids, masks)
        self.sampling = [name for name, _ in launches.calls if not name.startswith("aten.")]
        sampled = sample.to_host()
        for token in sampled:
            self.state.append(token.request_id, UNKNOWN if self.is_recorded else token.token)
        return sampled


class Pair:
    """A recorded world and one that is not, told the same."""

    def __init__(self, setup: Setup | None = None) -> None:
        self.setup = setup or Setup()
        self.recorded, self.plain = SteppedArena(True, self.setup), SteppedArena(False, self.setup)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.pages: dict[str, list[int]] = {}
        self.free = [7, 3, 11, 5, 2, 13, 9, 4, 15, 6, 17, 8]

    def both(self, call: Callable[[SteppedArena], Any]) -> None:
        call(self.recorded)
        call(self.plain)

    def admit(
        self, name: str, tokens: Sequence[int], adapter_hash: str | None = None, params: SamplingParams = GREEDY
    ) -> None:
        self.tokens[name], self.computed[name], self.pages[name] = list(tokens), 0, []
        admission = Admission(name, tuple(tokens), len(tokens), 0, (), adapter_hash, params)
        self.both(lambda stepped: stepped.admit(admission))

    def preempt(self, name: str) -> None:
        self.both(lambda stepped: stepped.release(name))

    def resume(
        self, name: str, num_prompt: int, adapter_hash: str | None, params: SamplingParams, num_computed: int
    ) -> None:
        """With what is computed in the pages that it had."""
        self.computed[name], kept = num_computed, self.pages[name] if num_computed else []
        self.free += [page for page in self.pages[name] if page not in kept]
        self.pages[name] = list(kept)
        tokens = tuple(self.tokens[name])
        admission = Admission(name, tokens, num_prompt, num_computed, tuple(kept), adapter_hash, params)
        self.both(lambda stepped: stepped.admit(admission))

    def step(
        self,
        names: Sequence[str],
        allowed: Mapping[str, Sequence[int]] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> int | None:
        """What was replayed, if anything. Both must say the same, and mean it. Requests in `allowed` may say the tokens
        there alone; those in `most` compute at most that many."""
        chunks = [self.chunk(name, (most or {}).get(name, MAX_LEN)) for name in names]
        before = len(self.recorded.recorder.replayed)
        ours, theirs = (stepped.step(chunks, allowed or {}) for stepped in (self.recorded, self.plain))
        assert [(one.request_id, one.token) for one in ours] == [(one.request_id, one.token) for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            if other.logprobs is not None:
                assert one.logprobs and abs(one.logprobs.logprob - other.logprobs.logprob) < 1e-4
            self.tokens[one.request_id].append(one.token)
        close: dict[str, Any] = {"rtol": self.setup.tolerance, "atol": self.setup.tolerance, "equal_nan": True}
        torch.testing.assert_close(self.recorded.sampler.logits, self.plain.sampler.logits, **close)
        torch.testing.assert_close(self.recorded.residual, self.plain.residual, **close)
        pages = (stepped.arena.pages for stepped in (self.recorded, self.plain))
        torch.testing.assert_close(*pages, **close)
        assert not self.recorded.arena.pages[0].any(), "the null page was written"
        replayed = self.recorded.recorder.replayed[before:]
        assert len(replayed) <= 1
        return replayed[0] if replayed else None

    def chunk(self, name: str, most: int) -> ScheduledChunk:
        start = self.computed[name]
        end = min(len(self.tokens[name]), start + most)
        self.computed[name] = end
        new = [self.free.pop(0) for _ in range(-(-end // BLOCK) - len(self.pages[name]))]
        self.pages[name] += new
        return ScheduledChunk(name, start, end - start, tuple(new), samples=end == len(self.tokens[name]))


def mask(allowed: Mapping[str, Sequence[int]], names: Sequence[str]) -> TokenMasks:
    rows = tuple(row for row, name in enumerate(names) if name in allowed)
    return TokenMasks(rows, np.stack([pack_bits(np.array(allowed[names[row]]), VOCAB) for row in rows]))


def any_set_of_adapters_with_padding() -> None:
    """Kernels also ran while they were recorded, on nothing but padding, and have changed no page."""
    pair = Pair(Setup(warms_up=True))
    pair.both(lambda stepped: stepped.load("x", 3, range(20, 40)))
    pair.both(lambda stepped: stepped.load("y", 20, range(40, 80)))
    pair.admit("a", range(10, 41))
    pair.admit("b", (4, 5, 6), "x", SAMPLED)
    pair.admit("c", (9, 8), "y", LOGPROBS)
    assert pair.step("abc") is None, "a step with prompts was replayed"
    assert [pair.step("abc") for _ in range(3)] == [OF_4] * 3, "the longest context is in splits from the second on"
    assert pair.step("ab") == OF_2
    assert pair.step("a") == OF_1 + PLAIN
    assert pair.step("b") == OF_1
    pair.admit("d", (30, 31, 32), params=FILTERED)
    assert pair.step("acd") is None
    assert pair.step("ad") == OF_2 + PLAIN
    assert pair.step("abcd") == OF_4


def requests_come_and_go() -> None:
    """Preempted ones resume from nothing, and from pages they had, with a token the host knows beside those it does
    not; an adapter moves to other pages and another slot."""
    pair = Pair()
    pair.both(lambda stepped: stepped.load("x", 3, range(20, 40)))
    pair.admit("a", (50, 51, 52, 53))
    pair.admit("b", (4, 5, 6), "x", LOGPROBS)
    assert pair.step("ab") is None
    assert pair.step("ab") == OF_2
    pair.preempt("b")
    pair.preempt("a")
    pair.both(lambda stepped: stepped.arena.evict_adapter("x"))
    pair.both(lambda stepped: stepped.load("z", 5, range(20, 30)))
    pair.both(lambda stepped: stepped.load("x", 3, range(30, 50)))
    pair.resume("a", 4, None, GREEDY, num_computed=len(pair.tokens["a"]) - 1)
    assert pair.step("a") == OF_1 + PLAIN
    pair.resume("b", 3, "x", LOGPROBS, num_computed=0)
    pair.admit("c", (60, 61), "z")
    assert pair.step("bac") is None
    pair.preempt("a")
    pair.resume("a", 4, None, GREEDY, num_computed=len(pair.tokens["a"]) - 1)
    assert pair.step("abc") == OF_4


def scaled_outputs_and_trained_tokens_are_not_replayed() -> None:
    """Rows of the embedding and of the head are replaced also for tokens that only the device knows."""
    pair, every = Pair(), np.arange(VOCAB)
    ids = TokenIds(every, every, VOCAB, tiny_decoder().spec.hidden_size)
    pair.both(lambda stepped: stepped.load("d", 4, range(20, 40), is_scaled=True))
    pair.both(lambda stepped: stepped.load("t", 4, range(40, 80), tokens=ids))
    pair.admit("a", (50, 51, 52, 53), "d")
    pair.admit("b", (4, 5, 6))
    pair.admit("c", (54, 55), "t")
    assert [pair.step(names) for names in ("abc", "bc")] == [None] * 2
    assert pair.step("b") == OF_1 + PLAIN


def grammar_rows_are_replayed_beside_others() -> None:
    """The masks change with every step, while others draw, filter, penalise and want logprobs."""
    pair = Pair()
    pair.both(lambda stepped: stepped.load("x", 3, range(20, 40)))
    for name, params in (("a", GREEDY), ("b", SAMPLED), ("c", FILTERED), ("d", LOGPROBS)):
        pair.admit(name, (4, 5, ord(name) - 60), "x" if name == "b" else None, params)
    assert pair.step("abcd", {"a": [11]}) is None
    assert pair.step("abcd", {"b": [12, 13], "c": [14]}) == OF_4
    assert pair.step("abcd", {"a": [15, 16], "d": [17, 18, 19]}) == OF_4
    assert pair.step("ad", {"d": [96]}) == OF_2 + PLAIN
    assert pair.step("bc", {"b": [20]}) == OF_2
    assert pair.recorded.sampling == ["score_kernel", "choose_kernel"], "a replay and two launches"
    assert pair.step("abcd") == OF_4, "without any grammar after steps with some"
    said = {name: pair.tokens[name][3:] for name in "abcd"}
    assert said["a"][0] == 11 and said["c"][1] == 14 and said["d"][3] == 96
    assert said["b"][1] in (12, 13) and said["a"][2] in (15, 16) and said["d"][2] in (17, 18, 19)
    for stepped in (pair.recorded, pair.plain):
        assert stepped.sampler.logits.isfinite().all(), "masks change no logits"


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        any_set_of_adapters_with_padding,
        requests_come_and_go,
        scaled_outputs_and_trained_tokens_are_not_replayed,
        grammar_rows_are_replayed_beside_others,
    )
} | {"an_engine_ahead_of_replays": lambda: an_engine_ahead_of_replays(Path(sys.argv[1]))}
