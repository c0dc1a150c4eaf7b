"""`make bench-routes`: cost against accuracy of a cascade and a learned router, beside random mixing and each alone.

    python -m benchmarks.routing [--train 400] [--prompts 500] [--hard 0.2] [--plot FILE] [--json FILE]

The prompts of benchmarks/routing_task.py have answers that can be checked. Two members (benchmarks/routing_members.py),
of which the large one costs RATIO times as much for each token, answer all of them, and so do the policies, by
arithmetic. Thresholds are chosen on the training prompts, and figures are of held-out ones.
A cascade pays for the small member's answer always, the learned router for a prefill of the small member.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks import routing_members, routing_task
from benchmarks.routing_members import make_members
from benchmarks.routing_task import Task, tasks
from benchmarks.runner import DATA_DIR, JSON, Run, benchmark, option, stamp, table
from engine.model.folders.prepare import prepare_model
from gateway.llm.llm import LLM
from gateway.llm.params import SamplingParams
from gateway.llm.results import Result
from gateway.virtual_models.features import NAMES, PromptFacts, text_features
from lab.demo.dense import dense_folder
from lab.plot import check_available
from lab.route_training import fit
from lab.route_training.curve import Arm, Point, choose, curve

RATIO = 10.0
"""Price of a token of the large member over that of the small one."""
MOST_COST = 0.5
"""Share of the large member's cost up to which policies may go."""
AIM = 0.47
"""Cost that thresholds may reach on the training prompts, which leaves room for prompts that cost more."""
MOST_TOKENS = 64
TRAIN_SEED, HELD_OUT_SEED = 1001, 3003
CASCADE, LEARNED, TEXT = "cascade", "learned", "learned, text alone"
ANY_LOGPROB = (-np.inf, np.inf)

Floats = fit.Floats


