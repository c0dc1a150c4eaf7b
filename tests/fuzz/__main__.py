"""`python -m tests.fuzz --cases 100000 --seed 7`: hours of hostile requests, or one of them again with `--case N`.

With `--engine demo` they go to the demo's own engine, which takes seconds for each: a few hundred cases. With
`--engine odd` they go to the engine with a tiny model that has the faults of public checkpoints: 30 a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from tests.fuzz import attack
from tests.fuzz.cases import make_case


def main() -> int:
    options = _options()
    numbers = range(options.cases) if options.case is None else range(options.case, options.case + 1)
    if options.case is not None:
        print(make_case(options.seed, options.case))
    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(f"seed {options.seed}", total=len(numbers))
        report = asyncio.run(attack.run(options.seed, numbers, lambda: progress.advance(task), options.engine))
    print(_summary(report))
    return 1 if report.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Attack a gateway by random requests of a tenant while another tenant streams.",
    )
    parser.add_argument("--cases", type=int, default=2_000, help="how many requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed is another run (default: %(default)s)")
    parser.add_argument("--engine", choices=attack.TARGETS, default="fake", help="default: %(default)s")
    parser.add_argument("--case", type=int, help="print and send the case with this number alone")
    return parser.parse_args()


def _summary(report: attack.Report) -> str:
    seconds = sorted(report.neighbour.ttft) or [0.0]
    p99 = statistics.quantiles(seconds, n=100)[-1] if len(seconds) > 1 else seconds[0]
    lines = [
        *report.failures,
        f"outcomes: {dict(report.outcomes.most_common())}",
        f"neighbour: {len(report.neighbour.ttft)} whole streams, TTFT p50 {statistics.median(seconds) * 1000:.1f} ms,"
        f" p99 {p99 * 1000:.1f} ms, at most {seconds[-1] * 1000:.0f} ms",
        f"memory: {report.first_bytes >> 20} MiB after the first cases, at most {report.most_bytes >> 20} MiB",
        f"failures: {len(report.failures)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
