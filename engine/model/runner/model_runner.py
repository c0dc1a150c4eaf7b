"""Executes plans with a loaded model on one device, without knowing why the plans were made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch, Launch, StepPlan, StepResult
from engine.executor.base import Claim, Report
from engine.model.memory.host_pages import HostPages
from engine.model.runner.facts import ModelFacts
from engine.model.runner.loading import Loaded
from engine.model.runner.requests import RunningRequests
from engine.model.runner.step_memory import StepMemory
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
        drafted, draft_seconds = self.loaded.draft_model.follow(step, self._requests.batch)
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
