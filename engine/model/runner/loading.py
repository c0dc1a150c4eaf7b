"""How a model is loaded: its weights, the memory of its engine, and all that computes, samples and follows steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core.messages.commands import Answer
from engine.executor.base import Report
from engine.model.adapters.fetcher import Fetcher
from engine.model.adapters.packing import Packer, load_ahead
from engine.model.adapters.peft.targets import target_shapes
from engine.model.decode.assembly import build_decoder
from engine.model.decode.decoder import Decoder
from engine.model.decode.kv_scales import find_kv_codings
from engine.model.decode.pipeline import Pipeline
from engine.model.grammar.compiler import Compiler
from engine.model.grammar.matchers import GrammarRoom
from engine.model.layers.lora import target_names
from engine.model.memory.allocation import Progress, count_host_pages, count_pages
from engine.model.memory.arena import Arena
from engine.model.memory.host import PagedMemory, allocate_pages
from engine.model.memory.host_pages import HostPages
from engine.model.memory.host_store import HostStore
from engine.model.ranks.collectives import ALONE, Ranks, threads_of_rank
from engine.model.runner.draft_model import DraftModel, NoDraftModel, load_draft, make_draft_model
from engine.model.runner.facts import ModelFacts, find_facts
from engine.model.runner.kernels import load_kernels
from engine.model.sample.pooler import Pooler
from engine.model.sample.scorer import PromptScorer
from engine.model.sample.slot_sampler import SlotSampler, make_sampler
from engine.model.steps.forward import Steps, make_steps, plan_graphs
from engine.model.steps.warm_up import LOGPROBS, StepLimits, warm_up
from engine.model.weights.quantize import open_source
from engine.model.weights.reader import WeightSource
from engine.process.cores import usable_cores
from lora_kernels.backend import Backend

if TYPE_CHECKING:
    from engine.model.steps.graph_plan import Captured


class ReportLine:
    """Passes the answers of threads that a loaded model has started to `report`, which is connected later."""

    def __init__(self) -> None:
        self.report: Report = lambda _: None

    def __call__(self, answer: Answer) -> None:
        self.report(answer)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to compute steps, and the parts with which a `ModelRunner` runs them."""

    facts: ModelFacts
    ranks: Ranks
    """The ranks that run the model; this process is one of them."""
    decoder: Decoder
    backend: Backend
    arena: Arena
    host_pages: HostPages
    """Host memory for saved KV."""
    host_adapters: HostStore
    fetcher: Fetcher
    """Reads adapters into `host_adapters`."""
    sampler: SlotSampler
    pooler: Pooler
    scorer: PromptScorer
    grammars: GrammarRoom
    draft_model: DraftModel | NoDraftModel
    captured: Captured | None
    """CUDA graphs of steps, and what capturing them took. None means that no steps are captured."""
    steps: Steps | Pipeline
    answers: ReportLine
    """Gets the answers of `fetcher` and `grammars`."""

    @property
    def num_pages(self) -> int:
        """Return the number of pages; page 0 is the null page."""
        return len(self.arena.pages)

    @property
    def num_host_pages(self) -> int:
        """Return the number of host pages that the `saves` of plans may use."""
        return len(self.host_pages.pages)


