"""How many lines of batches may enter an engine: enough that it never waits for one, not so many that they pile up.

A line that waits in the engine takes part in its order of tenants, deadlines and adapters, but costs memory and can be
taken by no other gateway. So what waits there is kept at what may be needed before somebody looks again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LEAST = 16
"""Lines of its own that a gateway may always have waiting, however much of others waits already."""
MOST = 512
"""Lines that should wait at most."""
HORIZON_S = 1.0
"""Of work at the rate at which lines end: several looks."""
MEMORY = 0.7
"""Weight of what the rate was before, at each look."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The batch lane as a gateway knows it, in lines."""

    running: int = 0
    """In the engine, of every gateway, at the last look."""
    others: int = 0
    """Waiting there at the last look, and not this gateway's."""
    waiting: int = 0
    """Of this gateway: on their way to the engine, or waiting there."""
    begun: int = 0
    """Of this gateway: the engine works on them."""
    rate: float = 0.0
    """Of this gateway: that end in a second."""

    @property
    def target(self) -> int:
        """What should wait: all that run may end in one step, and the next look may be late."""
        return int(min(MOST, max(LEAST, self.running, self.rate * HORIZON_S)))

    def room(self, most: int) -> int:
        """How many more lines may enter now. `most`: that this gateway may have on their way in all."""
        wanted = max(self.target - self.others - self.waiting, LEAST - self.waiting)
        return max(0, min(wanted, most - self.waiting - self.begun))

    def looked(self, running: int, waiting: int, ended: int, seconds: float) -> Flow:
        """After a look at the engine, `seconds` and `ended` lines of this gateway after the last.

        `running`, `waiting`: in the batch lane, of every gateway.
        """
        rate = MEMORY * self.rate + (1 - MEMORY) * ended / seconds if seconds > 0 else self.rate
        return replace(self, running=running, others=max(0, waiting - self.waiting), rate=rate)
