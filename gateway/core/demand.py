"""What interactive requests have lately wanted of a scope's limits, and how much of these a batch may take beside them.

Limits per minute hold a minute's worth, which a batch would keep full: whatever drains, the next line takes, and a chat
that comes for it finds nothing. A meter that is kept low drains as much as a full one, so batch lines leave most of it
free and lose little; only what interactive requests really use is lost to them. Slots are not filled again by time, so
of them batch lines leave what interactive requests wanted, and take the rest. While nothing runs in the scope, a single
line may run nevertheless: otherwise a burst of interactive requests that lasts a second would keep batches from every
slot for two minutes. For each interactive request that is refused while such a line runs, OWED_ANSWERS interactive
requests must get a slot before the next line may run in this way.

Requests that a limit refused have wanted it, too: otherwise a batch that leaves nothing would never learn of them. The
Lua scripts of the Redis limiter compute the same.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

RECENT_MINUTES = 60
"""Minutes after its last interactive request for which a scope's batch lines leave room for the next one."""
BATCH_PART = 0.25
"""Share of what interactive requests leave of a limit per minute that batch lines may fill. A tenant whose chats wanted
40 % of a limit in one minute and 200 % in the next then gets 94 % of the answers that it would get without a batch."""
PROTECTED = 0.9
"""Share of what interactive requests want that must fit beside a single line, however long."""
OWED_ANSWERS = 9
"""Number of interactive requests that must get a slot, for each one refused while a line had one, before a line may
again run on slots that interactive requests have lately wanted: so these lose a tenth of their answers at most."""
MOST_OWED = 90
"""Number of answers owed at most. A client that tries again and again while one long line runs counts only so far."""


class Demand(Struct, frozen=True, array_like=True):
    """What interactive requests wanted in one scope: sums of requests and of tokens, and the most that ran at once."""

    minute: int = -1
    """Minute of the last interactive request, counted from 1970; negative if there was none."""
    requests: int = 0
    tokens: int = 0
    running: int = 0
    requests_before: int = 0
    """What was wanted in the minute before `minute`, as the two fields below."""
    tokens_before: int = 0
    running_before: int = 0
    owed: int = 0
    """Number of interactive requests that must get a slot before a line may run on one that they have lately wanted."""

    @property
    def now(self) -> tuple[int, int, int]:
        """Requests, tokens and running requests of `minute`; `before` has those of the minute before it."""
        return self.requests, self.tokens, self.running

    @property
    def before(self) -> tuple[int, int, int]:
        return self.requests_before, self.tokens_before, self.running_before

    def wanted(self, which: int, minute: int) -> int:
        """Return how much of the limit with the index `which` was wanted lately: in `minute` or in the one before,
        whichever is more."""
        age = max(0, minute - self.minute)
        return max(self.now[which], self.before[which]) if not age else self.now[which] if age == 1 else 0

    def is_recent(self, minute: int) -> bool:
        return self.minute >= 0 and minute - self.minute <= RECENT_MINUTES

    def plus(self, minute: int, requests: int, tokens: int, running: int, owed: int) -> Demand:
        """Return a copy with more requests and tokens wanted in `minute`, with `running` of them at once, and with
        `owed` more (if negative, fewer) answers owed."""
        age = max(0, minute - self.minute)
        now = self.now if not age else (0, 0, 0)
        before = self.before if not age else self.now if age == 1 else (0, 0, 0)
        owed = min(MOST_OWED, max(0, self.owed + owed))
        return Demand(minute, now[0] + requests, now[1] + tokens, max(now[2], running), *before, owed)

    def corrected(self, minute: int, requests: int, tokens: int) -> Demand:
        """Return a copy in which a request of `minute` wanted so much more or less (negative) than it reserved."""
        if minute == self.minute:
            return replace(self, requests=max(0, self.requests + requests), tokens=max(0, self.tokens + tokens))
        if minute != self.minute - 1:
            return self
        before = max(0, self.requests_before + requests), max(0, self.tokens_before + tokens)
        return replace(self, requests_before=before[0], tokens_before=before[1])


def batch_ceiling(limit: int, wanted: int) -> float:
    """Return how much of a limit per minute may be in use after a batch line, where interactive requests have lately
    wanted `wanted`."""
    return max(0, limit - wanted) * BATCH_PART


def fits_alone(limit: int, wanted: int, amount: int) -> bool:
    """Return whether a batch line may use `amount` of a limit per minute of which nothing is in use."""
    return amount + wanted * PROTECTED <= limit
