"""What one engine process leaves to the next, by way of the process that started both.

An engine knows nothing of the one before it. The supervisor does: how it ended, and, from its pulse, what it computed
then. It hands that on, and the gateways are told when they connect: they know which of their requests to suspect.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

from google.protobuf import json_format

from engine.core.state import EngineState
from engine.pb import engine_pb2 as pb
from engine.pulse import Pulse

CPU_PATIENCE_S = 5.0
"""A step takes a quarter of a second at most; a machine under load makes that a few seconds."""
GPU_PATIENCE_S = 30.0
"""A kernel may be compiled in a step, for a shape that the warm-up did not have."""
PREDICTIONS = 3.0
"""The loop may take so many times what the step is predicted to take, in addition."""


def describe_life(info: pb.EngineInfo, previous: str) -> None:
    """Write down which process this is, and which was the one before it.

    `previous` is a `PreviousLife` as JSON; empty means that there was none.
    """
    info.life = uuid.uuid4().hex
    if previous:
        json_format.Parse(previous, info.previous)


def heart(info: pb.EngineInfo, path: Path | None) -> Callable[[EngineState], None]:
    """Return what the step loop calls when it comes round, which keeps a pulse in the file at `path`.

    None means that no process watches the engine: the function does nothing.
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
