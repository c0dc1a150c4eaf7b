"""`loralane eval`: evaluates the base model and its adapters. `eval tasks` scores them by lm-eval's tasks, and `eval
drift` (eval_drift.py) compares forms of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from msgspec import Struct
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gateway.cli import eval_drift
from gateway.cli.http import open_http, refusal, unreachable
from gateway.cli.options import DEMO_TENANT_KEY, LOCAL_URL, ServerUrl, UserKey, console
from gateway.terminal.output import atomic_file, check_writable, exit_with_error, integer_parser, print_wide

if TYPE_CHECKING:
    from gateway.cli.eval_harness import Harness

INSTALL = "this command needs lm-eval; install it with: pip install 'loralane[eval]'"
DEMO_TASK = "demo_capitals"
ALL, NONE = "all", "none"

app = typer.Typer(help="Evaluate the base model and its adapters.", no_args_is_help=True, rich_markup_mode="markdown")
app.command(help=eval_drift.HELP)(eval_drift.drift)

HELP = f"""Score the base model and its adapters by tasks of EleutherAI's lm-eval, and print one table.

The requests go to the batch lane of a running gateway. A score is a metric of a task, with its standard error if
lm-eval gives one. `{DEMO_TASK}` comes with loralane; data of other tasks are fetched from the Hugging Face Hub.

- `loralane eval tasks` scores the demo's base model and all adapters by `{DEMO_TASK}`
- `loralane eval tasks --adapters support,billing --tasks arc_easy,hellaswag --limit 200 --json scores.json`
- `loralane eval tasks --tasks our_task --include-path ./tasks --chat`
"""

Results = Mapping[str, Mapping[str, Any]]
"""lm-eval's results of one model: task or group -> `metric,filter` and `metric_stderr,filter` -> value."""


class Model(Struct, frozen=True):
    """A model as /v1/models lists it."""

    id: str
    root: str
    """The adapter's name if `id` is an alias; otherwise the base model's name."""
    parent: str | None
    """The base model of an adapter. None means that this is a base model."""
    max_model_len: int


class EvalError(Exception):
    """The gateway could not be reached or refused a request, or an argument is wrong; the message is shown to users."""


@app.callback()
def evaluate() -> None:
    """Evaluate the base model and its adapters."""


@app.command(help=HELP)
def tasks(
    names: Annotated[str, typer.Option("--tasks", metavar="A,B,...", help="Tasks or groups.")] = DEMO_TASK,
    adapters: Annotated[str, typer.Option(metavar="A,B,...", help="Adapters beside their base; or all, none.")] = ALL,
    include_path: Annotated[list[Path] | None, typer.Option(help="Folder of tasks of your own; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(parser=integer_parser(1), help="Most examples of each task.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(parser=integer_parser(0), help="Examples in each prompt; default: the task's.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    tokenizer: Annotated[
        str, typer.Option(help="Folder or Hugging Face id of the base model's tokenizer; default: ask the gateway.")
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write lm-eval's results here.")] = None,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
) -> None:
    try:
        from gateway.cli.eval_harness import Harness
    except ModuleNotFoundError as error:
        exit_with_error(f"{INSTALL} ({error})")
    try:
        if json_file is not None:
            check_writable(json_file, "--json")
        with open_http(url, key) as http:
            models = chosen_models(served_models(http), adapters)
            harness = Harness(http, _listed(names), include_path or (), limit, fewshot, chat=chat, tokenizer=tokenizer)
            found = results_of(models, harness, json_file)
    except (EvalError, ValueError) as error:
        exit_with_error(str(error))
    print_wide(score_table(found))


def served_models(http: httpx.Client) -> list[Model]:
    """Return the models that the key may use. Raises EvalError."""
    try:
        response = http.get("/v1/models")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise EvalError(unreachable(http, error)) from error
    if response.is_error:
        raise EvalError(refusal(response))
    fields = ("id", "root", "parent", "max_model_len")
    return [Model(*(model.get(name) for name in fields)) for model in response.json()["data"]]


def chosen_models(models: Sequence[Model], adapters: str) -> list[Model]:
    """Return the models to evaluate: base models, each followed by its chosen adapters. `adapters` is a list of names
    with commas, all (without aliases) or none. With a list, only the base models of the listed adapters are evaluated.
    Virtual models are left out. Raises EvalError: an adapter is unknown."""
    bases = [model for model in models if model.parent is None and model.root == model.id]
    if adapters == NONE:
        return bases
    known = {model.id: model for model in models if model.parent is not None}
    chosen = [name for name, model in known.items() if model.root in (name, model.parent)]
    if adapters != ALL:
        chosen = list(dict.fromkeys(_listed(adapters)))
        bases = [base for base in bases if any(name in known and known[name].parent == base.id for name in chosen)]
    for name in chosen:
        if name not in known:
            raise EvalError(f"there is no adapter {name!r}; there are: {', '.join(known) or 'none'}")
    of = {base.id: [known[name] for name in chosen if known[name].parent == base.id] for base in bases}
    return [model for base in bases for model in (base, *of[base.id])]


def results_of(models: Sequence[Model], harness: Harness, file: Path | None) -> dict[str, Results]:
    """Evaluate models one after the other behind a progress bar, and return the results of each. The file is written
    after each model, so that results are kept if a later model fails."""
    found: dict[str, Results] = {}
    with _bars() as progress:
        for model in models:
            found[model.id] = harness.results(model, _shown(progress, model.id))
            if file is not None:
                with atomic_file(file) as target:
                    target.write(json.dumps({**harness.settings, "models": found}, indent=2).encode() + b"\n")
    return found


def score_table(found: Mapping[str, Results]) -> Table:
    """Return a table with a row for each model and a column for each metric of each task."""
    rows = {model: dict(_cells(results)) for model, results in found.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table(box=None)
    table.add_column("model", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for model, row in rows.items():
        table.add_row(model, *(row.get(column, "-") for column in columns))
    return table


def _cells(results: Results) -> Iterator[tuple[str, str]]:
    """Yield, for each metric of each task, the title of its column and the text of its cell: the value and, if lm-eval
    gives one, the standard error."""
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{kind}")
                shown = f" ± {error:.4f}" if isinstance(error, int | float) else ""
                yield f"{task} {metric}" if kind == "none" else f"{task} {metric} {kind}", f"{value:.4f}{shown}"


def _bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def _shown(progress: Progress, name: str) -> Callable[[int, int], None]:
    """Add a progress bar for the model `name`, and return its update function of (prompts done, prompts in all)."""
    bar = progress.add_task(name, total=None)
    return lambda done, total: progress.update(bar, completed=done, total=total)


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
