"""Passes information from one engine process to the next, through the supervisor that starts both.

An engine process knows nothing about its predecessor. The supervisor knows how the predecessor ended and, from its
pulse file, which requests it computed then. The supervisor passes this on to the new process, which tells the gateways
when they connect, so that they know which of their requests to suspect.
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
"""Seconds that the step loop may take on a CPU. A step takes at most a quarter of a second, or a few seconds on a
machine under load."""
GPU_PATIENCE_S = 30.0
"""Seconds that the step loop may take on a GPU, where a step may compile a kernel for a shape absent in warm-up."""
PREDICTIONS = 3.0
"""Multiple of the predicted duration of the steps under way that the loop may take in addition."""


def describe_life(info: pb.EngineInfo, previous: str) -> None:
    """Fill in the id of this engine process and the description of its predecessor in `info`.

    `previous` is a `PreviousLife` as JSON; empty means that there was none.
    """
    info.life = uuid.uuid4().hex
    if previous:
        json_format.Parse(previous, info.previous)


def heart(info: pb.EngineInfo, path: Path | None) -> Callable[[EngineState], None]:
    """Return the function that the step loop calls in each iteration, which writes a beat to the pulse file at `path`.

    If `path` is None, no process watches the engine and the function does nothing.
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
