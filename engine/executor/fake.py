"""An executor without a model: every token is a digest of what came before it.

The stream of a request depends on its adapter, its seed and its tokens only, so a run that was batched, preempted or
served from the prefix cache must repeat an undisturbed one token for token. Tests and simulations rest on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from engine.core.types import AdapterId, Admission, PageId, SampledToken, StepPlan, StepResult
from engine.executor.base import HostAdapter


def fake_token(adapter: AdapterId | None, seed: int, tokens: list[int], vocab_size: int) -> int:
    """The token that follows `tokens`."""
    text = f"{adapter or ''}/{seed}/{','.join(map(str, tokens))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") % vocab_size


@dataclass(slots=True)
class FakeSequence:
    """What the executor remembers of an admitted request."""

    admission: Admission
    tokens: list[int]
    pages: list[PageId]


class FakeExecutor:
    """Deterministic and instant. An adapter is any path; its content hash is a digest of the path."""

    def __init__(self, vocab_size: int = 1000, adapter_pages: int = 2) -> None:
        self.vocab_size = vocab_size
        self.adapter_pages = adapter_pages
        self.sequences: dict[str, FakeSequence] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            self.sequences.pop(request_id, None)
        for admission in plan.admitted:
            pages = list(admission.pages)
            self.sequences[admission.request_id] = FakeSequence(admission, list(admission.tokens), pages)
        for chunk in plan.chunks:
            self.sequences[chunk.request_id].pages.extend(chunk.new_pages)
        sampled = tuple(self._sample(chunk.request_id) for chunk in plan.chunks if chunk.samples)
        return StepResult(sampled=sampled, loaded=tuple(load.adapter for load in plan.loads))

    def load_host(self, path: str) -> HostAdapter:
        digest = blake2b(Path(path).name.encode(), digest_size=16).hexdigest()
        return HostAdapter(digest, rank=8, target_modules=("q_proj",), num_pages=self.adapter_pages, num_bytes=0)

    def drop_host(self, adapter: AdapterId) -> None:
        """Nothing is kept in host memory."""

    def _sample(self, request_id: str) -> SampledToken:
        seq = self.sequences[request_id]
        token = fake_token(seq.admission.adapter, seq.admission.params.seed, seq.tokens, self.vocab_size)
        seq.tokens.append(token)
        return SampledToken(request_id, token)
