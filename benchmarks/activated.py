"""TTFT of a pipeline of adapters over one conversation: `make bench-activated`.

Each of several activated LoRAs (judge, guard, intent, ...) answers at the end of the same conversation, which the base
model has just answered. For comparison: plain LoRAs of the same rank, which compute the conversation again, and full
prefix hits, in which the same adapter is asked the same again. All adapters are resident. Rounds have conversations of
their own, and one engine of this process runs one request at a time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from rich.table import Table

from benchmarks.runner import DATA_DIR, MODEL, Run, benchmark, option, table
from engine.config import EngineConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.model.folders.prepare import prepare_model
from lab.plans.measure import open_engine
from lab.random_adapters import write_adapters

INVOCATION = (1, 520, 9531, 198)
"""Tokens with which an assistant's turn begins in SmolLM2's chat template."""
KINDS = ("base", "full hit", "activated", "plain")


class Asker:
    """Asks one engine, one request after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked = 0

    def ask(self, prompt: Sequence[int], adapter: str | None) -> tuple[float, int]:
        """Return the seconds until the first token of an answer of two tokens, and the cached tokens."""
        self._asked += 1
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = Request(str(self._asked), tuple(prompt), params, adapter)
        began, first, cached = time.perf_counter(), 0.0, 0
        self._engine.inbox.put(Submit(request))
        while self._engine.state.has_work or not first:
            for event in self._engine.step():
                assert event.refusal is None, event.refusal
                cached = event.num_cached or cached
                if event.tokens and not first:
                    first = time.perf_counter() - began
        return first, cached


def run_round(asker: Asker, talk: list[int], activated: list[str], plain: list[str]) -> dict[str, list[float]]:
    """Return the TTFTs of one conversation in seconds, by kind."""
    found: dict[str, list[float]] = defaultdict(list)
    found["base"].append(asker.ask(talk, None)[0])
    for number, adapter in enumerate(activated):
        prompt = [*talk, *range(100, 104 + number), *INVOCATION]
        seconds, cached = asker.ask(prompt, adapter)
        assert cached >= len(talk) // 16 * 16, "the conversation's pages are shared"
        found["activated"].append(seconds)
        found["full hit"].append(asker.ask(prompt, adapter)[0])
    for adapter in plain:
        found["plain"].append(asker.ask([*talk, *INVOCATION], adapter)[0])
    return found


def show(found: dict[str, list[float]]) -> Table:
    base, rows = statistics.median(found["full hit"]), []
    for kind in KINDS:
        middle, most = statistics.median(found[kind]), max(found[kind])
        rows.append((kind, f"{middle * 1000:.1f}", f"{most * 1000:.1f}", f"{middle / base:.2f}"))
    return table("TTFT, ms", "| median | most | of a full hit", rows)


@benchmark(
    MODEL,
    DATA_DIR,
    option("--tokens", 2000, "of each conversation"),
    option("--adapters", 5),
    option("--rank", 16),
    option("--rounds", 3),
)
def bench(run: Run) -> None:
    args = run.options
    folder = prepare_model(args.model, args.data_dir, run.console)
    state = str(args.data_dir / "engine")
    config = EngineConfig(
        str(folder), num_pages=2049, max_model_len=args.tokens + 64, speculation="off", state_dir=state
    )
    found: dict[str, list[float]] = defaultdict(list)
    with open_engine(config) as (real, runner):
        engine, ranks = Engine(EngineState.create(real.core), runner), [args.rank] * args.adapters
        folders = [write_adapters(folder, run.scratch / "a", ranks, invocation=INVOCATION)]
        folders.append(write_adapters(folder, run.scratch / "p", ranks, seed=1))
        activated, plain = ([engine.load_adapter(str(path)).adapter_hash for path in one.values()] for one in folders)
        asker, rng = Asker(engine), Random(0)
        for adapter in (*activated, *plain):  # makes them resident
            asker.ask([*(rng.randrange(1000, 40_000) for _ in range(100)), *INVOCATION], adapter)
        for _ in run.track(range(args.rounds), "rounds"):
            talk = [rng.randrange(1000, 40_000) for _ in range(args.tokens)]
            for kind, seconds in run_round(asker, talk, activated, plain).items():
                found[kind] += seconds
    run.show(show(found))


if __name__ == "__main__":
    bench.main()
