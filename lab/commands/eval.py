"""`loralane eval`: evaluates the base model and its adapters. `eval tasks` scores them by lm-eval's tasks, and `eval
drift` (eval_drift.py) compares forms of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.cli.http import open_http
from gateway.cli.options import DEMO_TENANT_KEY, LOCAL_URL, ServerUrl, UserKey, console
from gateway.terminal.output import atomic_file, check_writable, exit_with_error, integer_parser, print_wide
from lab.commands import eval_drift
from lab.evaluation.models import ALL, EvalError, Model, chosen_models, listed, served_models
from lab.evaluation.scores import Results, score_table

if TYPE_CHECKING:
    from lab.evaluation.harness import Harness

INSTALL = "this command needs lm-eval; install it with: pip install 'loralane[eval]'"
DEMO_TASK = "demo_capitals"

app = typer.Typer(help="Evaluate the base model and its adapters.", no_args_is_help=True, rich_markup_mode="markdown")
app.command(help=eval_drift.HELP)(eval_drift.drift)

HELP = f"""Score the base model and its adapters by tasks of EleutherAI's lm-eval, and print one table.

The requests go to the batch lane of a running gateway. A score is a metric of a task, with its standard error if
lm-eval gives one. `{DEMO_TASK}` comes with loralane; data of other tasks are fetched from the Hugging Face Hub.

- `loralane eval tasks` scores the demo's base model and all adapters by `{DEMO_TASK}`
- `loralane eval tasks --adapters support,billing --tasks arc_easy,hellaswag --limit 200 --json scores.json`
- `loralane eval tasks --tasks our_task --include-path ./tasks --chat`
"""


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
        from lab.evaluation.harness import Harness
    except ModuleNotFoundError as error:
        exit_with_error(f"{INSTALL} ({error})")
    try:
        if json_file is not None:
            check_writable(json_file, "--json")
        with open_http(url, key) as http:
            models = chosen_models(served_models(http), adapters)
            harness = Harness(http, listed(names), include_path or (), limit, fewshot, chat=chat, tokenizer=tokenizer)
            results = results_of(models, harness, json_file)
    except (EvalError, ValueError) as error:
        exit_with_error(str(error))
    print_wide(score_table(results))


def results_of(models: Sequence[Model], harness: Harness, file: Path | None) -> dict[str, Results]:
    """Evaluate models one after the other behind a progress bar, and return the results of each. The file is written
    after each model, so that results are kept if a later model fails."""
    results: dict[str, Results] = {}
    with _bars() as progress:
        for model in models:
            results[model.id] = harness.results(model, _shown(progress, model.id))
            if file is not None:
                with atomic_file(file) as target:
                    target.write(json.dumps({**harness.settings, "models": results}, indent=2).encode() + b"\n")
    return results


def _bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def _shown(progress: Progress, name: str) -> Callable[[int, int], None]:
    """Add a progress bar for the model `name`, and return its update function of (prompts done, prompts in all)."""
    bar = progress.add_task(name, total=None)
    return lambda done, total: progress.update(bar, completed=done, total=total)
