"""A fake executor whose pages hold something: a page that was moved wrongly changes the tokens of its readers.

In place of KV, a page holds 4 bytes for each token, a digest of the adapter and all tokens up to this one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from hashlib import blake2b

from engine.core.messages.requests import PageId
from engine.core.messages.step import Launch, SampledToken, ScheduledChunk, StepPlan, StepResult
from engine.executor.fake import FakeExecutor, FakePages

DIGEST_BYTES = 4
PAGE_TOKENS = FakePages.page_bytes // DIGEST_BYTES
"""Tokens of a page: the `block_size` of a deployment's engines."""


class PagedExecutor(FakeExecutor):
    """Copies pages as plans say. A sequence in whose pages a byte is wrong gets another token than it should."""

    def __init__(self) -> None:
        super().__init__()
        self._arena: dict[PageId, bytearray] = defaultdict(lambda: bytearray(FakePages.page_bytes))
        self._digests: dict[str, bytearray] = {}
        """What the pages of each sequence must hold, without what lies after its last token."""

    def submit(self, plan: StepPlan) -> Launch:
        """Copy pages now: other engines' pages may be written to host pages from the next plan on."""
        for page, host_page in plan.saves:
            self.pages.page(host_page)[:] = self._arena[page]
        sources = [bytes(self._arena[fork.source]) for fork in plan.forks]
        for fork, content in zip(plan.forks, sources, strict=True):
            self._arena[fork.page][:] = content
        for page, host_page in plan.restores:
            self._arena[page][:] = self.pages.page(host_page)
        return super().submit(plan)

    def compute(self, plan: StepPlan) -> StepResult:
        for request_id in (*plan.released, *(admission.request_id for admission in plan.admitted)):
            self._digests.pop(request_id, None)
        result = super().compute(plan)
        for chunk in plan.chunks:
            if not (chunk.samples and self._generates(chunk.request_id)):
                self._attend(chunk)
        return result

    def _sample(self, chunk: ScheduledChunk) -> list[SampledToken]:
        is_right = self._attend(chunk)
        *first, last = super()._sample(chunk)
        return [*first, last if is_right else last._replace(token=(last.token + 1) % self.vocab_size)]

    def _attend(self, chunk: ScheduledChunk) -> bool:
        """Read the pages before a chunk and write those of its tokens. Returns whether what was read is right."""
        seq, start, end = self.sequences[chunk.request_id], chunk.start, chunk.start + chunk.num_tokens
        digests = self._digests.setdefault(chunk.request_id, bytearray())
        del digests[DIGEST_BYTES * start :]
        adapter = (seq.admission.adapter_hash or "").encode()
        for token in [*seq.tokens, *chunk.proposals][len(digests) // DIGEST_BYTES : end]:
            text = digests[-DIGEST_BYTES:] + token.to_bytes(4, "little") + adapter
            digests += blake2b(text, digest_size=DIGEST_BYTES).digest()
        wrong = []
        for number, page in enumerate(seq.pages[: -(-end // PAGE_TOKENS)]):
            content, begin = self._arena[page], number * FakePages.page_bytes
            wanted = digests[begin : begin + FakePages.page_bytes]
            known = max(0, min(len(content), DIGEST_BYTES * start - begin))
            if content[:known] != wanted[:known]:
                wrong.append(number)
            content[known : len(wanted)] = wanted[known:]
        if wrong:
            print(f"{chunk.request_id}: pages {wrong} of {len(seq.pages)} are wrong", file=sys.stderr, flush=True)
        return not wrong
