"""The running requests of a runner: what is kept of each from its admission to its release, and what a step gives for
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from engine.core.messages.step import Admission, SampledToken, StepPlan
from engine.model.batch.rows import HostBatch
from engine.model.batch.state import BatchState
from engine.model.decode.decoder import StepOutput
from engine.model.runner.loading import Loaded
from engine.model.runner.submitted import Outputs, SubmittedStep
from engine.model.sample.slot_sampler import Sample
from engine.model.sample.soundness import AnswerEnd, unsound_ends


class RunningRequests:
    """The running requests: their tokens and pages on the host, and the state of each in the sampler, the grammars, the
    pooler, the scorer and the draft model."""

    def __init__(self, loaded: Loaded) -> None:
        facts = loaded.facts
        self.batch = BatchState(facts.config.max_seqs, facts.max_model_len, facts.config.block_size)
        """Tokens and block tables, from which the rows of steps are gathered."""
        self._loaded = loaded
        self._sampler, self._grammars = loaded.sampler, loaded.grammars
        self._pooler, self._scorer = loaded.pooler, loaded.scorer

    def release(self, request_id: str) -> None:
        """Forget a request. Does nothing if it is not known, because it was aborted before it ran."""
        if self.batch.release(request_id):
            self._sampler.remove(request_id)
            self._grammars.remove(request_id)
            self._pooler.remove(request_id)
            self._scorer.remove(request_id)
            self._loaded.draft_model.forget(request_id)

    def begin(self, plan: StepPlan) -> None:
        """Forget and prepare grammars, admit the requests that a plan starts, and begin its masks."""
        self._grammars.prepare(plan.forgotten, plan.prepared)
        for request_id in plan.undrafted:
            self._loaded.draft_model.forget(request_id)
        for admission in plan.admitted:
            self._admit(admission)
        self._grammars.begin(plan.masks)

    def _admit(self, admission: Admission) -> None:
        name, known = admission.request_id, (admission.tokens, admission.num_prompt)
        self._sampler.add(name, self._grammars.add(name, admission.params, *known), *known)
        adapter_slot = self._loaded.arena.adapter_slot(admission.adapter_hash)
        self.batch.admit(admission, adapter_slot, int(self._sampler.slots([name])[0]))
        if admission.pooling is not None:
            self._pooler.add(name, admission.pooling, len(admission.tokens))
        if admission.params.prompt_logprobs is not None:
            self._scorer.add(name, admission.params, admission.tokens[: admission.num_prompt], admission.num_scored)

    def read(self, output: StepOutput, batch: HostBatch, catch_up: Callable[[], None], *, share: bool) -> Outputs:
        """Start to read tokens, vectors and prompt logprobs out of a step's output. Only rank 0 samples; `share` means
        that the other ranks' devices get the tokens here, because the next step is launched before the host knows
        them."""
        sample: Sample | None = None
        unsampled: tuple[str, ...] = ()
        if batch.sample_ids:
            if self._loaded.ranks.rank == 0:
                sample, unsampled = self._sample(output.logits, batch, catch_up)
            if share:
                self._loaded.ranks.share(self._sampler.last_tokens)
        vectors = self._pooler.start(output.residual, batch.pooled) if batch.pooled else None
        scores = self._scorer.start(output.residual, batch.scored, output.tokens) if batch.scored else None
        return Outputs(sample, unsampled, vectors, scores)

    def _sample(
        self, logits: Tensor, batch: HostBatch, catch_up: Callable[[], None]
    ) -> tuple[Sample | None, tuple[str, ...]]:
        """Sample the next token of each request from its row of logits, after `catch_up` has waited for the tokens that
        masks need. Return the sample, or None, and the requests whose masks are not there."""
        names: Sequence[str] = batch.sample_ids
        if not self._grammars.bind(names):
            return self._sampler.start(logits, names, None, batch.proposals), ()
        catch_up()
        masks, proposals, unsampled = self._grammars.masks(names, batch.proposals)
        if unsampled:
            places = [place for place, name in enumerate(names) if name not in unsampled]
            if not places:
                return None, unsampled
            logits, names = logits[places], [names[place] for place in places]
        return self._sampler.start(logits, names, masks, proposals), unsampled

    def append(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Append tokens (request id, token id) to running requests, for which they have been sampled, here or on
        another rank."""
        for request_id, token in tokens:
            self.batch.append(request_id, token)

    def advance(self, sampled: Sequence[SampledToken]) -> dict[str, AnswerEnd]:
        """Advance grammars by sampled tokens. Return why requests cannot go on: their logits are unsound, or their
        grammars cannot be followed any further."""
        unsound = unsound_ends(sampled)
        return unsound | self._grammars.advance([token for token in sampled if token.request_id not in unsound])

    def masking(self, step: SubmittedStep) -> tuple[str, ...]:
        """Return the requests of a step whose next mask has to be computed beside the steps."""
        names = dict.fromkeys([*(token.request_id for token in step.tokens), *step.outputs.unsampled])
        return self._grammars.slow(filter(step.goes_on, names))

    def forced(self, step: SubmittedStep) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the tokens that the grammars of a step's requests force to follow (see `StepResult.forced`)."""
        return self._grammars.forced(filter(step.goes_on, dict.fromkeys(token.request_id for token in step.tokens)))
