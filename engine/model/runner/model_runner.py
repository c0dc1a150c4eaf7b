"""Executes plans with a model on one device, without knowing why the plans were made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AdapterFetched, FetchFailed
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch, Admission, Launch, StepPlan, StepResult
from engine.executor.base import Claim, Report
from engine.model.adapters.fetcher import Fetcher, start_threads
from engine.model.adapters.packing import Packer, load_ahead
from engine.model.adapters.peft.targets import target_shapes
from engine.model.batch.rows import HostBatch
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.decode.kv_scales import find_kv_codings
from engine.model.grammar.compiler import Compiler
from engine.model.grammar.matchers import GrammarRoom
from engine.model.layers.lora import target_names
from engine.model.memory.allocation import Progress, count_host_pages, count_pages, pick_device, pick_dtype
from engine.model.memory.arena import Arena, PageUses, page_shape, used_pages
from engine.model.memory.host import PagedMemory, allocate_pages
from engine.model.memory.host_pages import HostPages
from engine.model.memory.host_store import HostStore
from engine.model.ranks.collectives import ALONE, Ranks, threads_of_rank
from engine.model.ranks.stages import find_shard
from engine.model.runner.draft_model import load_draft, make_draft_model
from engine.model.runner.identity import hash_model, kv_identity
from engine.model.runner.kernels import load_kernels
from engine.model.runner.sizes import (
    Sized,
    agreed,
    count_page_bytes,
    fill_sizes,
    find_kept_bits,
    has_fp8_kv,
    max_model_len,
    read_served_spec,
    stores_fp8,
    warn_of_dequantised,
)
from engine.model.runner.submitted import CudaClock, HostClock, SubmittedStep, WorkClock
from engine.model.sample.masks import TokenMasks
from engine.model.sample.pooler import Pooler
from engine.model.sample.scorer import PromptScorer
from engine.model.sample.slot_sampler import HeldTokens, Sample, make_sampler
from engine.model.sample.soundness import unsound_ends
from engine.model.steps.forward import make_steps, plan_graphs
from engine.model.steps.warm_up import LOGPROBS, StepLimits, warm_up
from engine.model.weights.quantize import open_source
from engine.model.weights.reader import WeightSource, name_weights
from engine.process.cores import usable_cores
from lora_kernels.pinned import upload_ring

if TYPE_CHECKING:
    from engine.model.steps.graph_plan import GraphPlan

OnTokens = Callable[[Sequence[tuple[str, int]]], None]
"""Callback that gets (request id, token id) of sampled tokens once the host knows them."""


class ModelRunner:
    """An `Executor` that runs a model on one device. Creating it loads the model and raises ValueError if the folder or
    the configuration cannot be served. Only `load_host` may be called from threads other than the step loop.

    Attributes:
        config: the configuration, with the sizes that it left to the engine.
        spec: shape of the model, of which this runner has the part `shard`.
        overlaps: whether steps are planned while the step before is computed: on a GPU, unless configured otherwise.
        num_pages, block_size, page_bytes: number of pages, and tokens and bytes of each; page 0 is the null page. With
            several stages, the bytes are those of the stage that has most layers.
        num_host_pages: number of host pages that the `saves` of plans may use.
        max_model_len: maximum number of tokens of one sequence.
        draft_block: tokens of the draft model's KV in a page; 0 without a draft model.
        captured: CUDA graphs of steps, and what capturing them took. None means that no steps are captured.
        weights: name of the format of the weights (see `name_weights`).
        ranks: the ranks that run the model; this runner is one of them.
        on_tokens: called when the host learns the tokens of a step.
        kv_identity: hash that engines share whose KV pages are interchangeable (see `kv_identity`).
        model_hash: hash that is stable across restarts, and differs for different weights (see `hash_model`).
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ranks: Ranks = ALONE,
    ) -> None:
        """`clock`, in seconds, measures how much of the duration of steps is spent on drafting. `ranks` are all that
        run the model; each needs a runner with the same configuration, to which the same plans are submitted."""
        # torch's own default respects affinity and hyperthreads, but not CPU quotas.
        threads = config.threads or min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(threads_of_rank(threads, ranks.size))
        self.ranks = ranks
        folder, progress = Path(config.model), on_progress or (lambda *_: None)
        sized = self._find_sizes(config.of_rank())
        config = self.config
        source = self._load_model(config, progress)
        draft = load_draft(sized.draft, self.dtype, self.device)
        packing_kernels = load_ahead(self.dtype, fp8=self._fp8_adapters)
        targets = target_shapes(self.spec, source, folder.name, self.shard)
        graphs = self._make_arena(config, sized.reserved)
        self._draft_model = make_draft_model(draft, self._arena, self.backend, config, self.spec, clock)
        self.draft_block = self._draft_model.block
        page_elems = self._arena.shape.elements
        adapter_pages, saved_pages = allocate_pages(
            config.host_adapter_gb, self.num_host_pages, page_elems, self.dtype, self.device
        )
        self._host_pages = HostPages(saved_pages, self.device)
        self._make_step_parts(config, graphs, progress)
        self._submitted: deque[SubmittedStep] = deque()
        self._speculates = self.proposes and config.speculation != "off"
        memory = PagedMemory(adapter_pages, self._arena.copies.fence if self.device.type == "cuda" else None)
        self._host = HostStore(memory)
        self._report: Report = lambda _: None
        self.on_tokens: OnTokens = lambda tokens: None
        self._loaders = start_threads(config.fetch_threads, "load")
        packs = partial(Packer, page_elems=page_elems, dtype=self.dtype, memory=memory, kernels=packing_kernels)
        targets = replace(targets, most_numbers=adapter_pages.numel() * ranks.count * (1 + self._fp8_adapters))
        self._packer = packs(targets, fp8=self._fp8_adapters, draft=packs(draft.shapes) if draft else None)
        self._fetcher = Fetcher(self._packer, self._host, lambda answer: self._report(answer), config.fetch_threads)
        self._compiler = Compiler(folder, self.vocab_size, self.eos_token_ids, speculates=self._speculates)
        self._grammars = GrammarRoom(
            self._compiler, self.vocab_size, self.eos_token_ids, lambda answer: self._report(answer)
        )

    def _find_sizes(self, config: EngineConfig) -> Sized:
        """Sets the attributes that follow from a rank's configuration, the device and the files, without the weights.
        Returns the sizes."""
        self.spec = read_served_spec(config)
        self.device = pick_device(config.device)
        upload_ring(self.device)  # allocated here, because a GPU may stop when memory is pinned
        self.overlaps = config.overlap and self.device.type == "cuda"
        self.dtype = pick_dtype(config.dtype, self.device)
        self._fp8_adapters = stores_fp8(config.adapter_dtype, self.device, self.dtype)
        bits = find_kept_bits(config, self.spec, self.device, self.dtype)
        self.shard = find_shard(config, self.spec, bits, self.ranks.number)
        sized = agreed(fill_sizes(config, self.spec, self.device, self.dtype, self.shard), self.ranks)
        sized.tell()
        self.config = config = sized.config
        self.block_size = config.block_size
        self.max_model_len = max_model_len(config, self.spec)
        self.model_hash = hash_model(config)
        self.weights = name_weights(Path(config.model), self.spec, config.load_format, config.weights, self.dtype)
        warn_of_dequantised(self.weights, sized.weight_bytes, self.dtype)
        return sized

    def _make_arena(self, config: EngineConfig, reserved: int) -> GraphPlan | None:
        """Sets the size and the number of pages, and allocates them. Returns the plan of the CUDA graphs that need
        memory beside them. Without one, steps need `reserved` bytes."""
        part = self.shard.spec(self.spec)
        shape = page_shape(part, config.block_size, has_fp8_kv(config, self.dtype, self.device))
        kv_codings = None
        if shape.fp8_kv:
            kv_codings = find_kv_codings(
                Path(config.model), config.load_format, self._decoder, self.dtype, self.max_model_len
            )
        self.page_bytes = count_page_bytes(config, self.spec, self.device, self.dtype, self.shard)
        self.kv_identity = kv_identity(
            self.model_hash, str(self.dtype), shape, self.max_model_len, fp8_adapters=self._fp8_adapters
        )
        graphs = plan_graphs(config, self._decoder, shape, self.dtype, self.device, self.backend, self.max_model_len)
        num_pages = count_pages(config, self.page_bytes, self.device, graphs.reserved if graphs else reserved)
        self.num_pages, self.num_host_pages = self.ranks.least([num_pages, count_host_pages(config, self.page_bytes)])
        self._arena = Arena(
            shape,
            self.num_pages,
            config.max_resident_adapters,
            self.dtype,
            self.device,
            self._fp8_adapters,
            kv_codings,
            num_targets=len(target_names(self.spec)),
        )
        return graphs

    def _make_step_parts(self, config: EngineConfig, graphs: GraphPlan | None, progress: Progress) -> None:
        """Sets what gathers, computes, samples and times steps. On a GPU, captures the planned graphs and warms up."""
        self._batch = BatchState(config.max_seqs, self.max_model_len, config.block_size)
        self._pooler = Pooler(
            lambda rows: self._decoder.final_norm(rows, self.backend),
            self.spec.hidden_size,
            config.max_seqs,
            self.device,
        )
        self._scorer = PromptScorer(
            lambda x, tokens, rows: self._decoder.logits(x, self.backend, tokens, rows),
            self.spec.vocab_size,
            self.device,
        )
        self._sampler = make_sampler(self.spec.vocab_size, self.device, self.spec.eos_token_ids, config.max_seqs)
        self.captured = graphs.capture(self._decoder, self._arena, self._sampler, progress) if graphs else None
        captured = self.captured.graphs if self.captured else None
        self._steps = make_steps(self._decoder, self._arena, self.backend, self._sampler.last_tokens, captured)
        if self.device.type == "cuda":
            self._warm_up(progress)
        self._clock: WorkClock = CudaClock() if self.device.type == "cuda" else HostClock()

    def _warm_up(self, progress: Progress) -> None:
        """Runs all kernels of pooling, prompt logprobs and steps once, so that no request waits for their
        compilation."""
        limits = StepLimits(self.config.max_seqs, self.config.token_budget, self.max_model_len)
        self._pooler.warm_up(self.dtype)
        self._scorer.warm_up(self.dtype, self.spec.hidden_size, LOGPROBS)
        warm_up(self.shard.spec(self.spec), self._steps, self._sampler, self._arena, limits, progress)

    def _load_model(self, config: EngineConfig, progress: Progress) -> WeightSource:
        """Loads the kernels and the weights at the same time, and sets `_decoder` and `backend`. Returns the source of
        the folder's weights, from which later callers read single parameters."""
        with ThreadPoolExecutor(1, "kernels") as thread:  # Python loads kernels while torch copies weights
            backend = thread.submit(load_kernels, config, self.spec, self.device, self.dtype, progress)
            source = open_source(config, self.spec, self.device)
            layers = len(self.shard.layers(self.spec))
            self._decoder = build_decoder(
                self.spec,
                source,
                self.dtype,
                self.device,
                lambda done: progress("loading weights", done, layers),
                self.ranks,
                self.shard,
            )
            self.backend = backend.result()
        return source

    @property
    def proposes(self) -> bool:
        """Return whether plans may have proposals (speculated tokens): on a CPU only. A GPU plans a step before it
        knows the tokens of the step before, to which proposals must be appended, and its sampler draws one token for
        each request."""
        return self.device.type == "cpu"

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.spec.eos_token_ids

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Launch:
        """Starts to execute a plan, after those submitted before. A CPU has computed the step when this returns; a GPU
        computes it later. Then, if the step has requests with grammars, the host waits for the tokens of the steps
        before while the GPU computes the step's logits. Returns whether the step was late, and the seconds until it
        reached the device. It is late if the device had run out of work (see `_is_idle`) once the step's graph had been
        launched or, without a graph, just before its first kernel."""
        begun, started = self._clock.mark(), time.perf_counter()
        self._move_pages(plan)
        for request_id in plan.released:
            self._release(request_id)
        for adapter_hash in plan.evicted:
            self._arena.evict_adapter(adapter_hash)
            self._draft_model.evict(adapter_hash)
        self._load(plan)
        self._fetch(plan)
        self._grammars.prepare(plan.forgotten, plan.prepared)
        for request_id in plan.undrafted:
            self._draft_model.forget(request_id)
        for admission in plan.admitted:
            self._admit(admission)
        self._grammars.begin(plan.masks)
        batch = self._batch.gather(plan.chunks) if plan.chunks else None
        rung = self._steps.find(batch) if batch else None
        launched = batch is not None and rung is None
        launch = Launch(self._is_idle(), time.perf_counter() - started)
        output = self._steps.compute(batch, rung) if batch else None
        if not launched:
            launch = Launch(self._is_idle(), time.perf_counter() - started)
        sample, unsampled = self._sample(output.logits, batch) if batch and output else (None, ())
        vectors = self._pooler.start(output.residual, batch.pooled) if batch and output and batch.pooled else None
        scores = None
        if batch and output and batch.scored:
            scores = self._scorer.start(output.residual, batch.scored, output.tokens)
        self._arena.copies.close()
        uses, ended = self._uses(plan, batch), self._clock.mark()
        step = SubmittedStep(sample, begun, ended, uses, launched, vectors=vectors, scores=scores, drafts=plan.drafts)
        step.unsampled = unsampled
        self._submitted.append(step)
        return launch

    def _is_idle(self) -> bool:
        """Returns whether the device has run out of work: it has finished the plan that was submitted last, and the
        host has not collected that plan yet."""
        return bool(self._submitted) and self._clock.has_passed(self._submitted[-1].ended)

    def _sample(self, logits: Tensor, batch: HostBatch) -> tuple[Sample | None, tuple[str, ...]]:
        """Samples the next token of each request from its row of a step's logits, while a GPU still computes them. The
        masks of grammars depend on the tokens of the steps before, for which the host waits. Returns the sample (None
        if no request samples) and the requests whose masks are not there, which do not. Only rank 0 samples; if the
        next step is launched before the host knows the tokens, the other ranks' devices get them here."""
        request_ids = batch.sample_ids
        if not request_ids:
            return None, ()
        sampled = self._sample_here(logits, request_ids, batch.proposals) if self.ranks.rank == 0 else (None, ())
        if self.overlaps:
            self.ranks.share(self._sampler.last_tokens)
        return sampled

    def _sample_here(
        self, logits: Tensor, request_ids: Sequence[str], proposals: Mapping[str, tuple[int, ...]]
    ) -> tuple[Sample | None, tuple[str, ...]]:
        if not self._grammars.bind(request_ids):
            return self._choose(logits, request_ids, None, proposals), ()
        for step in self._submitted:
            self._read(step)
        masks, proposals, unsampled = self._grammars.masks(request_ids, proposals)
        if unsampled:
            places = [place for place, name in enumerate(request_ids) if name not in unsampled]
            if not places:
                return None, unsampled
            logits, request_ids = logits[places], [request_ids[place] for place in places]
        return self._choose(logits, request_ids, masks, proposals), unsampled

    def _choose(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None,
        proposals: Mapping[str, tuple[int, ...]],
    ) -> Sample:
        if proposals:  # then this is a CPU (see `proposes`)
            return cast("HeldTokens", self._sampler).start(logits, request_ids, masks, proposals)
        return self._sampler.start(logits, request_ids, masks)

    def _read(self, step: SubmittedStep) -> None:
        """Waits for a submitted step's tokens, unless the host has them already. Appends them to the requests, reports
        them to `on_tokens`, and advances grammars by them, except for requests that were released after the step was
        submitted, or failed."""
        if step.is_read:
            return
        kept = [token for token in step.read() if token.request_id not in step.released]
        self.append([(token.request_id, token.token) for token in kept])
        self.on_tokens([(token.request_id, token.token) for token in kept])
        unsound = unsound_ends(kept)
        step.failed = unsound | self._grammars.advance([token for token in kept if token.request_id not in unsound])

    def append(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Appends tokens (request id, token id) to running requests, for which they have been sampled, here or on
        another rank."""
        for request_id, token in tokens:
            self._batch.append(request_id, token)

    def collect(self) -> StepResult:
        """Waits for the oldest plan that was submitted and not collected, and returns its result. The result also holds
        the tokens of requests that were released after the plan was submitted. For a request that cannot go on, the
        result has the reason in `failed` in place of the token with which it failed."""
        step = self._submitted.popleft()
        self._read(step)
        pooled, scored = step.read_outputs()
        seconds = self._clock.seconds(step.begun, step.ended)
        drafted, draft_seconds = self._draft_model.follow(step, self._batch)
        return StepResult(
            sampled=step.followed,
            pooled=pooled,
            scored=scored,
            failed=tuple((name, end.refusal) for name, end in step.failed.items()),
            unsampled=step.unsampled,
            masking=self._masking(step),
            mask_seconds=0.0 if self.overlaps else self._grammars.take_seconds(),
            forced=self._forced(step) if self._speculates else (),
            drafted=drafted,
            draft_seconds=draft_seconds,
            load_seconds=self._arena.copies.finish(),
            seconds=seconds if self.overlaps else None,
            launched=step.launched and self.overlaps,
        )

    def _masking(self, step: SubmittedStep) -> tuple[str, ...]:
        names = dict.fromkeys([*(token.request_id for token in step.tokens), *step.unsampled])
        return self._grammars.slow(name for name in names if name not in step.failed and name not in step.released)

    def _forced(self, step: SubmittedStep) -> tuple[tuple[str, tuple[int, ...]], ...]:
        sampled = dict.fromkeys(token.request_id for token in step.tokens)
        return self._grammars.forced(name for name in sampled if name not in step.failed and name not in step.released)

    def connect(self, report: Report) -> None:
        self._report = report

    @property
    def page_memory(self) -> HostPages:
        return self._host_pages

    def start_grammar_workers(self) -> None:
        """Make the child processes that try grammars before they are compiled start some seconds from now, if no
        grammar starts them earlier."""
        self._compiler.start()

    def close(self) -> None:
        """End the child processes that try grammars and the thread of slow masks, and cancel the timer that would keep
        the arena's memory."""
        self._compiler.close()
        self._grammars.close()
        self._arena.close()

    def fetch(self, fetch: AdapterFetch) -> None:
        """Starts to read an adapter into host memory, as a plan that fetches it does, and reports the answer."""
        self._fetcher.begin(fetch)

    def drop(self, adapter_hash: AdapterHash) -> None:
        """Frees the copy of a packed adapter in host memory. Raises KeyError if there is none."""
        self._host.drop(adapter_hash)

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        """Reads and validates a PEFT folder in a loader thread, waits, and returns facts about the adapter. If `claim`,
        which gets the facts, returns True, packs the adapter into host memory, from which plans may load it, and
        reports `AdapterFetched` or `FetchFailed`. Raises ValueError, whose message says why, if the adapter is not one
        of this model or `claim` refuses it. If packing fails, reports `FetchFailed` and raises the error."""
        return self._loaders.submit(self._load_host, path, claim).result()

    def _load_host(self, path: str, claim: Claim) -> HostAdapter:
        started = time.perf_counter()
        folder = self._packer.read(path)
        host = self._packer.check(folder)
        if claim(host):
            try:
                self._host.put(self._packer.pack(folder))
            except Exception as error:  # every claim is answered, also after an error
                self._report(FetchFailed(host.adapter_hash, repr(error)))
                raise
            self._report(AdapterFetched(host.adapter_hash, time.perf_counter() - started))
        return host

    def _fetch(self, plan: StepPlan) -> None:
        for adapter_hash in plan.host_dropped:
            self._host.drop(adapter_hash)
        for adapter_hash in plan.cancelled_fetches:
            self._fetcher.cancel(adapter_hash)
        for fetch in plan.fetches:
            self._fetcher.begin(fetch)

    def _move_pages(self, plan: StepPlan) -> None:
        """Starts the plan's copies of KV pages, in this order: saves to host pages, forks (copies within the arena),
        restores from host pages."""
        pages = self._arena.pages
        if plan.forks:
            self._host_pages.move(pages, plan.saves, ())
            self._arena.fork(_forked(plan))
        self._host_pages.move(pages, () if plan.forks else plan.saves, plan.restores)

    def _release(self, request_id: str) -> None:
        if self._batch.release(request_id):
            self._sampler.remove(request_id)
            self._grammars.remove(request_id)
            self._pooler.remove(request_id)
            self._scorer.remove(request_id)
            self._draft_model.forget(request_id)
        for step in self._submitted:
            step.released.add(request_id)

    def _load(self, plan: StepPlan) -> None:
        """Starts to copy the adapters that a plan loads into their pages. Pages that submitted steps, or the plan's own
        saves and forks, may still use are copied after the kernels launched so far, all others at once. Steps whose
        results have been collected use no pages any more."""
        if not plan.loads:
            return
        own = PageUses(plan.saves, (_forked(plan),))
        used = used_pages([*(step.uses for step in self._submitted), own], self.num_pages)
        for load in plan.loads:
            adapter = self._host.get(load.adapter_hash)
            pages, more = load.pages[: adapter.layout.num_pages], load.pages[adapter.layout.num_pages :]
            busy = used[np.asarray(pages, dtype=np.int64)]
            self._arena.load_adapter(load.adapter_hash, adapter.layout, adapter.blob, pages, busy)
            self._draft_model.load(adapter.draft, load.adapter_hash, more)

    def _uses(self, plan: StepPlan, batch: HostBatch | None) -> PageUses:
        copies = (*plan.saves, *plan.restores)
        if batch is None:
            return PageUses(copies, (_forked(plan),))
        adapters = map(self._arena.adapter_pages, batch.segments.adapter_slots.tolist())
        return PageUses(copies, (_forked(plan), batch.block_tables, *adapters))

    def _admit(self, admission: Admission) -> None:
        name, known = admission.request_id, (admission.tokens, admission.num_prompt)
        self._sampler.add(name, self._grammars.add(name, admission.params, *known), *known)
        self._batch.admit(
            admission, self._arena.adapter_slot(admission.adapter_hash), int(self._sampler.slots([name])[0])
        )
        if admission.pooling is not None:
            self._pooler.add(name, admission.pooling, len(admission.tokens))
        if admission.params.prompt_logprobs is not None:
            self._scorer.add(name, admission.params, admission.tokens[: admission.num_prompt], admission.num_scored)


def _forked(plan: StepPlan) -> NDArray[np.int64]:
    """Returns the plan's forks of KV pages, int64 [number, 2]: source page and target page of each copy."""
    return np.asarray(plan.forks, dtype=np.int64).reshape(-1, 2)
