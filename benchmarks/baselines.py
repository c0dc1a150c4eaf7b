"""How batching and order decide throughput and latency, on one engine: `make bench-baselines`.

One model on this machine's CPU computes the same requests, which arrive at the same times, under each regime; there is
no gateway. Static batching waits for 16 requests, pads their prompts to the longest, computes every row until the
longest answer ends, and then returns all answers. Dynamic batching does the same, but waits at most half a second.
Continuous batching starts requests in any step, first come first served, shortest first, by priority, or by lanes;
`predicted` is shortest first where requests set no maximum, so that the engine must predict their lengths.
`preallocated` is continuous batching of as many requests as the same memory holds if each has its maximum length
reserved.
A third of the requests is interactive, with short answers.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.runner import DATA_DIR, JSON, MODEL, Run, at_least, benchmark, option, table_of
from engine.config import EngineConfig, core_config
from engine.core.config import CoreConfig
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.model.folders.prepare import prepare_model
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from lab.sim.baselines import POLICIES, Mode, engine_under
from lab.traffic.histogram import percentile

BATCH, WINDOW_S = 16, 0.5
"""Requests of a static batch, and seconds for which dynamic batching waits for more."""
MAX_LEN, POOL_TOKENS = 512, 8192
"""Maximum length of a sequence, and tokens of KV for which there is memory."""
REGIMES = ("static", "dynamic", "preallocated", "fcfs", "sjf", "predicted", "priority", "lanes")
FIRST_GUESS = 1024
"""Tokens of an answer that a gateway expects before it has seen any."""
PAD = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A request: when it arrives, in seconds, its lane, prompt, and tokens of its answer."""

    name: str
    arrival: float
    lane: Lane
    prompt: tuple[int, ...]
    output: int


