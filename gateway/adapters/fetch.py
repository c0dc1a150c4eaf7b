"""Fetches an adapter's files from the Hugging Face Hub or an object store. All calls block and run in threads."""

from __future__ import annotations

import hashlib
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec

from engine.process.adapter_files import (
    CONFIG_FILE,
    GGUF_END,
    PEFT_FILES,
    TEXT_FILES,
    WEIGHTS_FILE,
    lacks_weights,
    only_gguf,
)
from gateway.core.errors import ApiError, invalid_request
from gateway.core.space import Disk, SpaceUse

CHUNK_BYTES = 4 << 20
REASON_CHARS = 300
MOST_NAMED = 3
"""Maximum number of a repository's folders that a message names."""
INSTALL = "pip install 'loralane[remote]'"


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch: `seconds`, the `deadline` on the monotonic clock that follows from them, and `num_bytes`,
    the bytes of all files together."""

    seconds: float
    deadline: float
    num_bytes: int

    @classmethod
    def within(cls, seconds: float, num_bytes: int) -> FetchLimits:
        """Return limits of `num_bytes` bytes and a deadline `seconds` from now."""
        return cls(seconds, time.monotonic() + seconds, num_bytes)

    def check(self, source: str, num_bytes: int) -> None:
        """Raise ApiError (INVALID_REQUEST) if the deadline has passed or `num_bytes`, the total so far, is over the
        limit. `source` is named in the message."""
        if num_bytes > self.num_bytes:
            raise _failed(source, f"it has over {self.num_bytes / 2**30:g} GiB (adapters.max_fetch_gb)")
        if time.monotonic() > self.deadline:
            raise _failed(source, f"it took longer than {self.seconds:g} s (adapters.fetch_timeout_s)")


def fetch_hub(repo: str, revision: str | None, cache: Path, bounds: FetchLimits, endpoint: str | None) -> Path:
    """Download an adapter's files (PEFT's, or the only GGUF file) from the Hugging Face Hub, and return its folder
    below `cache`. Blocks. Raises ApiError: INVALID_REQUEST or INSUFFICIENT_STORAGE; `bounds` are checked only before
    the download."""
    from huggingface_hub import HfApi, snapshot_download  # Imported here: it takes a tenth of a gateway's start.

    source = repo if revision is None else f"{repo}@{revision}"
    try:
        info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True, timeout=bounds.seconds)
        sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
        files = _files_of(source, list(sizes))
        total = sum(sizes[name] for name in files)
        bounds.check(source, total)
        cache.mkdir(parents=True, exist_ok=True)
        Disk(cache).check(SpaceUse.UPLOAD, total)
        return Path(
            snapshot_download(
                repo, revision=info.sha, allow_patterns=list(files), cache_dir=cache, endpoint=endpoint, max_workers=1
            )
        ).resolve()
    except ApiError:
        raise
    except Exception as error:  # the library lets its HTTP client's own errors through
        raise _failed(source, _reason(error)) from error


def _files_of(source: str, names: list[str]) -> tuple[str, ...]:
    """Return the files to download from a repository whose files have these names. Raises ApiError or ValueError if
    they make no adapter, or several."""
    if CONFIG_FILE not in names and (gguf := only_gguf(source, names)):
        return (gguf.name,)
    if CONFIG_FILE not in names:
        raise _failed(source, f"it has no {CONFIG_FILE}{_elsewhere(source, names)}")
    if WEIGHTS_FILE not in names:
        raise _failed(source, f"it {lacks_weights(names)}")
    return (*PEFT_FILES, *(name for name in TEXT_FILES if name in names))


def _elsewhere(source: str, names: list[str]) -> str:
    """Return what to do about a repository without an adapter at its top, whose subfolders have some. Empty means that
    they have none."""
    folders = [name.removesuffix(f"/{CONFIG_FILE}") for name in names if name.endswith(f"/{CONFIG_FILE}")]
    if not folders:
        return ""
    repo = source.partition("@")[0]
    return (
        f" at its top, and its folders {', '.join(folders[:MOST_NAMED])} have one: download it with "
        f"`hf download {repo} --include '{folders[0]}/*' --local-dir DIR`, and load DIR/{folders[0]}"
    )


def fetch_url(url: str, cache: Path, bounds: FetchLimits) -> Path:
    """Download PEFT's two files, or a GGUF file, from a URL, and return their folder in `cache`, named by its hash.
    Blocks. Raises ApiError (INVALID_REQUEST, INSUFFICIENT_STORAGE), or OSError for the folder."""
    partial_copy = cache / f".{uuid.uuid4().hex}"
    partial_copy.mkdir(parents=True)
    try:
        name = _copy(url, partial_copy, bounds)
        with_content = cache / name
        if not with_content.exists():
            partial_copy.rename(with_content)
        return with_content
    except ApiError:
        raise
    except ImportError as error:
        raise _failed(url, f"{_reason(error)}; {INSTALL}") from error
    except Exception as error:  # storage libraries raise what they like
        raise _failed(url, _reason(error)) from error
    finally:
        shutil.rmtree(partial_copy, ignore_errors=True)


def _copy(url: str, folder: Path, bounds: FetchLimits) -> str:
    """Copy the files of a URL to `folder`. Return one SHA-256, in hex, over the SHA-256 digests of all files, which
    identifies the content. Raises ApiError if a limit is exceeded, and what the storage library raises."""
    # A cached instance would answer from listings it made before the files were replaced.
    system, path = fsspec.url_to_fs(url, skip_instance_cache=True)
    digest, copied, disk = hashlib.sha256(), 0, Disk(folder)
    parent, _, last = path.rstrip("/").rpartition("/")
    place, files = (parent, (last,)) if last.endswith(GGUF_END) else (f"{parent}/{last}", PEFT_FILES)
    for name in files:
        with system.open(f"{place}/{name}", "rb") as source, (folder / name).open("wb") as file:
            copied = _copy_file(source, file, url, copied, bounds, disk)
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _copy_file(source: BinaryIO, file: BinaryIO, url: str, copied: int, bounds: FetchLimits, disk: Disk) -> int:
    """Copy one file to `disk`. `copied` is the number of bytes of earlier files; return the total with this file. `url`
    is for messages. Raises ApiError as soon as a limit is exceeded or the disk has no more room."""
    while part := source.read(CHUNK_BYTES):
        copied += len(part)
        bounds.check(url, copied)
        disk.check(SpaceUse.UPLOAD, len(part))
        file.write(part)
    return copied


def _failed(source: str, reason: str) -> ApiError:
    return invalid_request(f"{source!r} cannot be fetched: {reason}", "lora_path")


def _reason(error: Exception) -> str:
    """Return an exception's type and message as one line of at most REASON_CHARS characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
    return text if len(text) <= REASON_CHARS else f"{text[: REASON_CHARS - 3]}..."
