"""`loralane batch`: submits files of requests as jobs of the batch lane, follows them, and fetches their answers."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gateway.cli.batch_lines import CheckedInput, LinesError, check_input
from gateway.cli.batch_watch import ENDED, batch_facts, batches_table, ended_lines, errors_table
from gateway.cli.options import DEMO_TENANT_KEY, LOCAL_URL, ServerUrl, UserKey, console, until_interrupted
from gateway.terminal.console import Console, plain
from gateway.terminal.output import atomic_file, check_writable, exit_with_error, integer_parser, print_wide

if TYPE_CHECKING:
    from gateway.cli.batch_client import BatchClient, Json

app = typer.Typer(
    help="Submit files of requests as jobs of the batch lane, follow them, and fetch their answers.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

NOT_ENDED, CUT_SHORT = 3, 4
EXIT_CODES = {"completed": 0, "failed": 1, "expired": CUT_SHORT, "cancelled": CUT_SHORT}
CODES_TEXT = "Exit status: 0 completed, 1 failed (or an error), 3 not ended yet, 4 expired or cancelled."

BatchId = Annotated[str, typer.Argument(metavar="ID", help="Id of the job, as `submit` and `list` print it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the job as JSON, with the fields of the HTTP API.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File for the answers once the job has ended.")]
Errors = Annotated[Path | None, typer.Option("--errors", help="File for failed lines; default: named like --output.")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Maximum seconds to wait; 0: query once; default: none.")]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two queries.")]


@app.command(epilog=CODES_TEXT)
def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="Requests, one a line.")],
    endpoint: Annotated[str, typer.Option(help="API path of the requests; default: the `url` of the lines.")] = "",
    window: Annotated[str, typer.Option(help="Time in which the job should end, as in 90s, 30m, 24h, 7d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Text to store with the job; repeatable.")
    ] = None,
    watch_it: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    output: Output = None,
    errors: Errors = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
) -> None:
    """Submit a file of requests as a job, and print its id.

    Each line is `{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ...}}`.

    - `loralane batch submit requests.jsonl`
    - `loralane batch submit requests.jsonl --window 2h --metadata run=7 --watch`
    - `loralane batch submit requests.jsonl --output answers.jsonl` waits for the answers and saves them
    - `id=$(loralane batch submit requests.jsonl) && loralane batch watch $id`
    """
    pairs = dict(map(_pair, metadata or ()))
    _check_targets(output, errors)
    with _client(url, key) as client:
        batch = _submitted(client, file, endpoint, window, pairs)
        print(json.dumps(batch) if as_json else plain(batch["id"]), flush=True)
        if watch_it or output is not None:
            _followed(client, batch, timeout, 1.0, as_json, output, errors)
        _say(f"follow it: loralane batch watch {batch['id']}")
        _say(f"its answers, when it has ended: loralane batch download {batch['id']}")


@app.command()
def status(
    batch_id: BatchId, as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: UserKey = DEMO_TENANT_KEY
) -> None:
    """Show the state and all fields of a job: `loralane batch status batch_6f... --json`."""
    with _client(url, key) as client:
        batch = client.get(batch_id)
    if as_json:
        print(json.dumps(batch, indent=2))
        return
    Console().print(batch_facts(batch))
    if batch.get("errors"):
        print_wide(errors_table(batch))


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(parser=integer_parser(1, 100), help="Maximum number of jobs.")] = 20,
    after: Annotated[str, typer.Option(metavar="ID", help="List only jobs older than this one.")] = "",
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
) -> None:
    """List the jobs of this key's tenant, newest first: `loralane batch list --limit 5`."""
    with _client(url, key) as client:
        batches = client.batches(limit, after)
    if as_json:
        print(json.dumps(batches, indent=2))
    else:
        print_wide(batches_table(batches))


@app.command(epilog=CODES_TEXT)
def watch(
    batch_id: BatchId,
    output: Output = None,
    errors: Errors = None,
    timeout: Timeout = None,
    interval: Interval = 1.0,
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
) -> None:
    """Follow a job to its end; Ctrl-C leaves it running. With --json, each change prints a line.

    - `loralane batch watch batch_6f...`
    - `loralane batch watch batch_6f... --output answers.jsonl` saves the answers when it has ended
    - `loralane batch watch batch_6f... --timeout 600 || echo "it has not completed: $?"`
    """
    _check_targets(output, errors)
    with _client(url, key) as client:
        _followed(client, {"id": batch_id}, timeout, interval, as_json, output, errors)


@app.command()
def cancel(
    batch_id: BatchId, as_json: AsJson = False, url: ServerUrl = LOCAL_URL, key: UserKey = DEMO_TENANT_KEY
) -> None:
    """Cancel a job: running lines are aborted, others do not begin, and answers so far are kept.

    - `loralane batch cancel batch_6f...`
    """
    with _client(url, key) as client:
        batch = client.cancel(batch_id)
    if as_json:
        print(json.dumps(batch, indent=2))
    else:
        _say(f"{_named(batch)}, after {_counts(batch)}")