@dataclass(slots=True)
class Progress:
    """Times of a job's first and last useful token, in seconds, and how many it has."""

    first: float = math.inf
    last: float = math.inf
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A regime at one rate: useful tokens a second from the first arrival to the last token, and latencies in seconds.
    `padding` is the share of computed tokens that no request had asked for."""

    regime: str
    rate: float
    tokens_s: float
    ttft_p50: float
    ttft_p99: float
    e2e_p50: float
    padding: float

    @property
    def requests(self) -> str:
        return f"{self.rate:g}" if math.isfinite(self.rate) else "all"


COLUMNS = "requests/s | regime | tokens/s | TTFT p50, s | TTFT p99, s | E2E p50, s | padding"
CELLS = (
    "{0.requests} | {0.regime} | {0.tokens_s:.0f} | {0.ttft_p50:.2f}"
    " | {0.ttft_p99:.2f} | {0.e2e_p50:.2f} | {0.padding:.0%}"
)


def make_jobs(rate: float, count: int, vocab: int, seed: int) -> list[Job]:
    """Return jobs that arrive at random (Poisson), or all at once if the rate is infinite. Answers' lengths vary as
    those of chats do: most are short, and some take the maximum."""
    rng, now, jobs = random.Random(seed), 0.0, []
    for number in range(count):
        is_interactive = number % 3 == 0
        prompt = tuple(rng.randrange(1, vocab) for _ in range(rng.randint(16, 160)))
        output = rng.randint(4, 16) if is_interactive else min(256, max(8, round(rng.lognormvariate(3.9, 0.9))))
        jobs.append(Job(str(number), now, Lane.INTERACTIVE if is_interactive else Lane.BATCH, prompt, output))
        now += rng.expovariate(rate) if math.isfinite(rate) else 0.0
    return jobs


class Served:
    """One model, and engines over it that compute jobs."""

    def __init__(self, folder: Path, state: Path) -> None:
        config = EngineConfig(
            str(folder),
            device="cpu",
            dtype="bfloat16",
            num_pages=POOL_TOKENS // 16 + 1,
            max_seqs=32,
            max_model_len=MAX_LEN,
            prefix_caching=False,
            speculation="off",
            state_dir=str(state),
        )
        self.runner = runner = ModelRunner(load(config))
        facts = runner.facts
        self._core = core_config(facts.config, runner.loaded.num_pages, 0, facts.max_model_len, facts.eos_token_ids)

    def run(self, regime: str, jobs: Sequence[Job]) -> tuple[dict[str, Progress], int]:
        """Compute jobs under a regime; return each one's progress, and the number of computed tokens."""
        windows = {"static": math.inf, "dynamic": WINDOW_S}
        never = self._core.eos_token_ids if regime == "predicted" else None
        feed = Padded(jobs, windows[regime]) if regime in windows else Live(jobs, never)
        engine = engine_under(mode_of(regime), self._settings(regime), self.runner)
        began, computed = time.perf_counter(), 0
        while not feed.is_done:
            now = time.perf_counter() - began
            for request in feed.due(now):
                computed += len(request.prompt_ids) + feed.outputs[request.id]
                engine.inbox.put(Submit(request))
            events = engine.step()
            now = time.perf_counter() - began
            for event in events:
                if feed.note(event.request_id, len(event.tokens), event.finish_reason is not None, now):
                    engine.inbox.put(Abort(event.request_id))
            if not engine.state.has_work:
                time.sleep(0.001)
        while engine.state.steps.released:  # the next engine needs all rows
            engine.step()
        return feed.progress, computed

    def _settings(self, regime: str) -> CoreConfig:
        return replace(self._core, max_seqs=POOL_TOKENS // MAX_LEN) if regime == "preallocated" else self._core


def mode_of(regime: str) -> Mode:
    return Mode({"predicted": "sjf"}.get(regime, regime if regime in POLICIES else "fcfs"))


class Live:
    """Submits each job when it arrives. If `never` has token ids, its request sets no maximum and never samples these
    tokens, and it is aborted when its answer is long enough, as where a stop string is found."""

    def __init__(self, jobs: Sequence[Job], never: Sequence[int] | None = None) -> None:
        self.progress = {job.name: Progress() for job in jobs}
        self.outputs = {job.name: job.output for job in jobs}
        self._never = never
        self._jobs = list(reversed(jobs))
        self._left = len(jobs)

    @property
    def is_done(self) -> bool:
        return not self._left

    def due(self, now: float) -> list[Request]:
        requests = []
        while self._jobs and self._jobs[-1].arrival <= now:
            job = self._jobs.pop()
            request = make_request(job.name, job.prompt, job.output, job.lane)
            requests.append(request if self._never is None else _unlimited(request, self._never))
        return requests

    def note(self, name: str, tokens: int, ends: bool, now: float) -> bool:
        """Take note of a job's tokens or end. Return whether its request should be aborted."""
        seen = self.progress[name]
        if tokens:
            seen.first, seen.last, seen.tokens = min(seen.first, now), now, seen.tokens + tokens
        self._left -= ends
        return seen.tokens == self.outputs[name] and not ends


class Padded:
    """Submits jobs in batches of `BATCH`, padded to their longest prompt and answer, when the batch before has ended
    and enough have arrived, or `window` seconds after the first of them. Answers are returned when all have ended."""

    def __init__(self, jobs: Sequence[Job], window: float) -> None:
        self.progress = {job.name: Progress() for job in jobs}
        self.outputs: dict[str, int] = {}
        """Tokens that each submitted job's row computes."""
        self._jobs, self._window = list(jobs), window
        self._running: dict[str, Job] = {}
        self._open: set[str] = set()

    @property
    def is_done(self) -> bool:
        return not (self._jobs or self._open)

    def due(self, now: float) -> list[Request]:
        arrived = [job for job in self._jobs[:BATCH] if job.arrival <= now]
        is_last = len(arrived) == len(self._jobs)
        waited = bool(arrived) and now >= arrived[0].arrival + self._window
        if self._open or not arrived or not (len(arrived) == BATCH or is_last or waited):
            return []
        self._jobs = self._jobs[len(arrived) :]
        self._running = {job.name: job for job in arrived}
        self._open = set(self._running)
        longest, output = max(len(job.prompt) for job in arrived), max(job.output for job in arrived)
        self.outputs |= dict.fromkeys(self._running, output)
        return [
            make_request(job.name, (PAD,) * (longest - len(job.prompt)) + job.prompt, output, Lane.BATCH)
            for job in arrived
        ]

    def note(self, name: str, tokens: int, ends: bool, now: float) -> bool:
        """Take note of a row's end. Returns False: rows end by themselves."""
        self._open -= {name} if ends else set()
        if ends and not self._open:
            for job in self._running.values():
                self.progress[job.name] = Progress(now, now, job.output)
        return False


def make_request(name: str, prompt: tuple[int, ...], output: int, lane: Lane) -> Request:
    params = SamplingParams(output, temperature=0.0, ignore_eos=True)
    return Request(name, prompt, params, None, lane, arrival=time.monotonic())


def _unlimited(request: Request, never: Sequence[int]) -> Request:
    params = request.params._replace(
        max_tokens=MAX_LEN - len(request.prompt_ids), ignore_eos=False, logit_bias=tuple((one, -100.0) for one in never)
    )
    return request._replace(params=params, expected_tokens=FIRST_GUESS)


def judge(regime: str, rate: float, jobs: Sequence[Job], progress: dict[str, Progress], computed: int) -> Outcome:
    """Return the figures of a run. Latencies are those of the interactive third."""
    useful, end = sum(job.output for job in jobs), max(one.last for one in progress.values())
    chats = [job for job in jobs if job.lane is Lane.INTERACTIVE]
    ttft = sorted(progress[job.name].first - job.arrival for job in chats)
    e2e = sorted(progress[job.name].last - job.arrival for job in chats)
    p50, p99, whole = (percentile(*pair) or 0.0 for pair in ((ttft, 0.5), (ttft, 0.99), (e2e, 0.5)))
    asked = sum(len(job.prompt) + job.output for job in jobs)
    return Outcome(regime, rate, useful / end, p50, p99, whole, 1 - asked / computed)


def draw(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write a plot of the interactive requests' TTFT p99 over the rate, with a line for each regime."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for regime in dict.fromkeys(one.regime for one in outcomes):
        line = [one for one in outcomes if one.regime == regime and math.isfinite(one.rate)]
        axes.plot([one.rate for one in line], [one.ttft_p99 for one in line], marker="o", label=regime)
    axes.set(xlabel="requests/s", ylabel="TTFT p99 of interactive requests, s", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(out, dpi=100)


def rate(text: str) -> float:
    """Return the number that an option has. Raises ArgumentTypeError if it is not positive and finite."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return number


@benchmark(
    MODEL,
    DATA_DIR,
    option("--rates", [2, 4, 6, 8], "requests a second", type=rate, nargs="*"),
    option("--requests", 96, "of each run", type=at_least(1)),
    option("--regimes", REGIMES, "regimes to run", choices=REGIMES),
    option("--plot", Path, "also draw the figures here"),
    JSON,
)
def bench(run: Run) -> None:
    args = run.options
    served = Served(prepare_model(args.model, args.data_dir, run.console), args.data_dir / "engine")
    runs = [(rate, regime) for rate in (math.inf, *args.rates) for regime in args.regimes]
    served.run("fcfs", make_jobs(math.inf, 32, served.runner.facts.vocab_size, seed=99))  # tapes are recorded once
    outcomes = []
    for rate, regime in run.track(runs):
        jobs = make_jobs(rate, args.requests, served.runner.facts.vocab_size, seed=1)
        outcomes.append(judge(regime, rate, jobs, *served.run(regime, jobs)))
    title = "Batching and order on one engine; latencies are those of the interactive third"
    run.show(table_of(title, outcomes, COLUMNS, CELLS, ("regime",)), outcomes)
    if args.plot:
        draw(outcomes, args.plot)


if __name__ == "__main__":
    bench.main()
