"""`python -m tests.fuzz.growth`: grow every field of HTTP and gRPC, and measure what that costs the gateway.

It fails where a request holds the gateway's event loop for more than 20 ms, where more than 64 MiB of memory are kept
after it, where the neighbour's longest wait for an event is more than twice as long as alone, where a request has no
answer, and where the gateway dies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.fuzz.growth.measured import Figures
from tests.fuzz.growth.plan import Case, plan
from tests.fuzz.growth.run import AGAIN, Report, run

EXAMPLES = """examples:
  python -m tests.fuzz.growth --cases 500                     half of all fields, each to its largest size in some way
  python -m tests.fuzz.growth --cases 20000 --log all.jsonl   all ways of growth of all fields; hours
  python -m tests.fuzz.growth --seed 1 --case 311             one case again
  python -m tests.fuzz.growth --only 'logit_bias' --cases 50  fields, operations or growths with this text
"""
MOST_ROWS = 25


def main() -> int:
    options = _options()
    cases = list(islice(_wanted(options), options.skip, options.skip + options.cases))
    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]} bad"),
    )
    log = Path(options.log).open("a", encoding="utf-8") if options.log else None  # noqa: SIM115  # closed at exit
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, bad = progress.add_task(f"seed {options.seed}", total=len(cases), bad=0), 0

        def seen(case: Case, figures: Figures | None, wrong: str) -> None:
            nonlocal bad
            bad += bool(wrong)
            progress.update(task, advance=1, bad=bad)
            if wrong:
                progress.console.print(f"{case.number}: {case}: {wrong}", markup=False, highlight=False, soft_wrap=True)
            if log is not None:
                _write(log, case, figures, wrong)

        report = asyncio.run(run(options.seed, cases, seen, options.again))
    _print(report)
    return 1 if report.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.growth",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=500, help="how many cases at most (default: %(default)s)")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the first ones")
    parser.add_argument("--seed", type=int, default=1, help="another seed is another order (default: %(default)s)")
    parser.add_argument("--case", type=int, help="send the case with this number alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="send cases whose description contains this")
    parser.add_argument(
        "--again",
        type=int,
        default=AGAIN,
        help="how often a case that costs too much is sent again before it counts (default: %(default)s)",
    )
    parser.add_argument("--failed", metavar="LOG", help="send the cases again that this log says cost too much")
    parser.add_argument("--log", metavar="FILE", help="append the figures of each case to this file, as lines of JSON")
    return parser.parse_args()


def _wanted(options: argparse.Namespace) -> Iterator[Case]:
    cases = plan(options.seed)
    if options.case is not None:
        return islice(cases, options.case, options.case + 1)
    if options.failed:
        bad = _failed(options.failed)
        cases = (case for case in cases if case.number in bad)
    return (case for case in cases if options.only in str(case))


def _failed(log: str) -> set[int]:
    """Return the numbers of the cases that a log of another run calls wrong."""
    told = map(json.loads, Path(log).read_text(encoding="utf-8").splitlines())
    return {each["case"] for each in told if each["wrong"]}


def _write(log: TextIO, case: Case, figures: Figures | None, wrong: str) -> None:
    facts = {"case": case.number, "what": str(case), "wrong": wrong}
    if figures is not None:
        facts |= {"ending": figures.ending.words, "hold_ms": round(figures.hold * 1000, 1), "where": figures.where}
        facts |= {
            "kept_mib": round(figures.kept / 2**20, 1),
            "gap_ms": round(figures.gap * 1000, 1),
            "s": round(figures.seconds, 3),
        }
    log.write(json.dumps(facts) + "\n")
    log.flush()


def _print(report: Report) -> None:
    console = Console()
    table = Table(title="the highest figures of each field, measured once", box=None)
    for name, justify in (
        ("hold ms", "right"),
        ("kept MiB", "right"),
        ("neighbour", "right"),
        ("field", "left"),
        ("case", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, worst in sorted(report.worst.items(), key=lambda one: -one[1].hold)[:MOST_ROWS]:
        case = worst.case
        grown = f"{case.number}: {case.growth}, {case.size:,} bytes" if case else ""
        table.add_row(f"{worst.hold * 1000:.1f}", f"{worst.kept / 2**20:.0f}", f"{worst.slowed:.1f}x", name, grown)
    console.print(table)
    console.print("\n".join(report.failures), markup=False, highlight=False, soft_wrap=True)
    console.print(f"endings: {dict(report.outcomes.most_common())}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"memory: {report.first_bytes >> 20} MiB after the first case, {report.last_bytes >> 20} after the last"
    )
    console.print(f"fields: {len(report.worst)}, failures: {len(report.failures)}")


if __name__ == "__main__":
    sys.exit(main())