@app.command()
def download(
    batch_id: BatchId,
    output: Output = None,
    errors: Errors = None,
    url: ServerUrl = LOCAL_URL,
    key: UserKey = DEMO_TENANT_KEY,
) -> None:
    """Save an ended job's answers to one file and its failed lines to another. A file appears only when it is complete.

    - `loralane batch download batch_6f...` writes `batch_6f....output.jsonl` and `batch_6f....errors.jsonl`
    - `loralane batch download batch_6f... --output answers.jsonl --errors failed.jsonl`
    """
    _check_targets(output, errors)
    with _client(url, key) as client:
        batch = client.get(batch_id)
        if batch["status"] not in ENDED:
            _say(f"{_named(batch)}: {_counts(batch)}; wait: loralane batch watch {batch_id}")
            raise typer.Exit(NOT_ENDED)
        if not _saved(client, batch, output, errors):
            exit_with_error(
                f"{_named(batch)} and has neither answers nor errors; see: loralane batch status {batch_id}"
            )


def _submitted(client: BatchClient, file: Path, endpoint: str, window: str, metadata: dict[str, str]) -> Json:
    """Check a file of requests, upload it and create a job with it; returns the job. An empty `endpoint` means that of
    the file's lines. An invalid file ends the command with an error."""
    with _transfer() as progress:
        looked = _looked(file, progress)
        with progress.open(file, "rb", description="sending") as content:
            sent = client.upload(file.name, content)
    _say(f"{looked.lines:,} lines are there as {sent['id']}")
    return client.create(sent["id"], endpoint or looked.endpoint, window, metadata)


def _looked(file: Path, progress: Progress) -> CheckedInput:
    try:
        with progress.open(file, "rb", description="looking") as content:
            return check_input(content)
    except LinesError as error:
        exit_with_error(f"{file} would be refused:\n{error}")


def _followed(
    client: BatchClient,
    batch: Json,
    timeout: float | None,
    interval: float,
    as_json: bool,
    output: Path | None,
    errors: Path | None,
) -> NoReturn:
    """Show a job's progress, queried every `interval` seconds, until it ends, `timeout` seconds pass or Ctrl-C; print
    each change if `as_json`. If it has ended and `output` is given, save its answers there and failed lines to
    `errors`. Then end the command with the job's exit status."""
    from gateway.cli.batch_watch import BatchBar, poll_batch

    with BatchBar(console) as bar, until_interrupted():
        for seen in poll_batch(client, batch["id"], interval, timeout, bar.note):
            bar.show(seen)
            if as_json and seen != batch:
                print(json.dumps(seen), flush=True)
            batch = seen
    _tell_end(batch)
    if output is not None and batch.get("status") in ENDED:
        _saved(client, batch, output, errors)
    raise typer.Exit(EXIT_CODES.get(batch.get("status", ""), NOT_ENDED))


def _tell_end(batch: Json) -> None:
    batch_id = batch["id"]
    if batch.get("status") not in ENDED:
        _say(f"{batch_id} goes on; follow it: loralane batch watch {batch_id}")
        return
    _say(f"{_named(batch)}: {_counts(batch)}")
    if batch.get("errors"):
        console.print(errors_table(batch))
        _say("correct the file, and submit it again")


def _saved(client: BatchClient, batch: Json, output: Path | None, errors: Path | None) -> bool:
    """Download a job's answers to the file `output` and its failed lines to `errors`. None for `output` means a file
    named after the job; None for `errors` means one named after `output` or, if that is None, after the job. Returns
    False if the job has neither answers nor failed lines."""
    from gateway.cli.batch_client import output_name

    if errors is None:
        errors = output_name(batch, "errors") if output is None else output.with_suffix(f".errors{output.suffix}")
    targets = {"output_file_id": output or output_name(batch, "output"), "error_file_id": errors}
    wanted = [(batch[name], path) for name, path in targets.items() if batch.get(name)]
    for file_id, path in wanted:
        _fetch(client, file_id, path)
    return bool(wanted)


def _fetch(client: BatchClient, file_id: str, path: Path) -> None:
    from gateway.cli.batch_client import save

    size = client.size(file_id)
    try:
        with _transfer() as progress, atomic_file(path) as target:
            task = progress.add_task("fetching", total=size)
            for done in save(client, file_id, target, size):
                progress.update(task, completed=done)
    except OSError as error:
        exit_with_error(f"{path} cannot be written: {error.strerror}")
    _say(f"[green]{escape(str(path))}[/green], {size:,} bytes")


def _transfer() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


def _say(text: str) -> None:
    """Print a message without breaking its line, however narrow the terminal, so that commands in it can be copied."""
    console.print(text, highlight=False, soft_wrap=True)


def _named(batch: Json) -> str:
    return f"{batch['id']} is {batch['status'].replace('_', ' ')}"


def _counts(batch: Json) -> str:
    counts = batch["request_counts"]
    return f"{ended_lines(batch):,} of {counts['total']:,} lines, {counts['failed']:,} of them failed"


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (separator and name):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--metadata")
    return name, value


def _check_targets(*paths: Path | None) -> None:
    """Check that the files of --output and --errors, if given, can be written. Raises typer.BadParameter."""
    for path, option in zip(paths, ("--output", "--errors"), strict=True):
        if path is not None:
            try:
                check_writable(path, option)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error


def _client(url: str, key: str) -> AbstractContextManager[BatchClient]:
    from gateway.cli.batch_client import BatchClient, reporting_errors

    return reporting_errors(BatchClient(url, key))
