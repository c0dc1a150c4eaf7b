"""Rules for how an answer may use the tools that it is offered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolRule:
    """Rule for one request: whether and how an answer may or must call the offered tools."""

    required: bool = False
    """True means that an answer must consist of tool calls only."""
    named: str | None = None
    """Name of the one tool that must be called, exactly once. None means that no tool is prescribed."""
    strict: frozenset[str] = frozenset()
    """Tools whose arguments must follow their schemas even if calls are optional. If calls are required, all must."""
    parallel: bool = True
    """True means that an answer may make several tool calls."""

    @property
    def must_call(self) -> bool:
        return self.required or self.named is not None

    @property
    def several(self) -> bool:
        return self.parallel and self.named is None

    def allows(self, tool: str) -> bool:
        return self.named in (None, tool)

    def binds(self, tool: str) -> bool:
        """Return whether a call's arguments must follow the tool's schema: it is strict, or calls are required."""
        return self.must_call or tool in self.strict


FREE = ToolRule()
"""Rule that allows any number of tool calls, including none."""
