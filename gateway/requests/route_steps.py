"""Tries the members of a virtual model for one request, in the steps that the policy has planned, until one answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

from msgspec import UNSET
from msgspec.structs import replace

from engine.core.messages.requests import Lane, SamplingParams
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Principal
from gateway.requests.held_answer import HeldRun
from gateway.requests.member_run import MemberRun
from gateway.requests.members import Members
from gateway.requests.prompt_features import last_question
from gateway.requests.route_outcome import discarded_runs
from gateway.requests.terms import RunTerms
from gateway.requests.types import DEFAULTED, Chat, GenerateRequest, Generation, GenerationChunk, MemberChoice
from gateway.virtual_models.acceptance import Acceptance, HeldAnswer, Verifier, agree
from gateway.virtual_models.policy import Step

MOVES = frozenset(
    (
        Fault.ADAPTER_UNAVAILABLE,
        Fault.CONTEXT_LENGTH_EXCEEDED,
        Fault.ENGINE_UNAVAILABLE,
        Fault.LANE_QUEUE_FULL,
        Fault.MODEL_NOT_FOUND,
        Fault.PREEMPTED,
        Fault.QUEUE_TIMEOUT,
        Fault.UNSUPPORTED_PARAMETER,
        Fault.UPSTREAM_UNAVAILABLE,
    )
)
"""Faults of a member for which the next one is tried: it lacks capacity, or something that this request needs. Limits
of the tenant, deadlines, and requests that crash engines are not among them: they end the steps."""
ASIDE = RunTerms(engine_wait=0.0)
"""The terms of a run that only judges an answer, which can do without it."""
MOST_DOUBTS = 2
"""Number of engine processes, of all members together, that may have crashed because of a request until no further
member gets it. After the first one, it is a suspect (`gateway.requests.answer.crash_trial`)."""


class StepsRun:
    """Runs the members for one request for a virtual model, and keeps the record of their runs."""

    def __init__(
        self,
        members: Members,
        principal: Principal,
        request: GenerateRequest,
        started: float,
        runs: list[MemberRun],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """`started` is when the request arrived, on the gateway's clock. `runs` are those that the policy needed to
        plan the steps, such as one that computed the prompt's vector. `begun` is called when the first member has begun
        to work."""
        self._members = members
        self._principal = principal
        self._request = request
        self._lane = principal.tenant.effective_lane(request.lane)
        self._started = started
        self._begun = begun
        self._has_begun = False
        self.runs = runs
        """All runs so far, in order."""
        self.answering: MemberRun | None = None
        """The run whose answer the caller gets; None until that is known."""

    async def begin(self, stack: AsyncExitStack, steps: Sequence[Step]) -> Generation:
        """Take the steps until one answers, and return its generation, which `stack` closes. If all later steps fail,
        the last held answer is returned although it failed its tests. Raises ApiError: the last step's error, or
        DEADLINE_EXCEEDED if no answer was held and the last step's patience has run out."""
        held: HeldRun | None = None
        trouble = ""
        for number, step in enumerate(steps, 1):
            if self.doubts >= MOST_DOUBTS:
                if held is None:
                    raise ApiError(Fault.ENGINE_CRASHED, "two engines ended with this request; it is not tried again")
                return self._released(held, trouble)
            left = len(steps) - number
            can_move = left > 0 or held is not None
            # An answer that fails its tests still counts; a member that fails before its first token does not.
            reserved, wait = 1 + left if step.accept else 1, 0.0 if can_move else None
            run = self._new_run(self._request, step.member, trouble or step.reason, RunTerms(wait, reserved))
            try:
                if step.accept is None:
                    return self._answered(await self._first_output(stack, run, wait=can_move), run)
                found = await self._hold(run, step, step.accept)
                held = found or held
                trouble = "slow" if found is None else await self._failed_test(found, step.accept)
            except ApiError as error:
                is_last = left == 0 or error.fault not in MOVES or self.doubts >= MOST_DOUBTS
                if is_last and held is None:
                    raise
                trouble = error.fault.name.lower()
            else:
                is_last = left == 0 or not trouble
            if is_last and held is not None:
                return self._released(held, trouble)
        raise ApiError(Fault.DEADLINE_EXCEEDED, "no member of the virtual model answered in time; try again")

    @property
    def doubts(self) -> int:
        """Number of engine processes that may have crashed because of the request."""
        return sum(run.record.doubts for run in self.runs)

    def _new_run(
        self, request: GenerateRequest, member: str, reason: str, terms: RunTerms, *, for_policy: bool = False
    ) -> MemberRun:
        """Return a run on these terms, except that a request that an earlier run has counted is not counted again."""
        terms = replace(terms, is_counted=any(run.record.is_granted for run in self.runs))
        run = self._members.new_run(
            self._principal, request, member, reason, terms, started=self._started, for_policy=for_policy
        )
        run.record.suspect = self.doubts > 0
        self.runs.append(run)
        return run

    async def _first_output(self, stack: AsyncExitStack, run: MemberRun, *, wait: bool) -> Generation:
        """Begin a run, which `stack` ends, and return its generation. `wait` waits for the first output, so that an
        earlier failure is raised here, where the next step can still be taken."""
        async with AsyncExitStack() as own:
            generation = await own.enter_async_context(self._members.serve(self._principal, self._request, run))
            self._begin()
            if wait:
                await _await_output(generation)
            stack.push_async_exit(own.pop_all())
        return generation

    async def _hold(self, run: MemberRun, step: Step, accept: Acceptance) -> HeldRun | None:
        """Run a member to the end of its answers, and return them. None means that an interactive caller waits for a
        stream and the answers took longer than the step's patience."""
        request = self._request
        if accept.logprob is not None and request.sampling.logprobs is None:
            request = replace(request, sampling=request.sampling._replace(logprobs=0))
        is_bounded = not request.coalesce and self._lane is Lane.INTERACTIVE
        try:
            async with asyncio.timeout(step.patience_s if is_bounded else None):
                return await self._complete(run, replace(request, coalesce=True))
        except TimeoutError:
            return None

    async def _complete(self, run: MemberRun, request: GenerateRequest) -> HeldRun:
        async with self._members.serve(self._principal, request, run) as generation:
            self._begin()
            chunks = [chunk async for chunk in generation]
        return HeldRun(run, generation.admitted, chunks)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begun()

    async def _failed_test(self, held: HeldRun, accept: Acceptance) -> str:
        """Return the name of the first acceptance test of `accept` that the held answers fail, in one word; empty means
        that they pass all."""
        offering = self._request.offering
        answers = held.answers(offering.tools if offering else ())
        if failure := accept.failure(answers, self._request.sampling.grammar):
            return failure
        if accept.agreement and not await self._agrees(held, answers, accept.agreement_temperature):
            return "disagreement"
        if accept.verifier is not None and not await self._verified(answers, accept.verifier):
            return "verifier"
        return ""

    async def _agrees(self, held: HeldRun, answers: Sequence[HeldAnswer], temperature: float) -> bool:
        """Let the member of the held answers answer the request once more, and return whether each new answer says the
        same as the held one (`agree`)."""
        request, offering = self._request, self._request.offering
        sampling = request.sampling._replace(temperature=max(request.sampling.temperature, temperature))
        seed = None if request.seed is None else request.seed + len(answers)
        defaulted = request.defaulted - {"temperature"}
        other = replace(request, sampling=sampling, defaulted=defaulted, seed=seed, coalesce=True)
        run = self._new_run(other, held.run.member, "agreement", ASIDE)
        second = (await self._complete(run, other)).answers(offering.tools if offering else ())
        return all(agree(one, two) for one, two in zip(answers, second, strict=True))

    async def _verified(self, answers: Sequence[HeldAnswer], verifier: Verifier) -> bool:
        """Return whether the verifier accepts all answers. It sees the last user message of an answer's prompt and the
        answer's text."""
        for number, answer in enumerate(answers):
            question = last_question(self._request.prompts[number // self._request.n])
            said = verifier.question(question, answer.text or str(list(answer.calls)))
            judgement = GenerateRequest(
                model=self._request.model,
                prompts=(Chat(({"role": "user", "content": said},)),),
                request_id=self._request.request_id,
                ingress=self._request.ingress,
                sampling=SamplingParams(temperature=0.0),
                defaulted=DEFAULTED - {"temperature"},
                max_tokens=1,
                coalesce=True,
                lane=self._lane,
                deadline=self._request.deadline,
                ignore_server_timeout=self._request.ignore_server_timeout,
                deferred=self._request.deferred,
            )
            run = self._new_run(judgement, verifier.member, "judge", ASIDE, for_policy=True)
            held = await self._complete(run, judgement)
            if not verifier.accepts("".join(chunk.text or chunk.reasoning for chunk in held.chunks)):
                return False
        return True

    def _released(self, held: HeldRun, trouble: str) -> Generation:
        """Return the generation of a held answer. `trouble` is why no later one is sent; empty if it was accepted."""
        held.run.reason = trouble or "accepted"
        return self._answered(held.replay(with_logprobs=self._request.sampling.logprobs is not None), held.run)

    def _answered(self, generation: Generation, run: MemberRun) -> Generation:
        """Note that `run` is the one that answers, and return its generation, which now tells the caller the member and
        the reason."""
        self.answering = run
        discarded = discarded_runs(self.runs, run, self._request.model.model)
        choice = MemberChoice(run.member, run.reason, discarded or UNSET)
        generation.admitted = replace(generation.admitted, member=choice)
        return generation


async def _await_output(generation: Generation) -> None:
    """Wait for a generation's first chunk with output or an end, so that an earlier failure is raised here. The
    generation still yields the chunks that were read."""
    read: list[GenerationChunk] = []
    async for chunk in generation:
        read.append(chunk)
        if chunk.has_output or chunk.finish_reason is not None:
            break
    generation.rest = _chained(read, generation.rest)


async def _chained(
    first: Sequence[GenerationChunk], rest: AsyncIterator[GenerationChunk]
) -> AsyncIterator[GenerationChunk]:
    for chunk in first:
        yield chunk
    async for chunk in rest:
        yield chunk