@dataclass(frozen=True, slots=True)
class Recorded:
    """What both members answered to some tasks: arrays [n], in order of the tasks."""

    asked: Sequence[Task]
    right: Mapping[str, Floats]
    """1 for right answers, 0 for wrong ones, by member."""
    costs: Mapping[str, Floats]
    """Costs of the answers, in prices of a token of the small member."""
    prompt: Floats
    """Tokens of the prompts."""
    confidence: Floats
    """Mean log-probability of the small member's tokens."""
    rows: Floats
    """Features of the router, [n, num_features]: of the text, then of the vector of the small member."""

    @property
    def unit(self) -> float:
        """Mean cost of the large member's answers."""
        return float(self.costs["large"].mean())

    @property
    def suffices(self) -> fit.Bools:
        return self.right["small"] >= self.right["large"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy on the held-out prompts: its curve, and the point of the threshold that the training prompts gave."""

    points: Sequence[Point]
    chosen: Point


def record(llm: LLM, asked: Sequence[Task]) -> Recorded:
    """Have both members answer the tasks."""
    answers = {member: _answers(llm, asked, member) for member in ("small", "large")}
    prices = {"small": 1.0, "large": RATIO}
    right = {
        member: np.array([float(task.is_right(result.text)) for task, result in zip(asked, results, strict=True)])
        for member, results in answers.items()
    }
    costs = {
        member: np.array([prices[member] * (one.usage.prompt + one.usage.completion) for one in results])
        for member, results in answers.items()
    }
    small = answers["small"]
    vectors = llm.embed([list(one.prompt_token_ids) for one in small], adapter="small", lane="batch", pooling="mean")
    texts = np.array([text_features(PromptFacts((task.prompt,), task.prompt)) for task in asked])
    rows = np.hstack((texts, np.array([one.vector for one in vectors], dtype=np.float64)))
    confidence = np.array([np.mean([token.logprob for token in one.outputs[0].logprobs]) for one in small])
    return Recorded(asked, right, costs, np.array([float(one.usage.prompt) for one in small]), confidence, rows)


def _answers(llm: LLM, asked: Sequence[Task], member: str) -> list[Result]:
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, logprobs=0)
    chats = [[{"role": "user", "content": task.prompt}] for task in asked]
    return llm.chat(chats, params, adapter=member, lane="batch")


def evaluate(known: Recorded, unseen: Recorded) -> tuple[dict[str, Outcome], dict[str, fit.Quality]]:
    """Return each policy's outcome on `unseen`, and the quality of the routers' probabilities there, having trained and
    chosen thresholds on `known`."""
    outcomes = {CASCADE: _outcome(known, unseen, known.confidence, unseen.confidence, _cascade, ANY_LOGPROB)}
    qualities = {}
    for name, columns, arms in ((LEARNED, known.rows.shape[1], _with_vector), (TEXT, len(NAMES), _plain)):
        rows = known.rows[:, :columns]
        folds = fit.held_out(rows, known.suffices, len(NAMES), 0)
        chances = fit.fit(rows, known.suffices, len(NAMES), 0).probabilities(unseen.rows[:, :columns])
        outcomes[name] = _outcome(known, unseen, folds, chances, arms)
        qualities[name] = fit.quality(chances, unseen.suffices)
    return outcomes, qualities


def _outcome(
    known: Recorded,
    unseen: Recorded,
    known_chances: Floats,
    chances: Floats,
    arms: Callable[[Recorded], tuple[Arm, Arm]],
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Outcome:
    """Return a policy's outcome on `unseen`, with the threshold that is best on `known`.

    Args:
        known_chances, chances: what is compared with the threshold, for both.
        arms: returns what the small and the large member yield under the policy.
        bounds: see `curve`.
    """
    chosen = choose(curve(known_chances, *arms(known), known.unit, bounds), None, AIM)
    small, large = arms(unseen)
    points = curve(chances, small, large, unseen.unit, bounds)
    by_small = chances >= chosen.threshold
    cost, quality = (
        float(np.where(by_small, one, other).mean())
        for one, other in ((small.costs, large.costs), (small.scores, large.scores))
    )
    return Outcome(points, Point(chosen.threshold, cost / unseen.unit, quality, float(by_small.mean())))


def _plain(recorded: Recorded) -> tuple[Arm, Arm]:
    small, large = (Arm(recorded.right[member], recorded.costs[member]) for member in ("small", "large"))
    return small, large


def _cascade(recorded: Recorded) -> tuple[Arm, Arm]:
    small, large = _plain(recorded)
    return small, Arm(large.scores, large.costs + small.costs)


def _with_vector(recorded: Recorded) -> tuple[Arm, Arm]:
    small, large = _plain(recorded)
    return Arm(small.scores, small.costs + recorded.prompt), Arm(large.scores, large.costs + recorded.prompt)


def recovered(outcome: Outcome, low: float, high: float) -> float:
    """Return the share of the gap between the members' accuracies that a policy recovers."""
    return (outcome.chosen.quality - low) / (high - low)


def policies_table(unseen: Recorded, outcomes: Mapping[str, Outcome], qualities: Mapping[str, fit.Quality]) -> Table:
    low, high = (float(unseen.right[member].mean()) for member in ("small", "large"))
    cheap = float(unseen.costs["small"].mean()) / unseen.unit
    mixed = (MOST_COST - cheap) / (1 - cheap)
    rows = [("small alone", f"{low:.1%}", f"{cheap:.3f}", "0%", "100%")]
    for name, outcome in outcomes.items():
        point, measured = outcome.chosen, qualities.get(name)
        said = (f"{measured.brier:.3f}", f"{measured.ece:.3f}") if measured else ()
        share = f"{recovered(outcome, low, high):.1%}"
        rows.append((name, f"{point.quality:.1%}", f"{point.cost:.3f}", share, f"{point.small_share:.0%}", *said))
    middle = f"{low + mixed * (high - low):.1%}"
    rows.append(("random", middle, f"{MOST_COST:.3f}", f"{mixed:.1%}", f"{1 - mixed:.0%}"))
    rows.append(("large alone", f"{high:.1%}", "1.000", "100%", "0%"))
    title = f"{len(unseen.asked)} held-out prompts; thresholds chosen on training prompts"
    return table(title, "| accuracy | cost | gap recovered | by small | Brier | ECE", rows)


def kinds_table(unseen: Recorded) -> Table:
    """Return each member's accuracy by kind of task."""
    rows, kinds = [], np.array([task.kind for task in unseen.asked])
    for kind, count in sorted(Counter(kinds.tolist()).items()):
        shares = (f"{unseen.right[member][kinds == kind].mean():.0%}" for member in ("small", "large"))
        rows.append((kind, str(count), *shares))
    return table("accuracy by kind", "kind | prompts | small | large", rows, ("kind",))


def draw(unseen: Recorded, outcomes: Mapping[str, Outcome], out: Path) -> None:
    """Write a plot of accuracy over cost to the file `out`, in the format of its suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    low, high = (float(unseen.right[member].mean()) for member in ("small", "large"))
    cheap = float(unseen.costs["small"].mean()) / unseen.unit
    for name, outcome in outcomes.items():
        [line] = axes.plot([p.cost for p in outcome.points], [100 * p.quality for p in outcome.points], label=name)
        axes.plot(outcome.chosen.cost, 100 * outcome.chosen.quality, "o", color=line.get_color())
    axes.plot([cheap, 1], [100 * low, 100 * high], "k:", label="random")
    axes.plot([cheap, 1], [100 * low, 100 * high], "ks", label="small, large alone")
    axes.axhline(100 * (low + 0.9 * (high - low)), color="grey", linestyle="--", label="90% of the gap")
    axes.set(xlabel="cost of a request, large = 1", ylabel="right answers, %", xlim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=110)


def members_folder(data_dir: Path) -> Path:
    """Return the folder of the members that the present recipe makes, by its content."""
    recipe = b"".join(inspect.getsource(module).encode() for module in (routing_members, routing_task))
    return data_dir / "benchmarks" / f"routing-{blake2b(recipe, digest_size=4).hexdigest()}"


@benchmark(
    option("--train", 400, "prompts that the router is trained with"),
    option("--prompts", 500, "held-out prompts"),
    option("--hard", 0.2, "share of hard tasks"),
    option("--members", Path, "folder of members that exist, or are to be made"),
    option("--plot", Path),
    JSON,
    DATA_DIR,
)
def bench(run: Run) -> None:
    options = run.options
    if options.plot:
        check_available(options.plot)
    dense = dense_folder("embedded", options.data_dir, run.console)
    members = make_members(dense, options.members or members_folder(options.data_dir))
    served = prepare_model("embedded", options.data_dir, run.console)
    sizes = (options.train, TRAIN_SEED), (options.prompts, HELD_OUT_SEED)
    with LLM(served, adapters=dict(members)) as llm:
        known, unseen = (record(llm, tasks(count, seed, options.hard)) for count, seed in sizes)
    outcomes, qualities = evaluate(known, unseen)
    if options.plot:
        draw(unseen, outcomes, options.plot)
    document = {**stamp(), "outcomes": outcomes, "qualities": qualities}
    run.show([kinds_table(unseen), policies_table(unseen, outcomes, qualities)], document)


if __name__ == "__main__":
    bench.main()
