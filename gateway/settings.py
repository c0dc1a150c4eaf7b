"""Bounds on what one request may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.types import Lane
from gateway.tools.dialects import ToolParserName


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Times in seconds; None: for ever."""

    max_choices: int = 128
    """Answers of one request: prompts x n."""
    max_stop_characters: int = 16_384
    """Of all stop strings of a request together."""
    max_listed_ids: int = 1024
    """Token ids in stop_token_ids, and in logit_bias: every answer carries them to the engine."""
    request_timeout: float | None = 600.0
    first_token_timeout: float | None = 120.0
    """In the interactive lane. Batch work may wait as long as the whole request may take."""
    engine_wait: float = 60.0
    """A request may be without an engine process for so long, each time that one ends."""
    lane_capacity: Mapping[Lane, int] = field(default_factory=dict)
    """Requests of a lane that may be on their way at once; a lane not named has no bound."""
    tool_parser: ToolParserName = "auto"
    """How the model writes calls of tools; auto: as its chat template does."""
