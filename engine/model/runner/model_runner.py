"""Executes plans with a loaded model on one device, without knowing why the plans were made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch, Launch, StepPlan, StepResult
from engine.executor.base import Claim, Report
from engine.model.adapters.fetcher import Fetcher
from engine.model.batch.rows import HostBatch
from engine.model.memory.arena import Arena, PageUses, used_pages
from engine.model.memory.host_pages import HostPages
from engine.model.memory.host_store import HostStore
from engine.model.runner.draft_model import DraftModel, NoDraftModel
from engine.model.runner.facts import ModelFacts
from engine.model.runner.loading import Loaded
from engine.model.runner.requests import RunningRequests
from engine.model.runner.submitted import Outputs, SubmittedStep, make_clock

OnTokens = Callable[[Sequence[tuple[str, int]]], None]
"""Callback that gets (request id, token id) of sampled tokens once the host knows them."""


class ModelRunner:
    """An `Executor` that runs a loaded model on one device. Only `load_host` may be called from threads other than the
    step loop."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        """The model and the parts that compute its steps."""
        self.overlaps = loaded.facts.overlaps
        """True means that steps are planned while the step before is computed (see `ModelFacts.overlaps`)."""
        self.on_tokens: OnTokens = lambda tokens: None
        """Called when the host learns the tokens of a step."""
        self._requests = RunningRequests(loaded)
        self._memory = StepMemory(
            loaded.arena, loaded.host_pages, loaded.host_adapters, loaded.fetcher, loaded.draft_model
        )
        self._steps = loaded.steps
        self._speculates = loaded.facts.speculates
        self._clock = make_clock(loaded.facts.device)
        self._submitted: deque[SubmittedStep] = deque()

    @property
    def facts(self) -> ModelFacts:
        return self.loaded.facts

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Launch:
        """Start to execute a plan, after those submitted before, in the order that `StepPlan` says. Return whether the
        step was late, because the device had run out of work, and the seconds until it reached the device."""
        # A CPU has computed the step when this returns. With grammars, the host waits for the tokens of the steps
        # before while the GPU computes the logits.
        begun, started = self._clock.mark(), time.perf_counter()
        self._memory.copy_pages(plan)
        self._release(plan.released)
        self._memory.move_adapters(plan, (step.uses for step in self._submitted))
        self._requests.begin(plan)
        batch = self._requests.batch.gather(plan.chunks) if plan.chunks else None
        rung = self._steps.find(batch) if batch else None
        launched = batch is not None and rung is None
        launch = Launch(self._is_idle(), time.perf_counter() - started)
        output = self._steps.compute(batch, rung) if batch else None
        if not launched:
            launch = Launch(self._is_idle(), time.perf_counter() - started)
        outputs = Outputs()
        if batch and output:  # stages other than the first have no output
            outputs = self._requests.read(output, batch, self._catch_up, share=self.overlaps)
        self.loaded.arena.copies.close()
        uses, ended = self._memory.uses(plan, batch), self._clock.mark()
        self._submitted.append(SubmittedStep(outputs, begun, ended, uses, launched, plan.drafts))
        return launch

    def _release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._requests.release(request_id)
        for step in self._submitted:
            step.released.update(request_ids)

    def _is_idle(self) -> bool:
        """Return whether the device has run out of work: it has finished the plan that was submitted last, and the host
        has not collected that plan yet."""
        return bool(self._submitted) and self._clock.has_passed(self._submitted[-1].ended)

    def _catch_up(self) -> None:
        """Wait for the tokens of all steps submitted so far."""
        for step in self._submitted:
            self._read(step)

    def _read(self, step: SubmittedStep) -> None:
        """Wait for a submitted step's tokens, unless the host has them already. Append them to the requests, report
        them to `on_tokens`, and advance grammars by them, except for requests that were released after the step was
        submitted, or failed."""
        if step.is_read:
            return
        kept = [token for token in step.read() if token.request_id not in step.released]
        tokens = [(token.request_id, token.token) for token in kept]
        self._requests.append(tokens)
        self.on_tokens(tokens)
        step.failed = self._requests.advance(kept)

    def append(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Append tokens (request id, token id) that another rank has sampled to running requests."""
        self._requests.append(tokens)

    def collect(self) -> StepResult:
        """Wait for the oldest plan that was not collected, and return its result, with the tokens of requests released
        meanwhile. `failed` has the reason of each request that cannot go on."""
        step = self._submitted.popleft()
        self._read(step)
        pooled, scored = step.read_outputs()
        seconds = self._clock.seconds(step.begun, step.ended)
        follow = self.loaded.draft_model.follow
        drafted, draft_seconds = follow(step, self._requests.batch) if step.drafts else ((), 0.0)
        return StepResult(
            sampled=step.followed,
            pooled=pooled,
            scored=scored,
            failed=tuple((name, end.refusal) for name, end in step.failed.items()),
            unsampled=step.outputs.unsampled,
            masking=self._requests.masking(step),
            mask_seconds=0.0 if self.overlaps else self.loaded.grammars.take_seconds(),
            forced=self._requests.forced(step) if self._speculates else (),
            drafted=drafted,
            draft_seconds=draft_seconds,
            load_seconds=self.loaded.arena.copies.finish(),
            seconds=seconds if self.overlaps else None,
            launched=step.launched and self.overlaps,
        )

    def connect(self, report: Report) -> None:
        self.loaded.answers.report = report

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        return self.loaded.fetcher.load(path, claim)

    def fetch(self, fetch: AdapterFetch) -> None:
        """Start to read an adapter into host memory, as a plan that fetches it does, and report the answer."""
        self.loaded.fetcher.begin(fetch)

    def drop(self, adapter_hash: AdapterHash) -> None:
        """Free the copy of a packed adapter in host memory. Raises KeyError if there is none."""
        self.loaded.host_adapters.drop(adapter_hash)

    @property
    def page_memory(self) -> HostPages:
        return self.loaded.host_pages

    def close(self) -> None:
        """End the processes and the thread of grammars, and cancel the timer that would keep the arena's memory."""
        self.loaded.grammars.close()
        self.loaded.arena.close()


