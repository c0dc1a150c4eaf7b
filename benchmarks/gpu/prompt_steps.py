"""Section G: steps with prompts, at the 8B shape, as captured graphs and kernel by kernel.

Requests that decode get neighbours that read prompts: in each step one more request arrives, with a prompt of one chunk
and an answer of one token. What a step takes longer than a step without prompts is what its prompt costs the requests
that decode. Only the token budget limits the steps, so that each has the whole prompt. The first prompts are timed
before all others, because they would wait for kernels that the start did not compile.

The requests that decode also get one neighbour that follows a JSON schema. What a step takes longer than beside a free
neighbour is what the grammar costs the others: the host waits for a step's tokens before it computes the next mask.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.gpu.decoding import RANKS, Wave, end_wave, make_request, start_wave
from benchmarks.gpu.grammar_rows import CAN_FOLLOW, SCHEMA, write_tokenizer
from benchmarks.gpu.house import House, HouseSize, build_house, check_events
from benchmarks.gpu.journal import Journal, Value
from benchmarks.gpu.shapes import model_spec, spread
from benchmarks.gpu.step_modes import Mode, stepping
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import AdapterHash

LEAST_S = 4.0
MODES = (Mode(True, True), Mode(False, True))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the section. `rows` requests with prompts of `prompt` tokens decode; `arrivals` requests with prompts of
    `chunks` tokens arrive one a step."""

    house: HouseSize
    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    prompt: int
    arrivals: int


FULL = Sizes(HouseSize(False, 264, 4096, 4096, policy="fcfs"), (64, 256), (32, 128, 512, 2048), 128, 16)
TINY = Sizes(HouseSize(True, 4, 64, 128, num_pages=600, policy="fcfs"), (2,), (5, 20), 6, 2)


def run(journal: Journal) -> None:
    sizes = TINY if journal.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="loralane-8b-") as scratch:
        write_tokenizer(Path(scratch), model_spec(journal.tiny).vocab_size)
        house = build_house(sizes.house, Path(scratch), journal.tell)
        adapters = house.register(spread(RANKS, max(sizes.rows)), "a")
        time_first_prompts(journal, house, sizes, adapters[0])
        time_first_grammar(journal, house, sizes)
        for rows in sizes.rows:
            for name, used in (("base", (None,) * rows), (f"{rows} adapters", adapters[:rows])):
                for mode in (one for one in MODES if house.runner.loaded.captured or not one.graphs):
                    with journal.case(f"{rows} rows, {name}, {mode.name}", LEAST_S), stepping(house, mode):
                        time_neighbours(journal, house, sizes, used, f"{rows} rows, {name}, {mode.name}")
        house.runner.close()


def time_first_prompts(journal: Journal, house: House, sizes: Sizes, adapter: AdapterHash) -> None:
    """Write how long the first answer to a prompt of each length takes after the start, and the second."""
    for chunk in sizes.chunks:
        for name, used in (("base", None), ("an adapter", adapter)):
            with journal.case(f"first prompt of {chunk}, {name}", LEAST_S):
                first, second = (
                    answer_ms(house, f"{chunk}/{name}/{turn}", chunk, used) for turn in ("first", "second")
                )
                journal.row("first prompts", f"{chunk} tokens, {name}", **{"first ms": first, "second ms": second})


def time_first_grammar(journal: Journal, house: House, sizes: Sizes) -> None:
    """Write how long the first answer that follows `SCHEMA` takes, for which the schema is compiled, and the second."""
    if not CAN_FOLLOW:
        journal.note("grammars are left out: llguidance is not installed")
        return
    with journal.case("first grammar", LEAST_S):
        first, second = (answer_ms(house, f"grammar/{turn}", sizes.chunks[0], None, SCHEMA) for turn in (1, 2))
        name = f"{sizes.chunks[0]} tokens, a JSON schema"
        journal.row("first prompts", name, **{"first ms": first, "second ms": second})


def answer_ms(
    house: House, name: str, prompt: int, adapter: AdapterHash | None, grammar: Grammar | None = None
) -> float:
    """Return the milliseconds that an idle engine takes for a prompt and one token."""
    house.engine.inbox.put(Submit(make_request(name, prompt, 1, adapter, Random(name), grammar)))
    begun = time.perf_counter()
    check_events(house.engine.step())
    while house.engine.state.has_work:
        check_events(house.engine.step())
    return (time.perf_counter() - begun) * 1e3


def time_neighbours(
    journal: Journal, house: House, sizes: Sizes, adapters: Sequence[AdapterHash | None], case: str
) -> None:
    names = start_wave(house, Wave("rows", adapters), sizes.prompt)
    alone = decode_ms(house, sizes.arrivals)
    journal.row("steps with prompts", f"{case}, no prompt", **{"step ms": alone, "added ms": 0.0})
    for chunk in sizes.chunks:
        journal.row("steps with prompts", f"{case}, {chunk}", **with_prompts(house, sizes, chunk, adapters[0], alone))
    if CAN_FOLLOW:
        time_grammar(journal, house, sizes, adapters[0], case)
    end_wave(house, names)


def time_grammar(journal: Journal, house: House, sizes: Sizes, adapter: AdapterHash | None, case: str) -> None:
    """Write how long steps take, without prompts, in which one more request decodes: one that is free, and one that
    follows `SCHEMA`. `added ms` is by how much the latter exceeds the former."""
    free = 0.0
    for name, grammar in (("one more row", None), ("one more row, with a grammar", SCHEMA)):
        names = start_wave(house, Wave(name, (adapter,), grammar), sizes.prompt)
        mean = decode_ms(house, sizes.arrivals)
        free = free or mean
        journal.row("steps with grammars", f"{case}, {name}", **{"step ms": mean, "added ms": mean - free})
        for one in names:
            house.engine.inbox.put(Abort(one))


def decode_ms(house: House, steps: int) -> float:
    """Return the mean milliseconds of a step in which all requests decode."""
    begun = time.perf_counter()
    for _ in range(steps):
        check_events(house.engine.step())
    return (time.perf_counter() - begun) / steps * 1e3


def with_prompts(house: House, sizes: Sizes, chunk: int, adapter: AdapterHash | None, alone: float) -> dict[str, Value]:
    """Let one request with a prompt of `chunk` tokens arrive in each of `sizes.arrivals` steps, and step until all have
    ended. Returns the mean milliseconds of a step, by how much they exceed `alone`, and the prompt tokens of a step."""
    engine, waiting, steps = house.engine, set[str](), 0
    begun = time.perf_counter()
    while steps < sizes.arrivals or waiting:
        if steps < sizes.arrivals:
            waiting.add(name := f"prompt{steps}")
            engine.inbox.put(Submit(make_request(name, chunk, 1, adapter, Random(f"{chunk}/{steps}/{adapter}"))))
        events = engine.step()
        check_events(events)
        waiting -= {event.request_id for event in events if event.finish_reason is not None}
        steps += 1
    mean = (time.perf_counter() - begun) / steps * 1e3
    return {"step ms": mean, "added ms": mean - alone, "prompt tokens a step": sizes.arrivals * chunk / steps}
