"""Output files and expected errors of the commands that simulate or read traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gateway.terminal.output import check_writable, exit_with_error
from lab.plot import PlotUnavailable, check_available
from lab.sim.run import Stalled


@contextmanager
def failures() -> Iterator[None]:
    """Context manager that prints a ValueError, OSError, PlotUnavailable or Stalled of the block and ends the command
    with status 1."""
    try:
        yield
    except (ValueError, OSError, PlotUnavailable, Stalled) as error:
        exit_with_error(str(error))


def check_outputs(files: Mapping[str, Path | None], plot: Path | None) -> None:
    """Check, before the work begins, that output `files`, by the options that name them, and the file of `--plot` can
    be written. Raises ValueError, or PlotUnavailable if a plot cannot be drawn."""
    for option, path in (*files.items(), ("--plot", plot)):
        if path is not None:
            check_writable(path, option)
    if plot is not None:
        check_available(plot)
