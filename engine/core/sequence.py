"""A request on its way through the engine: the one word of the core that changes while it is used."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.types import Lane, PageId, PrefixKey, Request

TRIAL_TOKENS = 8
"""New tokens after which a suspect request is cleared. The crash came some tokens behind the last one that the gateway
was told of: the events of the last steps died with the process."""
TRIAL_TOKENS_HELD = 32
"""The same for a request whose tokens are held back and told together, so that more of them were lost."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: `num_computed` catching up with `tokens`. Mutated by `commit.py` alone, and its device time
    by the ledger."""

    request: Request
    tokens: list[int]
    """Prompt and everything generated so far, as far as it is known."""
    num_pending: int = 0
    """Tokens behind those that steps under way are choosing: known to come, but not which."""
    lane: Lane = Lane.INTERACTIVE
    """The request's lane, or the only one where a policy knows no lanes."""
    num_computed: int = 0
    """Leading tokens whose K and V are in `pages`, or will be once the steps under way have ended."""
    pages: list[PageId] = field(default_factory=list)
    page_keys: list[PrefixKey] = field(default_factory=list)
    """Prefix keys of the leading full pages of `tokens` (see prefix.py), extended as far as somebody asked."""
    realm: str = ""
    """Sequences of one realm may share prefixes."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it first ran."""
    num_preemptions: int = 0
    num_lost: int = 0
    """Tokens that were computed when it was last preempted."""
    num_paid: int = 0
    """Most tokens that were ever computed when it was preempted: its tenant does not pay for them again."""
    num_saved: int = 0
    """Leading full pages that were copied to the host."""
    due: float = 0.0
    """When its next token should be there, in seconds on the engine's clock."""
    device_seconds: float = 0.0
    """Its part of the steps it was in, what was computed twice included."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def on_trial(self) -> bool:
        """Return whether the next tokens need steps of their own, because the request may crash the engine."""
        if not self.request.suspect:
            return False
        needed = TRIAL_TOKENS_HELD if self.request.whole else TRIAL_TOKENS
        return self.num_generated - len(self.request.produced) < needed

    @property
    def expected_length(self) -> int:
        """Tokens of the prompt and of the answer, as long as the answer may be or, under a ceiling, probably is."""
        request = self.request
        expected = request.expected_tokens
        return len(request.prompt) + (request.params.max_tokens if expected is None else expected)

    @property
    def num_tokens(self) -> int:
        """Known and pending: how many there will be once the steps under way have ended, unless it ends with them."""
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Tokens not computed yet: 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def waits_for_token(self) -> bool:
        """Nothing can be planned for it before its pending token is known: it ends with that one, as it may have no
        more, or the token says what its grammar allows next."""
        params = self.request.params
        is_last = self.num_generated + self.num_pending >= params.max_tokens
        return self.num_pending > 0 and (is_last or params.grammar is not None)
