"""Tokens per second with and without proposed tokens: `make bench-speculation`.

Two engines over one model, with `engine.speculation` off and auto, compute the same requests in turn, so that both
meet the same machine. There is no gateway. Prompts ask for a passage, for a file in which a name is to be changed (the
answer has begun; a "predicted edit" has the file as its prediction), for JSON by a schema, or are free chat. Answers
are greedy, and end by themselves or after MOST tokens. A first round is not counted: the step-time model learns from
it, and the memory of answers by the schema.

`--schemas 100` asks for JSON by as many schemas instead, and `--lanes 20` sends chats beside a batch, for as many
seconds in each slice. With `--processor-time`, for machines that others use, too, one thread computes, and the clock is
the processor time that it takes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import speculation_lanes, speculation_schemas
from benchmarks.runner import DATA_DIR, JSON, Ratio, Run, benchmark, in_turn, option, table_of
from benchmarks.speculation_pair import Pair
from benchmarks.speculation_prompts import KINDS, make_request, prompts
from engine.config import EngineConfig, Speculation
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from lab.demo.dense import dense_folder


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over the measured rounds of one workload; `least` and `most` are the extreme ratios of a pair."""

    name: str
    streams: int
    off: float
    """Tokens per second without proposals."""
    auto: float
    """Tokens per second with them."""
    ratio: float
    least: float
    most: float
    proposed: int
    accepted: int
    tokens: int
    """Tokens of all measured answers with proposals."""
    equal: float
    """Share of the answers that are the same with and without. In bfloat16, rows of larger steps round otherwise."""


COLUMNS = " | streams | off | auto | ratio | of pairs | proposed | accepted | tokens | same answers"
CELLS = (
    "{0.name} | {0.streams} | {0.off:.0f} | {0.auto:.0f} | {0.ratio:.2f}"
    " | {0.least:.2f} to {0.most:.2f} | {0.proposed:,} | {0.accepted:,} | {0.tokens:,} | {0.equal:.0%}"
)


def measure(pair: Pair, tokenizer: Tokenizer, kind: str, streams: int, rounds: int) -> Outcome:
    """Compute the same requests on both engines, `streams` at a time, the engines taking turns to be the first."""
    counters, texts = pair.engines["auto"].state.counters, prompts(kind)
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    same, count, before = [], 0, (0, 0)
    for number in range(rounds + 1):
        if number == 1:
            before = counters.proposed_tokens, counters.accepted_tokens
        asked = [make_request(tokenizer, f"{number}-{i}", kind, text) for i, text in enumerate(islice(texts, streams))]
        answers = {}
        for name in in_turn(("auto", "off"), number):
            seconds, answers[name] = pair.run(name, asked)
            if number:
                rates[name].append(sum(map(len, answers[name].values())) / seconds)
        if number:
            same += [answers["off"][request.id] == answers["auto"][request.id] for request in asked]
            count += sum(map(len, answers["auto"].values()))
    ratio = Ratio.of(rates["auto"], rates["off"])
    proposed, accepted = counters.proposed_tokens - before[0], counters.accepted_tokens - before[1]
    off, auto = (statistics.median(rates[name]) for name in ("off", "auto"))
    counts = proposed, accepted, count, statistics.mean(same)
    return Outcome(kind, streams, off, auto, ratio.median, ratio.least, ratio.most, *counts)


@benchmark(
    option("--model", "embedded", "a model in the chat format of SmolLM2"),
    DATA_DIR,
    option("--streams", [1, 8, 32], "requests at a time"),
    option("--kinds", KINDS, "what is asked for", choices=KINDS),
    option("--rounds", 8, "pairs of runs of each row, or of slices"),
    option("--schemas", int, "ask for JSON by as many schemas instead"),
    option("--lanes", float, "send chats beside a batch instead, so many seconds in each slice"),
    option("--draft-model", Path, "folder of a prepared draft model for auto"),
    option("--processor-time", False, "one thread, whose processor time is the clock"),
    JSON,
)
def bench(run: Run) -> None:
    args = run.options
    folder = dense_folder(args.model, args.data_dir, run.console)
    speculation: Any = Speculation(args.draft_model) if args.draft_model else "auto"
    threads = int(args.processor_time)
    config = EngineConfig(str(folder), device="cpu", num_pages=1600, speculation=speculation, threads=threads)
    clock = time.process_time if args.processor_time else time.perf_counter
    pair = Pair(ModelRunner(load(config, clock=clock)), clock)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if args.schemas:
        speculation_schemas.measure(run, pair, tokenizer, args.schemas)
    elif args.lanes:
        speculation_lanes.measure(run, pair, tokenizer, args.lanes, args.rounds)
    else:
        rows = [(kind, streams) for streams in args.streams for kind in args.kinds]
        outcomes = [measure(pair, tokenizer, *row, args.rounds) for row in run.track(rows)]
        run.show(table_of("Tokens per second, without and with proposals", outcomes, COLUMNS, CELLS), outcomes)


if __name__ == "__main__":
    bench.main()
