"""`loralane eval drift`: how far forms of a model's weights move its log-probabilities from those in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins

from gateway.core.errors import ApiError
from gateway.terminal.output import atomic_file, check_writable, exit_with_error, print_wide
from lab.evaluation.drift import FORMS, bundled_text, drift_table, measure, split

HELP = """Print how far forms of a model's weights move its log-probabilities from those of the same weights in fp32.

Each form is loaded in this process in turn, without a server, and scores the tokens of a text. `auto` are the weights
as they are stored, and `int8`, `int4` and, on a GPU, `fp8` quantise them. Perplexity is that of the text.

- `loralane eval drift` measures the demo's model
- `loralane eval drift ./llama --forms auto,int8,int4 --adapter support=./adapters/support --text tickets.txt`
"""


def drift(
    model: Annotated[str, typer.Argument(help="As for serve --model.")] = "embedded",
    forms: Annotated[str, typer.Option(metavar="A,B,...", help="Forms of weights: auto, int8, int4, fp8.")] = "auto",
    adapter: Annotated[list[str] | None, typer.Option(metavar="NAME=FOLDER", help="Adapter; repeatable.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text to score; default: questions and answers.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    chosen = [name.strip() for name in forms.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in FORMS]:
        exit_with_error(f"--forms: {unknown[0]!r} is none of {', '.join(FORMS)}")
    try:
        if json_file is not None:
            check_writable(json_file, "--json")
        pieces = split(text.read_text() if text else bundled_text())
        if not pieces:
            exit_with_error(f"{text} is empty")
        drifts = list(measure(model, chosen, dict(map(_named, adapter or ())), pieces))
    except (ValueError, OSError, ApiError) as error:
        exit_with_error(str(error))
    if json_file is not None:
        with atomic_file(json_file) as target:
            target.write(json.dumps(to_builtins(drifts), indent=2).encode() + b"\n")
    print_wide(drift_table(drifts))


def _named(text: str) -> tuple[str, str]:
    """Return the name and the folder in NAME=FOLDER. Raises ValueError."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise ValueError(f"--adapter must be NAME=FOLDER, not {text!r}")
    return name, folder
