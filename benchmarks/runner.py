"""What every benchmark has in common: options, progress, tables, JSON, exit status, and measuring in turn.

A benchmark is a module with a function that measures, whose options it declares. The function gets a `Run`, calls
`show` with tables and with what `--json` writes, and raises an error if it fails:

    @benchmark(option("--seeds", 4, "random traffics of each kind"), JSON)
    def bench(run: Run) -> None:
        ...

    if __name__ == "__main__":
        bench.main()
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from engine.process.files import default_data_dir
from gateway.terminal.output import print_wide

Item = TypeVar("Item")


class PeerError(Exception):
    """A peer cannot be run properly. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line: its name, and the settings that argparse gets."""

    name: str
    settings: Mapping[str, Any]


def option(name: str, default: Any = None, help: str = "", **settings: Any) -> Option:
    """Return an option. Its type is that of its default, of which a list is of one or more values and False is a flag;
    a type instead of a default says that there is none. `settings` are argparse's, and its help names its default."""
    if default is False:
        return Option(name, {"action": "store_true", "help": help})
    if isinstance(default, type):
        return Option(name, {"type": default, "help": help, **settings})
    if isinstance(default, (list, tuple)):
        return Option(name, {"type": type(default[0]), "nargs": "+", "default": default, "help": help, **settings})
    if isinstance(default, (int, float, str, Path)):
        help = f"{help} (default: %(default)s)" if help else "default: %(default)s"
    return Option(name, {"type": type(default), "default": default, "help": help, **settings})


def python_option(name: str, variable: str) -> Option:
    """Return an option for the Python of a peer, which defaults to an environment variable."""
    python = os.environ.get(variable)
    help = f"a Python that has it; default: the environment variable {variable}"
    return Option(name, {"type": Path, "default": Path(python) if python else None, "help": help})


def core_set(text: str) -> frozenset[int]:
    return frozenset(int(core) for core in text.split(","))


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of options: whole numbers that are not below `least`."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


JSON = option("--json", Path, "also write the figures here")
DATA_DIR = option("--data-dir", default_data_dir(os.environ), "of prepared models", type=Path)
MODEL = option("--model", "embedded", "a GGUF file, or `embedded`")
CORES = option("--cores", "0,1", "of the servers; the client gets the others", type=core_set)
VLLM = python_option("--vllm-python", "LORALANE_VLLM_PYTHON")


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a benchmark: its options, a console for progress, and a scratch folder that is deleted afterwards."""

    options: argparse.Namespace
    console: Console
    scratch: Path

    def track(self, items: Iterable[Item], what: str = "Measuring", total: float | None = None) -> Iterator[Item]:
        """Yield the items under a progress bar, which disappears at the end."""
        yield from track(items, what, total, console=self.console, transient=True)

    def progress(self) -> Progress:
        return Progress(console=self.console, transient=True)

    def show(self, tables: Table | Sequence[Table], document: Any = None) -> None:
        """Write the document where `--json` says, then print the tables."""
        if document is not None and self.options.json:
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
        for each in (tables,) if isinstance(tables, Table) else tables:
            print_wide(each)

    @property
    def client_cores(self) -> frozenset[int]:
        """The cores of this process that the servers do not use (there may be none), for the client."""
        return frozenset(os.sched_getaffinity(0)) - self.options.cores

    def tell_of_missing_peer(self, name: str = "vLLM") -> None:
        if not getattr(self.options, f"{name.lower()}_python"):
            words = f"--{name.lower()}-python or LORALANE_{name.upper()}_PYTHON names a Python that has it"
            self.console.print(f"{name} is left out: {words}")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A function that measures, and its options. The module's docstring is the help's text."""

    measure: Callable[[Run], None]
    options: Sequence[Option]

    def parser(self) -> argparse.ArgumentParser:
        module = self.measure.__globals__
        parser = argparse.ArgumentParser(
            prog=f"python -m {module['__spec__'].name}",
            description=module["__doc__"],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for each in self.options:
            parser.add_argument(each.name, **each.settings)
        return parser

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Parse the command line, and measure. The exit status is 2 if an option is wrong, and else that of `run`."""
        options = self.parser().parse_args(arguments)
        run(lambda console, scratch: self.measure(Run(options, console, scratch)))


def benchmark(*options: Option) -> Callable[[Callable[[Run], None]], Benchmark]:
    return lambda measure: Benchmark(measure, options)


def run(measure: Callable[[Console, Path], None]) -> None:
    """Run a benchmark with a console for progress and a scratch folder that is deleted afterwards. PeerError,
    RuntimeError and ValueError end the process with a message and status 1. SIGTERM ends it by SystemExit."""
    console = Console(stderr=True)
    # SIGTERM raises SystemExit, so that a benchmark that is terminated also stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="loralane-bench-") as scratch:
        try:
            measure(console, Path(scratch))
        except (PeerError, RuntimeError, ValueError) as error:
            console.print(f"error: {error}", style="red", markup=False)
            raise SystemExit(1) from error


def stamp() -> dict[str, Any]:
    """Return the time and the versions of what is measured, for a document."""
    from lab.bench.document import versions

    return {"when": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}


def table(
    title: str | None, columns: str, rows: Iterable[Sequence[str]], left: Sequence[str] = ("",), **settings: Any
) -> Table:
    """Return a table whose `columns`, which bars separate, are aligned to the right, but those in `left`, which by
    default are those without a name. `settings` are rich's."""
    found = Table(title=title, **settings)
    for column in map(str.strip, columns.split("|")):
        found.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        found.add_row(*row)
    return found


def table_of(
    title: str | None, items: Iterable[Any], columns: str, cells: str, left: Sequence[str] = ("",), **settings: Any
) -> Table:
    """Return a table with a row for each item. `cells` has the formats of its fields below the names of `columns`:
    "server | tokens/s" and "{0.name} | {0.rate:.2f}"."""
    formats = cells.split("|")
    return table(title, columns, ([cell.strip().format(item) for cell in formats] for item in items), left, **settings)


def in_turn(names: Sequence[Item], number: int) -> Sequence[Item]:
    """Return the order of round `number`: each round begins with the next name, so that none is always the first."""
    begin = number % len(names)
    return [*names[begin:], *names[:begin]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of ratios between paired measurements, and the extreme ones."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float], bases: Sequence[float]) -> Ratio:
        """Return the ratios of values to those measured in the same rounds."""
        ratios = [value / base for value, base in zip(values, bases, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    @property
    def spread(self) -> str:
        return f"{self.least:.2f} to {self.most:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, with its goal in words if it has one."""

    what: str
    value: float
    goal: str = ""
    is_met: bool = True


def figures_table(title: str, figures: Iterable[Figure]) -> Table:
    rows = (
        (each.what, f"{each.value:.4g}", each.goal, ("yes" if each.is_met else "no") if each.goal else "")
        for each in figures
    )
    return table(title, "| measured | goal | met", rows)
