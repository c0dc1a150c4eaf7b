"""Keeps the step-time model on disk between two engine processes, so that predictions are good after a restart."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import structlog

from engine.core.predict.step_time import StepTimeModel
from engine.process.cores import usable_cores
from engine.process.files import replacing

log = structlog.get_logger("engine")


class StepStore:
    """The file in `folder`/step_time, created by the first save, that keeps the step-time model of one LLM on one kind
    of devices. `subject` names device, threads, dtype and model, and makes its name."""

    def __init__(self, folder: Path, subject: str) -> None:
        self._path = folder / "step_time" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', subject)}.json"

    def load(self, model: StepTimeModel) -> bool:
        """Load the saved values of the step-time model into `model`; return whether there were any. A file that is
        damaged, or that another version or other knots made, is logged and not used: the next save replaces it."""
        if not self._path.is_file():
            return False
        try:
            model.load(json.loads(self._path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            consequence = "the duration of steps is learned anew: predictions begin after the first of them"
            log.warning("step_time_dropped", path=str(self._path), error=str(error), consequence=consequence)
            return False
        return True

    def save(self, saved: dict[str, object]) -> None:
        """Atomically replace the file with `saved`, the output of `StepTimeModel.to_json()`. Errors are only logged."""
        try:
            with replacing(self._path) as file:
                file.write_text(json.dumps(saved))
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
