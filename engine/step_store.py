"""Where the step-time model rests between two lives of an engine, so that a restart is warm."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import structlog

from engine.core.step_time import StepTimeModel

log = structlog.get_logger("engine")


class StepStore:
    """One file a device and model: what a step takes depends on nothing else that lasts.

    Args:
        folder: created when something is saved.
        subject: the device, its threads, the dtype and the model; becomes the file's name.
    """

    def __init__(self, folder: Path, subject: str) -> None:
        self._path = folder / "step_time" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', subject)}.json"

    def load(self, model: StepTimeModel) -> bool:
        """Fills the model with what was saved, if anything was. A file that cannot be read is left out, and said."""
        if not self._path.is_file():
            return False
        try:
            model.load(json.loads(self._path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("step_time_unreadable", path=str(self._path), error=str(error))
            return False
        return True

    def save(self, saved: dict[str, object]) -> None:
        """Writes `StepTimeModel.to_json()` in one piece: a crash leaves the old file. Failing is no reason to stop."""
        temporary = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(saved))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("step_time_unsaved", path=str(self._path), error=str(error))
