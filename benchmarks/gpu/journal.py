"""What a section finds out, written line by line as it does: a section that is killed loses nothing it measured."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Value = float | int | str | None


class OutOfTime(Exception):
    """The section's time is used up."""


class DeviceLost(Exception):
    """Nothing more can be run on the device by this process."""


@dataclass
class Journal:
    """Where a section writes.

    Attributes:
        path: lines of JSON.
        deadline: in seconds of `time.monotonic`.
        tiny: toy sizes on the CPU: proves that the section runs, and measures nothing.
        device: a torch device, by name.
    """

    path: Path
    deadline: float
    tiny: bool
    device: str
    failures: int = field(default=0, init=False)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def row(self, table: str, case: str, **values: Value) -> None:
        """A line of one of the section's tables. Names of values carry their units."""
        self._write({"row": {"table": table, "case": case, "values": values}})
        self.tell(f"{table}: {case}: " + ", ".join(f"{name} {shown(value)}" for name, value in values.items()))

    def note(self, text: str) -> None:
        """Something to know when reading the tables."""
        self._write({"note": text})
        self.tell(text)

    def environment(self, values: Mapping[str, Value]) -> None:
        self._write({"environment": dict(values)})

    def fail(self, case: str, reason: str) -> None:
        """One case did not do what it should."""
        self.failures += 1
        self._write({"failure": {"case": case, "reason": reason}})
        self.tell(f"FAILED {case}: {reason}")

    def finish(self) -> None:
        """The section came to its end."""
        self._write({"finished": True})

    def tell(self, text: str) -> None:
        """Progress, for who watches."""
        print(f"  {text}", file=sys.stderr, flush=True)

    @contextmanager
    def case(self, name: str, least_s: float = 0.0) -> Iterator[None]:
        """One of a section's cases: its failure is written down, and the next one runs.

        Raises:
            OutOfTime: less than `least_s` seconds are left.
            DeviceLost: the failure took the device with it.
        """
        if self.left < least_s or self.left <= 0:
            raise OutOfTime(name)
        try:
            yield
        except (OutOfTime, DeviceLost):
            raise
        except Exception as error:
            traceback.print_exc()
            self.fail(name, f"{type(error).__name__}: {first_line(error)}")
            self._check_device(name)
        finally:
            self._free_memory()

    def _free_memory(self) -> None:
        """What a case held is another size than what the next one wants."""
        if self.device.startswith("cuda"):
            # Imported here: whoever only reads journals needs no torch.
            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def _check_device(self, name: str) -> None:
        """A kernel that reads where it must not poisons the process: every later call fails, whoever makes it."""
        if not self.device.startswith("cuda"):
            return
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(f"{name}: {first_line(error)}") from error

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Findings:
    """What a journal says.

    Attributes:
        rows: table -> [(case, values)], in order.
        finished: the section came to its end.
    """

    environment: dict[str, Value] = field(default_factory=dict)
    rows: dict[str, list[tuple[str, dict[str, Value]]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    finished: bool = False


def read_journal(path: Path) -> Findings:
    """What has been written so far. A last line that was cut off is left out."""
    found = Findings()
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        _take(found, line)
    return found


def _take(found: Findings, line: dict[str, Any]) -> None:
    if row := line.get("row"):
        found.rows.setdefault(row["table"], []).append((row["case"], row["values"]))
    elif failure := line.get("failure"):
        found.failures.append((failure["case"], failure["reason"]))
    elif note := line.get("note"):
        found.notes.append(note)
    found.environment |= line.get("environment", {})
    found.finished |= line.get("finished", False)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def shown(value: Value) -> str:
    """A value as a table shows it: three significant digits, more where the number has more before its point."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value
