"""Reads an adapter's files once, so that the bytes that are hashed are the bytes that are served."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import numpy as np
from blake3 import blake3

from engine.model.adapters.peft.config import parse_config
from engine.model.adapters.peft.gguf import GgufBase, from_gguf
from engine.model.adapters.peft.hints import missing
from engine.model.adapters.peft.roots import find_root, renamed
from engine.model.adapters.peft.settings import AdapterError, PeftSettings
from engine.process.adapter_files import CONFIG_FILE, GGUF_END, WEIGHTS_FILE, find_gguf

DRAFT_FOLDER = "draft"
"""Subfolder of an adapter's folder with an adapter of the draft model, which is used for the adapter's requests."""
MAX_CONFIG_BYTES = 1 << 20
ID_CHARS = 32
MAX_KEPT_BYTES = 64 << 20
"""Maximum size of a thread's buffer. Larger files are read into memory of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class PeftFolder:
    """An adapter folder that has been read: its configuration is parsed, and its weights are in memory but not
    examined."""

    adapter_hash: str
    """Content hash of the configuration fields that affect the computation, and of the weights file."""
    settings: PeftSettings
    data: memoryview
    """The weights file, read-only; of a GGUF file, its tensors as PEFT would write them. In a `ReadBuffer`, it is valid
    until the thread reads the next file into it."""
    draft: PeftFolder | None = None
    """The adapter of the draft model in the folder's subfolder `draft`. None means that there is none."""

    def with_draft(self, draft: PeftFolder) -> PeftFolder:
        """Return a copy of the adapter that includes an adapter of the draft model of speculative decoding. The content
        hash of the copy covers both."""
        both = f"{self.adapter_hash}/{draft.adapter_hash}".encode()
        return replace(self, adapter_hash=blake3(both).hexdigest()[:ID_CHARS], draft=draft)


class ReadBuffer(threading.local):
    """A buffer in each thread into which adapter files are read, reused for files of up to MAX_KEPT_BYTES."""

    # The memory comes from NumPy: a bytearray is cleared under the GIL, 50 ms for 84 MB, in which no step can begin.
    def __init__(self) -> None:
        self._kept = np.empty(0, dtype=np.uint8)

    def of(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of writable memory. Memory that this thread got from the buffer before must not be used
        any more."""
        if num_bytes > MAX_KEPT_BYTES:
            return np.empty(num_bytes, dtype=np.uint8).data
        if num_bytes > len(self._kept):
            self._kept = np.empty(num_bytes, dtype=np.uint8)
        return self._kept[:num_bytes].data


def read_adapter(path: Path, max_bytes: int, base: GgufBase, buffer: ReadBuffer | None = None) -> PeftFolder:
    """Read and hash an adapter, a PEFT folder or a GGUF file, whose weights file has at most `max_bytes`, into `buffer`
    if given; tensors are not checked. Raises AdapterError, with the OSError as cause, if it cannot be read or
    served."""
    if file := _gguf_file(path):
        return _read_gguf(file, max_bytes, base, buffer or ReadBuffer())
    settings = parse_config(bytes(_read(path, CONFIG_FILE, MAX_CONFIG_BYTES, ReadBuffer())))
    data = _read(path, WEIGHTS_FILE, max_bytes, buffer or ReadBuffer())
    digest = blake3(settings.canonical() + b"\0")
    digest.update(data)
    root = find_root(data)
    return PeftFolder(digest.hexdigest()[:ID_CHARS], replace(settings, root=root), renamed(data, root))


def read_draft(path: Path, max_bytes: int, base: GgufBase, buffer: ReadBuffer) -> PeftFolder | None:
    """Read the adapter of the draft model that the adapter at `path` has, as `read_adapter` does. None means that it
    has none."""
    folder = path / DRAFT_FOLDER
    if not os.path.isdir(folder):
        return None
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
        raise AdapterError(f"{folder} is a link that leaves the adapter's folder; copy the folder into it")
    return read_adapter(folder, max_bytes, base, buffer)


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at an adapter's path, or in the folder there. None means that there is none. Raises
    AdapterError where `find_gguf` raises another error."""
    try:
        return find_gguf(path)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AdapterError(str(error)) from error


def _read_gguf(file: Path, max_bytes: int, base: GgufBase, buffer: ReadBuffer) -> PeftFolder:
    data = _read(file.parent, file.name, max_bytes, buffer)
    settings, tensors = from_gguf(data, file.name, base, max_bytes)
    digest = blake3(GGUF_END.encode() + b"\0")
    digest.update(data)
    return PeftFolder(digest.hexdigest()[:ID_CHARS], settings, tensors)


def _read(folder: Path, name: str, limit: int, buffer: ReadBuffer) -> memoryview:
    """Read the file `name` of the folder, of at most `limit` bytes, into the buffer. Raises AdapterError if the file
    cannot be read, is too large, or is a link that leaves the folder."""
    file = folder / name
    try:
        real = Path(os.path.realpath(file, strict=True))
        if not any(real.is_relative_to(root) for root in _roots(folder)):
            raise AdapterError(f"{file} is a link that leaves the adapter's folder; copy the file into it")
        if not real.is_file():
            raise AdapterError(f"{file} is not a file")
        with real.open("rb", buffering=0) as opened:
            if (size := os.fstat(opened.fileno()).st_size) > limit:
                raise AdapterError(
                    f"{file} has {size} bytes, and no adapter of this model has over {limit}, or engine.host_adapter_gb"
                    " has no room for it"
                )
            return _fill(opened, buffer.of(size))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterError(missing(folder, name)) from error
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error


def _fill(file: FileIO, memory: memoryview) -> memoryview:
    """Fill `memory` from the file and return the filled part, read-only. A file that has shrunk fills less of it."""
    done = 0
    while done < len(memory) and (count := file.readinto(memory[done:])):
        done += count
    return memory[:done].toreadonly()


def _roots(folder: Path) -> tuple[Path, ...]:
    """Return the folders that links in an adapter's folder may lead to: the folder itself, and for a snapshot of the
    Hugging Face cache its blobs."""
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        return root, root.parent.parent / "blobs"
    return (root,)
