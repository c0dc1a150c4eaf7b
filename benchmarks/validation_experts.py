"""Compares what `plan` computes for a small mixture of experts with the engine itself.

Run it on a machine that does nothing else: `python -m benchmarks.validation_experts`. The model is that of `make
bench-experts`, and adapters are on all of its projections. As in `benchmarks.validation`, the engine is kept busy
between closed loops, from which its device is measured, and the device is as fast as the machine was in the loops just
before and after.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.experts import save_model
from benchmarks.validation import Measured, Tail, by_arithmetic, device_from
from benchmarks.validation_workloads import Loops, saturated
from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.process.files import default_data_dir
from lab.devices.cost import StepWork
from lab.plans.measure import Lesson, describe, lessons, open_engine
from lab.random_adapters import write_adapters
from lab.sim.replay import RealEngine, replay
from lab.sim.run import Setup

RANKS = (4, 8, 8, 16)
SIZES = argparse.Namespace(layers=8, hidden=512, experts=16, top_k=4, width=256)
ENGINE: dict[str, Any] = {"num_pages": 2049, "max_model_len": 2048, "speculation": "off"}


def run_loops(real: RealEngine, folders: Sequence[Path], seconds: float, lesson: Lesson) -> Loops:
    steps: Loops = []

    def see(work: StepWork, taken: float) -> None:
        steps.append((work, taken))
        lesson.see(work, taken)

    for one, loop in lessons(real, seconds):
        used = folders[: loop.adapters]
        replay(one, replace(loop, adapters=len(used)), used, see)
    return steps


def run_busy(real: RealEngine, folders: Sequence[Path], seconds: float) -> float:
    """Return the tokens a second of a busy engine."""
    tail = Tail(seconds)
    replay(real, saturated(len(folders), 0, seconds), folders, tail.see)
    return tail.rate


def show(measured: Sequence[Measured], core: CoreConfig, document: dict[str, object]) -> Table:
    table = Table("", "measured", "plan", "plan / measured", title="tokens/s of a busy engine")
    for one in measured:
        setup, [real], adapters = Setup(one.device(device_from(document)), core), one.real, one.workload.adapters
        planned = by_arithmetic(setup, round(sum(RANKS) / len(RANKS)) if adapters else 0, adapters)
        table.add_row(one.name, f"{real:.0f}", f"{planned:.0f}", f"{planned / real:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="times that all is measured; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a busy engine; default: %(default)s")
    parser.add_argument("--loop", type=float, default=0.5, help="seconds of a closed loop; default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the device here")
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(folder, SIZES)
        folders = list(write_adapters(folder, Path(scratch), RANKS).values())
        state = str(default_data_dir(os.environ) / "engine")
        with open_engine(EngineConfig(str(folder), state_dir=state, **ENGINE)) as (real, runner):
            lesson, measured = Lesson(real.core.chosen_experts), list[Measured]()
            run_loops(real, folders, args.loop, Lesson())
            before = run_loops(real, folders, args.loop, lesson)
            for number in range(args.rounds):
                for name, of_run in (("base", []), (f"{len(RANKS)} adapters", folders)):
                    rate = run_busy(real, of_run, args.seconds)
                    after = run_loops(real, folders, args.loop, lesson)
                    workload = saturated(len(of_run), 0, args.seconds)
                    measured.append(Measured(f"{name}, round {number + 1}", workload, (rate,), (before, after)))
                    before = after
            document = describe("this machine", real.core, runner, lesson, 5e8)
    Console().print(show(measured, real.core, document))
    Console().print(f"steps: {document['fit']}, cost: {document['cost']}")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
