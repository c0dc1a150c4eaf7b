"""Passes what is known about an engine process that has ended to the next one, through the supervisor of both.

An engine process knows nothing about its predecessor. The supervisor knows how the predecessor ended and, from its
pulse file, which requests it was computing. The supervisor passes this on to the new process, which reports it to the
gateways when they connect, so that they know which of their requests may have caused a crash.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format

from engine.core.state import EngineState
from engine.pb import engine_pb2 as pb
from engine.process.pulse import Pulse

CPU_PATIENCE_S = 5.0
"""Seconds that one iteration of the step loop may take on a CPU before the engine counts as hung. A step takes at most
a quarter of a second, or a few seconds on a machine under load."""
GPU_PATIENCE_S = 30.0
"""Seconds that one iteration may take on a GPU, where a step may compile a kernel for a shape absent in warm-up."""
PREDICTIONS = 3.0
"""An iteration may take longer than the patience by this multiple of the predicted duration of the steps under way."""


def describe_life(info: pb.EngineInfo, previous: str) -> None:
    """Fill in `info.life`, a new random id of this engine process, and `info.previous`, the description of its
    predecessor, parsed from `previous`: a `PreviousLife` as JSON, empty if there was none. Mutates `info`."""
    info.life = uuid.uuid4().hex
    if previous:
        json_format.Parse(previous, info.previous)


def heart(info: pb.EngineInfo, path: Path | None) -> Callable[[EngineState], None]:
    """Create the pulse file at `path` and return the function that the step loop calls in each iteration. It writes a
    beat: the requests of the steps under way, and the seconds within which the next beat will follow.

    If `path` is None, no process watches the engine, and the function does nothing.
    """
    if path is None:
        return lambda state: None
    pulse = Pulse(path, info.life)
    patience = GPU_PATIENCE_S if info.device.startswith("cuda") else CPU_PATIENCE_S

    def beat(state: EngineState) -> None:
        steps = state.under_way
        predicted = sum(step.plan.predicted for step in steps)
        pulse.beat(patience + PREDICTIONS * predicted, (name for step in steps for name in step.sequences))

    return beat
