"""Speed of quantised weights beside bf16: `make bench-weights`.

Engines over the same model, one for each form of its weights, compute the same requests in turn, so that all meet the
same machine, in the dtype that `auto` chooses for it unless `--dtype` names one. There is no gateway. `stored` reads a
GGUF file as it is; `bf16` has its weights dequantised, from which `int8` and `int4` are quantised. Decoding is measured
by the steps in which all streams decode, prefill by one prompt of 512 tokens. Ratios are medians over rounds, each of
which has every form once. With `--llama-cpp`, the library llama.cpp computes the same cases from the same GGUF file; it
samples nothing, and has no adapters that differ by sequence.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.runner import (
    DATA_DIR,
    JSON,
    MODEL,
    Ratio,
    Run,
    at_least,
    benchmark,
    in_turn,
    option,
    table_of,
)
from engine.config import EngineConfig, core_config
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.model.folders.prepare import prepare_model
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.sizes import count_weight_bytes, find_kept_bits
from engine.process.model_source import GGUF_NAME
from lab.demo.dense import dense_folder
from lab.random_adapters import write_adapters

FORMS = ("bf16", "stored", "int8", "int4")
PROMPT, TOKENS, PREFILL = 64, 32, 512
"""Tokens of a prompt and of its answer where decoding is measured, and of the prompt where prefill is."""
RANK = 8
PATIENT_S = 60.0
"""Goals for TTFT and ITL. They keep no prompts out of steps, so that all streams begin before the first one ends."""


@dataclass(frozen=True, slots=True)
class Case:
    """`streams` requests at a time, over base and adapters in turn; with no streams, one prompt is prefilled."""

    name: str
    streams: int
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over the rounds of one case with one form of weights. `milliseconds` are those of a step in which all
    streams decode, or of a prefill; `ratio` is the speed over bf16's, and `least` and `most` its extreme rounds."""

    case: str
    form: str
    milliseconds: float
    tokens_s: float
    ratio: float
    least: float
    most: float


COLUMNS = " | weights | ms | tokens/s | over bf16 | of rounds"
CELLS = "{0.case} | {0.form} | {0.milliseconds:.1f} | {0.tokens_s:.0f} | {0.ratio:.2f} | {0.least:.2f} to {0.most:.2f}"


class Form(Protocol):
    """A form of the weights that can compute cases. `weight_bytes` are 0 if they are not known."""

    weight_bytes: int
    has_adapters: bool

    def run(self, case: Case, rng: random.Random) -> float:
        """Returns the seconds of the case: of the median step that decodes, or of a prefill. Prompts are new ones."""
        ...


class Served:
    """An engine over one form of the weights, with its adapters loaded."""

    has_adapters = True

    def __init__(self, form: str, folder: Path, state: Path, adapters: Sequence[Path], dtype: str) -> None:
        weights = form if form in ("int8", "int4") else "auto"
        config = EngineConfig(
            str(folder),
            device="cpu",
            dtype=dtype,
            weights=weights,
            memory_gb=1,
            prefix_caching=False,
            state_dir=str(state),
        )
        self.runner = runner = ModelRunner(load(config))
        facts = runner.facts
        bits = find_kept_bits(facts.config, facts.spec, facts.device, facts.dtype)
        self.weight_bytes = count_weight_bytes(facts.spec, bits)
        core = core_config(facts.config, runner.loaded.num_pages, 0, facts.max_model_len, facts.eos_token_ids)
        self.engine = Engine(EngineState.create(core), runner)
        self.adapters = [self.engine.load_adapter(str(path)).adapter_hash for path in adapters]

    def run(self, case: Case, rng: random.Random) -> float:
        for number in range(max(case.streams, 1)):
            self._submit(str(number), case, number, rng)
        steps: list[tuple[float, int]] = []
        while self.engine.state.has_work or not steps:
            began = time.perf_counter()
            self.engine.step()
            steps.append((time.perf_counter() - began, self._decodes()))
        if not case.streams:
            return sum(seconds for seconds, _ in steps)
        return statistics.median(seconds for seconds, decodes in steps if decodes == case.streams)

    def _decodes(self) -> int:
        """Returns how many sequences the last step advanced by a token, or 0 if it computed anything else."""
        chunks = plan.chunks if (plan := self.engine.state.steps.absorbed) else ()
        return len(chunks) if all(chunk.num_tokens == 1 for chunk in chunks) else 0

    def _submit(self, name: str, case: Case, number: int, rng: random.Random) -> None:
        vocab = self.runner.facts.vocab_size
        length, tokens = (PROMPT, TOKENS) if case.streams else (PREFILL, 1)
        prompt = tuple(rng.randrange(vocab) for _ in range(length))
        adapter = self.adapters[number % case.adapters] if case.adapters else None
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        self.engine.inbox.put(Submit(Request(name, prompt, params, adapter, ttft=PATIENT_S, itl=PATIENT_S)))


