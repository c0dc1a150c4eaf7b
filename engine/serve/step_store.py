"""Keeps the step-time model on disk between two engine processes, so that predictions are good after a restart."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from engine.core.predict.step_time import StepTimeModel
from engine.process.cores import usable_cores
from engine.process.files import replacing

log = structlog.get_logger("engine")

QUIET_STEPS = 512
"""Number of steps after the machine was last busy with other work from which on predictions are fit for advice. The
steps before are then as good as forgotten."""
FRESH_SECONDS = 7 * 86_400.0
"""Age of the last save up to which its predictions are fit for advice."""
BUSY = 1.5
"""Processes that run or wait to run, for each processor, from which on other work slows the engine's steps."""


def is_machine_busy() -> bool:
    """Return whether more processes than the machine has processors for ran, or waited to run, in the last minute."""
    return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)


class StepStore:
    """The file in `folder`/step_time, created by the first save, that keeps the step-time model of one LLM on one kind
    of devices. `subject` names device, threads, dtype and model, and makes its name. `is_busy` returns whether other
    work slows the engine's steps now."""

    def __init__(self, folder: Path, subject: str, is_busy: Callable[[], bool] = is_machine_busy) -> None:
        self._path = folder / "step_time" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', subject)}.json"
        self._is_busy = is_busy
        self._steps = self._quiet_steps = 0
        """Steps of the last save or load, and how many of them were measured since the machine was last busy."""
        self._saved_at = 0.0

    @property
    def is_fit_for_advice(self) -> bool:
        """True if what was loaded is recent and was measured while the machine had nothing else to do. Only then do its
        predictions say what an operator should change."""
        return self._quiet_steps >= QUIET_STEPS and time.time() - self._saved_at < FRESH_SECONDS

    def load(self, model: StepTimeModel) -> bool:
        """Load the saved values of the step-time model into `model`; return whether there were any. A file that is
        damaged, or that another version or other knots made, is logged and not used: the next save replaces it."""
        if not self._path.is_file():
            return False
        try:
            saved = json.loads(self._path.read_text())
            model.load(saved)
            self._steps, self._quiet_steps = model.num_steps, int(saved.get("quiet_steps", 0))
            self._saved_at = float(saved.get("saved_at", 0.0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            consequence = "the duration of steps is learned anew: predictions begin after the first of them"
            log.warning("step_time_dropped", path=str(self._path), error=str(error), consequence=consequence)
            return False
        return True

    def save(self, saved: dict[str, Any]) -> None:
        """Atomically replace the file with `saved`, the output of `StepTimeModel.to_json()`, and with what tells
        whether it is fit for advice. Errors are only logged."""
        steps = sum(saved["seen"].values())
        self._quiet_steps = 0 if self._is_busy() else self._quiet_steps + max(0, steps - self._steps)
        self._steps = steps
        kept = {**saved, "quiet_steps": self._quiet_steps, "saved_at": time.time()}
        try:
            with replacing(self._path) as file:
                file.write_text(json.dumps(kept))
        except OSError as error:
            log.warning("step_time_unsaved", path=str(self._path), error=str(error))


def step_store(
    state_dir: str, threads: int, device: str, dtype: str, model_hash: str, ranks: tuple[int, int] = (1, 1)
) -> StepStore | None:
    """Return the store of the step-time model for an LLM on a device, such as `cpu` or `cuda:0`, or None without
    `state_dir`. `threads` and `ranks` (`tensor_parallel`, `pipeline_parallel`) are the configuration's."""
    if not state_dir:
        return None
    parts = "" if ranks == (1, 1) else "-{}x{}".format(*ranks)
    return StepStore(Path(state_dir), f"{_hardware(threads, device)}{parts}-{dtype}-{model_hash}")


def _hardware(threads: int, device: str) -> str:
    """Return a name of the hardware that a step's duration depends on: the GPU, or the machine type and CPU threads."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    return f"{platform.machine()}-{threads or usable_cores()}-{device}"
