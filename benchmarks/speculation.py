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

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks import speculation_lanes, speculation_schemas
from benchmarks.speculation_pair import Pair
from benchmarks.speculation_prompts import KINDS, make_request, prompts
from engine.config import EngineConfig, Speculation
from engine.model.runner.model_runner import ModelRunner
from engine.process.files import default_data_dir
from gateway.terminal.output import print_wide
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
        for name in ("off", "auto") if number % 2 else ("auto", "off"):
            seconds, answers[name] = pair.run(name, asked)
            if number:
                rates[name].append(sum(map(len, answers[name].values())) / seconds)
        if number:
            same += [answers["off"][request.id] == answers["auto"][request.id] for request in asked]
            count += sum(map(len, answers["auto"].values()))
    ratios = [auto / off for off, auto in zip(rates["off"], rates["auto"], strict=True)]
    proposed, accepted = counters.proposed_tokens - before[0], counters.accepted_tokens - before[1]
    off, auto = (statistics.median(rates[name]) for name in ("off", "auto"))
    middle = statistics.median(ratios)
    equal = statistics.mean(same)
    return Outcome(kind, streams, off, auto, middle, min(ratios), max(ratios), proposed, accepted, count, equal)


def report(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Tokens per second, without and with proposals")
    for column in ("", "streams", "off", "auto", "ratio", "of pairs", "proposed", "accepted", "tokens", "same answers"):
        table.add_column(column, justify="right" if column else "left")
    for one in outcomes:
        rates = (f"{one.off:.0f}", f"{one.auto:.0f}", f"{one.ratio:.2f}", f"{one.least:.2f} to {one.most:.2f}")
        counts = (f"{one.proposed:,}", f"{one.accepted:,}", f"{one.tokens:,}", f"{one.equal:.0%}")
        table.add_row(one.name, str(one.streams), *rates, *counts)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="embedded", help="a model in the chat format of SmolLM2")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ), help="of prepared models")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="what is asked for")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of runs of each row, or of slices")
    parser.add_argument("--schemas", type=int, help="ask for JSON by as many schemas instead")
    parser.add_argument("--lanes", type=float, help="send chats beside a batch instead, so many seconds in each slice")
    parser.add_argument("--draft-model", type=Path, help="folder of a prepared draft model for auto")
    parser.add_argument("--processor-time", action="store_true", help="one thread, whose processor time is the clock")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    console = Console()
    folder = dense_folder(args.model, args.data_dir, console)
    threads = int(args.processor_time)
    speculation: Any = Speculation(args.draft_model) if args.draft_model else "auto"
    config = EngineConfig(str(folder), device="cpu", num_pages=1600, speculation=speculation, threads=threads)
    clock = time.process_time if args.processor_time else time.perf_counter
    pair = Pair(ModelRunner(config, clock=clock), clock)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    outcomes = _measured(args, pair, tokenizer, console)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))


def _measured(args: argparse.Namespace, pair: Pair, tokenizer: Tokenizer, console: Console) -> Sequence[Any]:
    """Make the measurements that the command's arguments ask for, show them, and return them."""
    if args.schemas:
        return speculation_schemas.run(pair, tokenizer, args.schemas, console)
    if args.lanes:
        return speculation_lanes.run(pair, tokenizer, args.lanes, args.rounds, console)
    rows = [(kind, streams) for streams in args.streams for kind in args.kinds]
    outcomes = [measure(pair, tokenizer, *row, args.rounds) for row in track(rows, "Measuring", console=console)]
    print_wide(report(outcomes))
    return outcomes


if __name__ == "__main__":
    main()