class LlamaCpp:
    """llama.cpp in a process of another Python, over a GGUF file."""

    weight_bytes = 0
    has_adapters = False

    def __init__(self, python: Path, gguf: Path, streams: int) -> None:
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        words = [python, "-P", worker, gguf.resolve(), streams, PREFILL, torch.get_num_threads()]
        self._process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.version = self._answer()["version"]

    def run(self, case: Case, rng: random.Random) -> float:
        prompt = PROMPT if case.streams else PREFILL
        order = {"streams": case.streams, "prompt": prompt, "tokens": TOKENS, "seed": rng.randrange(1 << 30)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        return float(self._answer())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            code = self._process.wait()
            raise SystemExit(
                f"llama.cpp ended with {code}: is llama-cpp-python installed there, and built for this CPU?"
            )
        return json.loads(line)


def measure(served: dict[str, Form], case: Case, rounds: int) -> list[Outcome]:
    """Returns an outcome for each form. A first round is not counted: it records tapes."""
    forms = [form for form, one in served.items() if one.has_adapters or not case.adapters]
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for number in range(rounds + 1):
        for form in in_turn(forms, number):
            took = served[form].run(case, random.Random(number))
            if number:
                seconds[form].append(took)
    tokens = case.streams or PREFILL
    outcomes = []
    for form, own in seconds.items():
        ratio, middle = Ratio.of(seconds["bf16"], own), statistics.median(own)
        values = 1e3 * middle, tokens / middle, ratio.median, ratio.least, ratio.most
        outcomes.append(Outcome(case.name, form, *values))
    return outcomes


def make_cases(streams: Sequence[int], adapters: int) -> list[Case]:
    cases = [Case(f"{count} streams", count) for count in streams]
    if adapters:
        cases.append(Case(f"{max(streams)} streams, {adapters} adapters", max(streams), adapters))
    return [*cases, Case(f"prefill of {PREFILL}", 0)]


@benchmark(
    MODEL,
    DATA_DIR,
    option("--streams", [1, 8, 32], "requests at a time", type=at_least(1)),
    option("--adapters", 8, "of rank 8, in the case with adapters", type=at_least(0)),
    option("--dtype", "auto", "engine.dtype of all forms but bf16, whose dtype is auto"),
    option("--rounds", 7, "runs of each case and form", type=at_least(1)),
    option("--llama-cpp", Path, "a Python with llama-cpp-python", metavar="PYTHON"),
    JSON,
)
def bench(run: Run) -> None:
    args = run.options
    stored, dense = (prepare(args.model, args.data_dir, run.console) for prepare in (prepare_model, dense_folder))
    adapters = list(write_adapters(stored, run.scratch, [RANK] * args.adapters).values())
    with ExitStack() as stack:
        served: dict[str, Form] = {}
        for form in run.track(FORMS, "Loading"):
            folder, dtype = stored if form == "stored" else dense, "auto" if form == "bf16" else args.dtype
            served[form] = Served(form, folder, args.data_dir / "engine", adapters, dtype)
        if args.llama_cpp:
            peer = LlamaCpp(args.llama_cpp, stored / GGUF_NAME, max(args.streams))
            stack.callback(peer.close)
            served[f"llama.cpp {peer.version}"] = peer
        outcomes: list[Outcome] = []
        for case in run.track(make_cases(args.streams, args.adapters)):
            outcomes += measure(served, case, args.rounds)
    sizes = ", ".join(f"{form} {one.weight_bytes / 1e6:.0f} MB" for form, one in served.items() if one.weight_bytes)
    run.show(table_of(f"Forms of weights: {sizes}", outcomes, COLUMNS, CELLS, ("", "weights")), outcomes)


if __name__ == "__main__":
    bench.main()