class StepMemory:
    """Carries out the part of plans that concerns memory: KV pages and adapters, on the device and on the host."""

    def __init__(
        self,
        arena: Arena,
        host_pages: HostPages,
        host_adapters: HostStore,
        fetcher: Fetcher,
        draft_model: DraftModel | NoDraftModel,
    ) -> None:
        self._arena = arena
        self._host_pages = host_pages
        self._host_adapters = host_adapters
        self._fetcher = fetcher
        self._draft_model = draft_model

    def copy_pages(self, plan: StepPlan) -> None:
        """Start the plan's copies of KV pages, in this order: saves to host pages, forks (copies within the arena),
        restores from host pages."""
        pages, saves = self._arena.pages, plan.saves
        if plan.forks:
            self._host_pages.move(pages, saves, ())
            self._arena.fork(_forked(plan))
            saves = ()
        if saves or plan.restores:
            self._host_pages.move(pages, saves, plan.restores)

    def move_adapters(self, plan: StepPlan, uses: Iterable[PageUses]) -> None:
        """Evict and load adapters, drop their host copies, and cancel and start fetches. `uses` are the pages of the
        steps that were submitted and not collected."""
        for adapter_hash in plan.adapters.evicted:
            self._arena.evict_adapter(adapter_hash)
            self._draft_model.evict(adapter_hash)
        if plan.adapters.loads:
            self._load(plan, uses)
        for adapter_hash in plan.adapters.dropped:
            self._host_adapters.drop(adapter_hash)
        for adapter_hash in plan.adapters.cancelled:
            self._fetcher.cancel(adapter_hash)
        for fetch in plan.adapters.fetches:
            self._fetcher.begin(fetch)

    def uses(self, plan: StepPlan, batch: HostBatch | None) -> PageUses:
        """Return the pages that a plan's step, with the rows `batch`, reads or writes."""
        copies = (*plan.saves, *plan.restores)
        if batch is None:
            return PageUses(copies, (_forked(plan),))
        adapters = map(self._arena.adapter_pages, batch.segments.adapter_slots.tolist())
        return PageUses(copies, (_forked(plan), batch.block_tables, *adapters))

    def _load(self, plan: StepPlan, uses: Iterable[PageUses]) -> None:
        """Start to copy the adapters that a plan loads into their pages. Those that submitted steps, or the plan's own
        saves and forks, may still use are copied after the kernels launched so far."""
        own = PageUses(plan.saves, (_forked(plan),))
        used = used_pages([*uses, own], len(self._arena.pages))
        for load in plan.adapters.loads:
            adapter = self._host_adapters.get(load.adapter_hash)
            pages, more = load.pages[: adapter.layout.num_pages], load.pages[adapter.layout.num_pages :]
            busy = used[np.asarray(pages, dtype=np.int64)]
            self._arena.load_adapter(load.adapter_hash, adapter.layout, adapter.blob, pages, busy)
            self._draft_model.load(adapter.draft, load.adapter_hash, more)


def _forked(plan: StepPlan) -> NDArray[np.int64]:
    """Return the plan's forks of KV pages, int64 [number, 2]: source page and target page of each copy."""
    return np.asarray(plan.forks, dtype=np.int64).reshape(-1, 2)
