"""`loralane route train`: trains a router that predicts whether the small member of a virtual model suffices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from msgspec import Struct, to_builtins
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gateway.cli.options import DEMO_TENANT_KEY, LOCAL_URL, ServerUrl, UserKey, console
from gateway.serve.process import run_loop
from gateway.terminal.output import atomic_file, exit_with_error, print_wide
from gateway.terminal.tls import chosen_tls_files
from gateway.virtual_models.features import NAMES
from gateway.virtual_models.router import RouterFile, content_hash, encode_router
from lab.commands.outputs import check_outputs, failures
from lab.route_training import fit
from lab.route_training.asking import AskError
from lab.route_training.collect import Collecting, Training
from lab.route_training.curve import Arm, Point, choose, curve, draw
from lab.route_training.examples import Json, read_examples

app = typer.Typer(help="Train routers of virtual models.", no_args_is_help=True, rich_markup_mode="markdown")

HELP = """Train a router that predicts from a prompt whether the small member of a virtual model suffices.

Each line of REQUESTS is a chat's or completion's body, or a line of a batch, and may say which member sufficed:
`"small_suffices": true`, or scores of both answers as `"small_score": 0.4, "large_score": 0.9`. For other lines both
members are asked, and the small one suffices if their answers agree. The vector of each prompt comes from a running
gateway; with `--features text` no gateway is needed for labelled lines.

Figures are of prompts that the router had not seen, by cross-validation; its vector's prefill is not part of the costs.

- `loralane route train requests.jsonl --small small --large large --plot router.png`
- `loralane route train requests.jsonl --small small --large large --cost 0.5 --labelled labelled.jsonl`
- `loralane route train labelled.jsonl --small small --large large --features text --max-loss 0.01`
"""
Pooling = Literal["mean", "last"]


class Trained(Struct, frozen=True):
    """A fitted router, and figures about its cost and quality from held-out prompts."""

    fitted: fit.Fitted
    chances: fit.Floats
    """For each prompt, the probability that the small member suffices, predicted by a router that was fitted without
    this prompt, [n]."""
    points: Sequence[Point]
    chosen: Point
    quality: fit.Quality


@app.callback()
def route() -> None:
    """Train routers of virtual models."""


@app.command(help=HELP)
def train(
    requests: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON lines: requests with labels.")],
    small: Annotated[str, typer.Option(help="Name of the small member.")] = "small",
    large: Annotated[str, typer.Option(help="Name of the large member.")] = "large",
    features: Annotated[
        Literal["vector", "text"], typer.Option(help="Use the prompt's vector and text features, or the latter alone.")
    ] = "vector",
    embedder: Annotated[str, typer.Option(help="Model of the vectors; default: the small member.")] = "",
    pooling: Annotated[Pooling, typer.Option(help="Vector of all tokens, or of the last one.")] = "mean",
    ratio: Annotated[float, typer.Option(min=1.0, help="Price of the large member over that of the small one.")] = 10.0,
    max_loss: Annotated[
        float | None, typer.Option(min=0.0, help="Most loss of mean quality against large alone; default: 0.02.")
    ] = None,
    cost: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Instead: most mean cost of a request, large = 1.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the router.")] = Path("router.json"),
    labelled: Annotated[Path | None, typer.Option(help="File for the lines with labels, to train again.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of cost against quality.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures, as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the folds.")] = 0,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
) -> None:
    try:
        import sklearn  # noqa: F401
    except ModuleNotFoundError:
        exit_with_error(fit.INSTALL)
    if max_loss is not None and cost is not None:
        exit_with_error("give either --max-loss or --cost")
    with failures(), _progress() as bars:
        check_outputs({"--out": out, "--labelled": labelled, "--json": json_file}, plot)
        examples = read_examples(requests)
        source = (embedder or small, pooling) if features == "vector" else None
        collecting = Collecting(examples, (small, large), source, bars, chosen_tls_files().context())
        try:
            training = run_loop(collecting.collect(url, key))
        except AskError as error:
            exit_with_error(str(error))
        if labelled is not None:
            _write_lines(collecting.lines(), labelled)
        trained = _train(training, ratio, 0.02 if max_loss is None else max_loss, cost, seed, bars)
        content = encode_router(_router_file(trained, source))
        with atomic_file(out) as target:
            target.write(content)
        if plot is not None:
            title = f"{small} or {large}: {len(examples)} prompts, held-out folds"
            draw(trained.points, trained.chosen, fit.reliability(trained.chances, training.suffices), title, plot)
        if json_file is not None:
            figures = {name: getattr(trained, name) for name in ("points", "chosen", "quality")}
            figures["version"] = content_hash(content)
            json_file.write_text(json.dumps(to_builtins(figures), indent=1) + "\n")
    print_wide(_table(trained))
    console.print(f"wrote {out}, version {content_hash(content)}", soft_wrap=True, highlight=False)


def _train(
    training: Training, ratio: float, max_loss: float, max_cost: float | None, seed: int, bars: Progress
) -> Trained:
    """Fit a router, and choose the probability that it takes as its threshold. Raises ValueError if there are too few
    prompts for which the small member suffices, or too few for which it does not, or if no threshold costs at most
    `max_cost`."""
    rows, suffices = training.rows, training.suffices
    fit.check_labels(suffices)
    task = bars.add_task("fitting", total=fit.FOLDS + 1)
    chances = fit.held_out(rows, suffices, len(NAMES), seed, lambda: bars.advance(task))
    fitted = fit.fit(rows, suffices, len(NAMES), seed)
    bars.advance(task)
    small_costs, large_costs = np.full(len(chances), 1 / ratio), np.ones(len(chances))
    points = curve(chances, Arm(training.small, small_costs), Arm(training.large, large_costs))
    return Trained(fitted, chances, points, choose(points, max_loss, max_cost), fit.quality(chances, suffices))


def _router_file(trained: Trained, source: tuple[str, str] | None) -> RouterFile:
    fitted, chosen = trained.fitted, trained.chosen
    model, pooling = source or ("", "mean")
    return RouterFile(
        embedder=model,
        pooling="last" if pooling == "last" else "mean",
        dimensions=len(fitted.weights) - len(NAMES),
        features=list(NAMES),
        mean=fitted.mean.tolist(),
        scale=fitted.scale.tolist(),
        weights=fitted.weights.tolist(),
        intercept=fitted.intercept,
        threshold=chosen.threshold,
        figures={"prompts": float(len(trained.chances)), **to_builtins(chosen), **to_builtins(trained.quality)},
    )


def _table(trained: Trained) -> Table:
    points, measured = trained.points, trained.quality
    table = Table(box=None, caption=f"{len(trained.chances):,} prompts, each by a router that had not seen it")
    for title in ("", "threshold", "cost", "quality", "by small"):
        table.add_column(title, justify="right" if title else "left")
    for name, point in (("small alone", points[0]), ("learned", trained.chosen), ("large alone", points[-1])):
        shown = f"{point.threshold:.3f}" if name == "learned" else ""
        table.add_row(name, shown, f"{point.cost:.3f}", f"{point.quality:.3f}", f"{point.small_share:.1%}")
    table.add_section()
    table.add_row("Brier score", "", "", f"{measured.brier:.3f}", f"constant {measured.brier_constant:.3f}")
    table.add_row("calibration error", "", "", f"{measured.ece:.3f}", "")
    table.add_row("AUC", "", "", f"{measured.auc:.3f}", "")
    return table


def _write_lines(lines: Iterator[Json], out: Path) -> None:
    with atomic_file(out) as target:
        for line in lines:
            target.write(json.dumps(line).encode() + b"\n")


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield bars
