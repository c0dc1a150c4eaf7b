"""How an answer may use the tools it is offered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolRule:
    required: bool = False
    """An answer is calls, and nothing else."""
    named: str | None = None
    """The one tool that is called, once."""
    strict: frozenset[str] = frozenset()
    """Tools whose arguments follow their schemas even where nothing is required; where calls are, all do."""
    parallel: bool = True
    """An answer may make several calls."""

    @property
    def must_call(self) -> bool:
        return self.required or self.named is not None

    @property
    def several(self) -> bool:
        return self.parallel and self.named is None

    def allows(self, tool: str) -> bool:
        return self.named in (None, tool)

    def binds(self, tool: str) -> bool:
        """Whether a call of it has to follow its schema."""
        return self.must_call or tool in self.strict


FREE = ToolRule()
"""Call or do not, as often as you like."""