def load(
    config: EngineConfig,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    ranks: Ranks = ALONE,
) -> Loaded:
    """Load a rank's part of a model and, on a GPU, capture and warm up its steps. `clock` returns seconds. All `ranks`
    need the same configuration. Raises ValueError if the folder or the configuration cannot be served."""
    progress = on_progress or (lambda *_: None)
    # torch's own default respects affinity and hyperthreads, but not CPU quotas.
    threads = config.threads or min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(threads_of_rank(threads, ranks.size))
    facts, sized = find_facts(config.of_rank(), ranks)
    config, spec, dtype, device = facts.config, facts.spec, facts.dtype, facts.device
    folder, answers = Path(config.model), ReportLine()
    decoder, backend, source = _load_weights(facts, ranks, progress)
    draft = load_draft(sized.draft, dtype, device)
    packing_kernels = load_ahead(dtype, fp8=facts.fp8_adapters)
    targets = target_shapes(spec, source, folder.name, facts.shard)
    graphs = plan_graphs(config, decoder, facts.page, dtype, device, backend, facts.max_model_len)
    arena, num_host_pages = _make_arena(facts, decoder, ranks, graphs.reserved if graphs else sized.reserved)
    draft_model = make_draft_model(draft, arena, backend, config, spec, clock)
    adapter_pages, saved_pages = allocate_pages(
        config.host_adapter_gb, num_host_pages, arena.shape.elements, dtype, device
    )
    host_pages = HostPages(saved_pages, device)
    pooler, scorer = _make_readers(facts, decoder, backend)
    sampler = make_sampler(spec.vocab_size, device, spec.eos_token_ids, config.max_seqs)
    captured = graphs.capture(decoder, arena, sampler, progress) if graphs else None
    steps = make_steps(decoder, arena, backend, sampler.last_tokens, captured.graphs if captured else None)
    if device.type == "cuda":
        pooler.warm_up(dtype)
        scorer.warm_up(dtype, spec.hidden_size, LOGPROBS)
        limits = StepLimits(config.max_seqs, config.token_budget, facts.max_model_len)
        warm_up(facts.shard.spec(spec), steps, sampler, arena, limits, progress)
    memory = PagedMemory(adapter_pages, arena.copies.fence if device.type == "cuda" else None)
    packs = partial(Packer, page_elems=arena.shape.elements, dtype=dtype, memory=memory, kernels=packing_kernels)
    targets = replace(targets, most_numbers=adapter_pages.numel() * ranks.count * (1 + facts.fp8_adapters))
    packer = packs(targets, fp8=facts.fp8_adapters, draft=packs(draft.shapes) if draft else None)
    host_adapters = HostStore(memory)
    compiler = Compiler(folder, spec.vocab_size, spec.eos_token_ids, speculates=facts.speculates)
    return Loaded(
        facts=facts,
        ranks=ranks,
        decoder=decoder,
        backend=backend,
        arena=arena,
        host_pages=host_pages,
        host_adapters=host_adapters,
        fetcher=Fetcher(packer, host_adapters, answers, config.fetch_threads),
        sampler=sampler,
        pooler=pooler,
        scorer=scorer,
        grammars=GrammarRoom(compiler, spec.vocab_size, spec.eos_token_ids, answers),
        draft_model=draft_model,
        captured=captured,
        steps=steps,
        answers=answers,
    )


def _load_weights(facts: ModelFacts, ranks: Ranks, progress: Progress) -> tuple[Decoder, Backend, WeightSource]:
    """Load the weights and the kernels at the same time: Python loads kernels while torch copies weights. Return them
    with the source of the folder's weights, from which single parameters are read later."""
    config, spec, device, dtype = facts.config, facts.spec, facts.device, facts.dtype
    layers = len(facts.shard.layers(spec))
    with ThreadPoolExecutor(1, "kernels") as thread:
        backend = thread.submit(load_kernels, config, spec, device, dtype, progress)
        source = open_source(config, spec, device)
        decoder = build_decoder(
            spec, source, dtype, device, lambda done: progress("loading weights", done, layers), ranks, facts.shard
        )
        return decoder, backend.result(), source


def _make_arena(facts: ModelFacts, decoder: Decoder, ranks: Ranks, reserved: int) -> tuple[Arena, int]:
    """Allocate as many pages as fit beside the weights and `reserved` bytes for steps, on every rank. Return them and
    the number of host pages."""
    config, dtype, device = facts.config, facts.dtype, facts.device
    kv_codings = None
    if facts.page.fp8_kv:
        folder = Path(config.model)
        kv_codings = find_kv_codings(folder, config.load_format, decoder, dtype, facts.max_model_len)
    num_pages = count_pages(config, facts.page_bytes, device, reserved)
    num_pages, num_host_pages = ranks.least([num_pages, count_host_pages(config, facts.page_bytes)])
    arena = Arena(
        facts.page,
        num_pages,
        config.max_resident_adapters,
        dtype,
        device,
        facts.fp8_adapters,
        kv_codings,
        num_targets=len(target_names(facts.spec)),
    )
    return arena, num_host_pages


def _make_readers(facts: ModelFacts, decoder: Decoder, backend: Backend) -> tuple[Pooler, PromptScorer]:
    """Return what reads vectors and prompt logprobs out of the residual stream of a step's rows."""
    spec, device, head = facts.spec, facts.device, decoder.head
    pooler = Pooler(lambda rows: head.hidden(rows, backend), spec.hidden_size, facts.config.max_seqs, device)
    scorer = PromptScorer(lambda x, tokens, rows: head.logits(x, backend, tokens, rows), spec.vocab_size, device)
    return pooler, scorer
