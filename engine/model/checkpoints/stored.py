"""The tensors of a folder's safetensors files: their headers, which are read at once, and their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.process.small_files import read_small_text

Shape = tuple[int, ...]
FLOATS = ("F32", "F16", "BF16", "F64")
"""Dtypes of tensors that are not quantised, as safetensors names them."""

MOST_INDEX_BYTES = 64 * 2**20
"""Maximum size of the index of a checkpoint: the largest models have some 10 MiB."""


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head."
"""Name of the embedding where names lack the prefix `model.`, and the beginning of the names that never have it."""
GPTQ_NAME = "gptq_model*"
"""Matches the beginning of the names of AutoGPTQ's files, such as gptq_model-4bit-128g.safetensors."""
LFS_POINTER = b"version https://git-lfs"


class WeightsError(ValueError):
    """The folder's weights are not those of the model that its config.json describes."""


class Header(NamedTuple):
    """What a checkpoint says of one tensor: the file that holds it, its name there, its shape, and its dtype as
    safetensors names it."""

    path: Path
    name: str
    shape: Shape
    dtype: str


class StoredTensors:
    """The tensors of model.safetensors, or of shards with an index. In names, the first string of each of `aliases` is
    replaced by the second, and a missing `model.` added. Raises WeightsError for missing or damaged files."""

    def __init__(self, folder: Path, aliases: Iterable[tuple[str, str]] = ()) -> None:
        self._headers: dict[str, Header] = {}
        for path in locate(folder):
            self._headers |= _read_headers(path)
        if EMBEDDING in self._headers:  # saved by AutoModel, as embedding models are
            self._headers = {_prefixed(name): header for name, header in self._headers.items()}
        for part, usual in aliases:
            self._headers = {name.replace(part, usual): header for name, header in self._headers.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __getitem__(self, name: str) -> Header:
        return self._headers[name]

    def dtype(self, name: str) -> str | None:
        """Return a tensor's dtype as safetensors names it; None means that there is no such tensor."""
        return self._headers[name].dtype if name in self._headers else None

    def require(self, name: str, dtypes: tuple[str, ...], *shapes: Shape) -> None:
        """Raises WeightsError, which names the tensor, unless the checkpoint has it with one of the dtypes and one of
        the shapes."""
        if name not in self._headers:
            raise WeightsError(f"missing tensor {name}")
        header = self._headers[name]
        if header.dtype not in dtypes:
            raise WeightsError(f"tensor {name} has dtype {header.dtype}, expected is {' or '.join(dtypes)}")
        if header.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise WeightsError(f"tensor {name} has shape {list(header.shape)}, the model needs {expected}")

    def read(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint whole, in the dtype in which it is stored."""
        # Opened for each tensor, which takes 0.3 ms, because an open file stays mapped into the engine's memory.
        header = self._headers[name]
        with safe_open(header.path, framework="pt") as file:
            return file.get_tensor(header.name)

    def read_one(self, name: str, number: int) -> Tensor:
        """Read the slice of a stacked tensor at index `number` of its first axis (one expert), and nothing else of
        it."""
        header = self._headers[name]
        with safe_open(header.path, framework="pt") as file:
            return file.get_slice(header.name)[number]


def locate(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder. Raises WeightsError if there are none, several models', or an
    index names one outside the folder."""
    indexes, files = (
        [folder / f"model{end}"] if (folder / f"model{end}").is_file() else sorted(folder.glob(f"{GPTQ_NAME}{end}"))
        for end in (".safetensors.index.json", ".safetensors")
    )
    if len(indexes) > 1 or (len(files) > 1 and not indexes):
        names = ", ".join(file.name for file in indexes or files)
        raise WeightsError(f"{folder} has the weights of several models: leave one of {names}")
    if indexes:
        [index] = indexes
        files = sorted({folder / name for name in _read_index(index)})
        for file in files:
            if file.parent != folder:
                raise WeightsError(f"{index} names {file}, which is not in its folder")
        return files
    if files:
        return files
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f"; {pickled[0]} is a pickle, which is never read" if pickled else ""
    raise WeightsError(f"{folder} has no model.safetensors and no model.safetensors.index.json{hint}")


def _read_index(index: Path) -> list[str]:
    """Return the names of the files that an index lists."""
    try:
        names = list(json.loads(read_small_text(index, MOST_INDEX_BYTES))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors files: fetch it again") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise WeightsError(f"{index} lists no safetensors files: fetch it again")
    return names


def _read_headers(path: Path) -> dict[str, Header]:
    if not path.is_file():
        raise WeightsError(f"{path.parent} has no {path.name}, which its index names")
    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = Header(path, name, tuple(part.get_shape()), part.get_dtype())
    except SafetensorError as error:
        raise WeightsError(_damage(path, error)) from error
    return found


def _damage(path: Path, error: SafetensorError) -> str:
    """Return what is wrong with a file that safetensors cannot open, and what to do."""
    with path.open("rb") as file:
        begin = file.read(len(LFS_POINTER))
    if begin == LFS_POINTER:
        return f"{path} is a pointer of git-lfs, not the weights: run `git lfs pull` in its folder"
    if not begin:
        return f"{path} is empty: fetch it again"
    return f"{path} is damaged or incomplete ({error}): fetch it again"


def _prefixed(name: str) -> str:
    return name if name.startswith(HEAD) else f"model.{name}"
