"""The journal of a section's findings, written line by line, so that a section that is killed loses no measurement."""

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
    """Too little of the section's time budget is left for the next case."""


class DeviceLost(Exception):
    """An error has made the device unusable for this process."""


@dataclass
class Journal:
    """Writes a section's findings to a file and prints them; `case` guards each of its cases.

    Attributes:
        path: File of JSON lines, which are appended.
        deadline: End of the time budget, in seconds of `time.monotonic`.
        tiny: Whether to use toy sizes on the CPU, which proves that the section runs but measures nothing.
        device: Name of a torch device.
    """

    path: Path
    deadline: float
    tiny: bool
    device: str
    failures: int = field(default=0, init=False)
    opened: float = field(default_factory=time.monotonic, init=False)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def row(self, table: str, case: str, **values: Value) -> None:
        """Write and print (to stderr) a row of one of the section's tables. Names of values include their units."""
        self._write({"row": {"table": table, "case": case, "values": values}})
        self.tell(f"{table}: {case}: " + ", ".join(f"{name} {shown(value)}" for name, value in values.items()))

    def note(self, text: str) -> None:
        """Write and print a note for readers of the tables."""
        self._write({"note": text})
        self.tell(text)

    def environment(self, values: Mapping[str, Value]) -> None:
        self._write({"environment": dict(values)})

    def fail(self, case: str, reason: str) -> None:
        """Count, write and print that a case failed."""
        self.failures += 1
        self._write({"failure": {"case": case, "reason": reason}})
        self.tell(f"FAILED {case}: {reason}")

    def finish(self) -> None:
        """Write that a process of the section ran to its end, even if cases failed."""
        self._write({"finished": True})

    def tell(self, text: str) -> None:
        """Print progress to standard error, with the seconds since the journal was opened."""
        print(f"  {time.monotonic() - self.opened:6.1f} s  {text}", file=sys.stderr, flush=True)

    @contextmanager
    def case(self, name: str, least_s: float = 0.0) -> Iterator[None]:
        """Run a case of a section in the block. A failure is recorded and suppressed, so that the section continues
        after the block; cached device memory is freed. Raises OutOfTime, on entry, if less than `least_s` seconds are
        left, and DeviceLost if the failure has made the device unusable."""
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
        """Release cached device memory, because the next case needs blocks of other sizes."""
        if self.device.startswith("cuda"):
            # Imported here, so that programs that only read journals need no torch.
            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def _check_device(self, name: str) -> None:
        """Raise DeviceLost if the CUDA context is corrupted: after an illegal access every later CUDA call fails."""
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


def end_journal(path: Path, code: int | None, seconds: float, processes: int = 1) -> None:
    """Add to a section's journal how its processes ended; see `Findings.exit`. A line that was cut off is closed."""
    text = path.read_text() if path.is_file() else ""
    with path.open("a") as file:
        file.write("\n" if text and not text.endswith("\n") else "")
        file.write(json.dumps({"exit": {"code": code, "seconds": round(seconds, 1), "processes": processes}}) + "\n")


@dataclass
class Findings:
    """The contents of a section's journal.

    Attributes:
        exit: the exit status of the section's processes, `code`, None if one was killed for lack of time, their number
            and the `seconds` they took; empty if the whole suite was killed before.
        rows: Table -> [(case, values)], in order.
        failures: (case, reason), in order.
        finished: How many of the section's processes ran to their end.
    """

    environment: dict[str, Value] = field(default_factory=dict)
    exit: dict[str, Value] = field(default_factory=dict)
    rows: dict[str, list[tuple[str, dict[str, Value]]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    finished: int = 0


def read_journal(path: Path) -> Findings:
    """Return the findings in a journal, which may be unfinished or missing. A line that was cut off is left out."""
    found = Findings()
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
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
    found.exit |= line.get("exit", {})
    found.finished += line.get("finished", False)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def shown(value: Value) -> str:
    """Format a value for a table: floats with three significant digits, or as whole numbers from 100 on; None as -."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value
