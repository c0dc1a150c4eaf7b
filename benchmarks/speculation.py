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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from engine.config import EngineConfig, Speculation, core_config
from engine.core.commands import Submit
from engine.core.grammars import Grammar, GrammarKind
from engine.core.state import EngineState
from engine.core.types import Request, SamplingParams, TokenEvent
from engine.demo.dense import dense_folder
from engine.demo.questions import plain_pairs
from engine.engine import Engine
from engine.model.runner import ModelRunner
from engine.process.files import default_data_dir
from gateway.terminal.output import print_wide

PEOPLE = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")
TEXT = """Order {n}42 was placed by {who} on 3 March and delivered to 17 Harbour Street, Bristol, on 9 March.
The parcel held two copper kettles, a set of six glasses and a table lamp with a green shade.
{who} reported that one of the glasses had arrived broken and asked for a replacement to be sent to the same address.
The replacement for order {n}42 left the warehouse on 12 March and is expected within four working days."""
CODE = """def total_{n}(orders, rate):
    result = 0.0
    for order in orders:
        if order.is_paid:
            result += order.amount * (1.0 + rate)
        else:
            result += order.amount
    return round(result, 2)


def largest_{n}(orders):
    best = orders[0]
    for order in orders[1:]:
        if order.amount > best.amount:
            best = order
    return best


def by_customer_{n}(orders):
    groups = {{}}
    for order in orders:
        groups.setdefault(order.customer, []).append(order)
    return groups
"""
FIELDS = {
    "order_number": {"type": "string", "pattern": "[0-9]{2,6}"},
    "customer_name": {"type": "string"},
    "delivery_address": {"type": "string"},
    "delivered_on": {"type": "string"},
    "products": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"product_name": {"type": "string"}, "quantity": {"type": "integer"}},
            "required": ["product_name", "quantity"],
            "additionalProperties": False,
        },
        "maxItems": 4,
    },
    "problem_reported": {"type": "string"},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
MOST = 128
KINDS = ("extraction", "code edit", "predicted edit", "JSON", "chat")
GRAMMARS = {"JSON": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


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


def prompts(kind: str) -> Iterator[str]:
    """Yield prompts of one kind, without end."""
    people, questions = cycle(PEOPLE), cycle(question for question, _ in plain_pairs())
    for number in range(1, 1 << 30):
        who = next(people)
        if kind == "extraction":
            yield CHAT.format(f"{TEXT.format(n=number, who=who)}\n\nQuote the text above in full, word by word.")
        elif kind == "JSON":
            asked = f"Describe it in JSON, with the fields {', '.join(FIELDS)}."
            yield CHAT.format(f"{TEXT.format(n=number, who=who)}\n\n{asked}")
        elif kind in ("code edit", "predicted edit"):
            code = CODE.format(n=number)
            yield CHAT.format(f"Rename order to item in this file and return all of it:\n\n{code}") + _begun(code)
        else:
            yield CHAT.format(f"{next(questions)} Explain your answer in detail, {who.split()[0]} is listening.")


def _begun(code: str) -> str:
    """Return the first function of the answer to a code edit. Without it, the embedded model explains the code."""
    return code.replace("order", "item").partition("def largest")[0]


Clock = Callable[[], float]
"""Returns seconds: of wall time, or of the process's processor time."""


class Pair:
    """Two engines, off and auto, over one model. Only one of them has requests at a time."""

    def __init__(self, runner: ModelRunner, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        config = replace(runner.config, prefix_caching=False)
        self.runner = runner
        core = core_config(config, runner.num_pages, 0, runner.max_model_len, runner.eos_token_ids)
        cores = {
            "off": replace(core, speculation=False),
            "auto": replace(core, speculation=True, draft_block=runner.draft_block),
        }
        self.engines = {name: Engine(EngineState.create(one), runner, clock=clock) for name, one in cores.items()}

    def run(self, speculation: str, asked: Sequence[Request]) -> tuple[float, dict[str, list[int]]]:
        """Compute requests that arrive together. Returns the seconds that it took, and the tokens of each."""
        engine, answers = self.begin(speculation), {request.id: list[int]() for request in asked}
        began = self.clock()
        for request in asked:
            self.submit(speculation, request)
        engine.step()
        while engine.state.has_work:
            for event in self.step(engine):
                answers[event.request_id] += event.tokens
        return self.clock() - began, answers

    def step(self, engine: Engine) -> Sequence[TokenEvent]:
        """Run a step, and return its events. If there is nothing to do before a grammar is compiled, wait for that."""
        events = engine.step()
        if not events and engine.state.in_flight.is_empty:
            engine.inbox.wait(0.01)
        return events

    def begin(self, speculation: str) -> Engine:
        """Return the engine that is used from now on. A runner reports compiled grammars to one engine only."""
        engine = self.engines[speculation]
        self.runner.connect(engine.inbox.put)
        return engine

    def submit(self, speculation: str, request: Request) -> None:
        """Submit a request now. The runner, which both engines use, is told whether the request speculates."""
        params = request.params._replace(speculates=speculation == "auto")
        self.engines[speculation].inbox.put(Submit(request._replace(params=params, arrival=self.clock())))


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


def make_request(tokenizer: Tokenizer, name: str, kind: str, text: str) -> Request:
    """Return a greedy request; that of a predicted edit has the file to edit as its prediction."""
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    params = SamplingParams(MOST, temperature=0.0, grammar=GRAMMARS.get(kind))
    predicted = (
        text.partition("return all of it:\n\n")[2].partition("<|im_end|>")[0] if kind == "predicted edit" else ""
    )
    return Request(name, tokens, params, prediction=tuple(tokenizer.encode(predicted, add_special_tokens=False).ids))


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
        from benchmarks import speculation_schemas

        return speculation_schemas.run(pair, tokenizer, args.schemas, console)
    if args.lanes:
        from benchmarks import speculation_lanes

        return speculation_lanes.run(pair, tokenizer, args.lanes, args.rounds, console)
    rows = [(kind, streams) for streams in args.streams for kind in args.kinds]
    outcomes = [measure(pair, tokenizer, *row, args.rounds) for row in track(rows, "Measuring", console=console)]
    print_wide(report(outcomes))
    return outcomes


if __name__ == "__main__":
    main()
