"""Reads a model's weights straight from a GGUF file: quantised blocks are neither expanded to bf16 nor written to other
files."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.model.gguf.blocks import BLOCK_TYPES, BlockType, read_blocks
from engine.model.gguf.config import ROPE_FACTORS
from engine.model.gguf.experts import unstacked
from engine.model.gguf.header import ARCHITECTURES, StoredTensor, read_tensors
from engine.model.gguf.names import gguf_name, hub_name
from engine.model.spec.config import ModelSpec
from lora_kernels.quantized import Coding, QuantizedWeight, Weight, dense

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Dtypes of tensors that are not quantised, by their numbers in ggml."""
IGNORED = (ROPE_FACTORS,)
"""Names of tensors that are not weights: the divisors of rotary frequencies, which config.json has."""
TURNED = re.compile(r"self_attn\.[qk]_proj")
"""Finds the projections whose outputs llama.cpp's converter reorders for Llama and Mistral: it puts the two numbers
that a rotation turns side by side, whereas Hugging Face has them half a head apart."""
TURNED_TYPES = ("llama", "mistral", "mixtral")
SHIFTED_TYPES = ("gemma", "gemma2", "gemma3_text")
"""Families whose norms add 1 to their weights: llama.cpp's converter stores the sums."""


class GgufFile:
    """The tensors of a GGUF file, by the names that Hugging Face gives them. Creating it raises ValueError if the file
    is damaged, or GGUF files of the model's family are not supported."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        if spec.model_type not in ARCHITECTURES:
            raise ValueError(
                f"{path.name}: {spec.model_type} models are not read from GGUF files; use the Hugging Face folder"
            )
        self._path, self._spec = path, spec
        self._tensors = unstacked(read_tensors(path))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, by Hugging Face's names; those that have none there keep their own."""
        return {
            hub_name(name, self._spec.model_type): stored.shape
            for name, stored in self._tensors.items()
            if name not in IGNORED
        }

    def _name(self, name: str) -> str:
        return gguf_name(name, self._spec.model_type)

    def coding(self, name: str) -> Coding | None:
        """Return how a tensor's weights are coded once they are read; None means that they are not quantised, or that
        there is no such tensor."""
        stored = self._tensors.get(self._name(name))
        kind = _block_type(stored) if stored else None
        return kind.coding if kind else None

    def is_bf16(self, name: str) -> bool:
        """Return whether bf16 holds all numbers of a tensor exactly, because the tensor is stored in bf16."""
        stored = self._tensors.get(self._name(name))
        return stored is not None and FLOATS.get(stored.kind) is torch.bfloat16

    def form(self, name: str) -> str | None:
        """Return the name in ggml of a tensor's type; None means that it is not quantised, or that there is no such
        tensor."""
        stored = self._tensors.get(self._name(name))
        if stored is None or stored.kind in FLOATS:
            return None
        known = BLOCK_TYPES.get(stored.kind)
        return known.name if known else _name_of_type(stored.kind)

    def read(self, name: str) -> Weight:
        """Read a tensor of the GGUF file by its Hugging Face name, with rows in Hugging Face's order. Raises
        ValueError, which names it, if the file ends before it or it is of an unknown type."""
        stored = self._tensors[self._name(name)]
        weight = self._read(name, stored)
        if name.endswith("norm.weight") and self._spec.model_type in SHIFTED_TYPES:
            return dense(weight, torch.float32) - 1.0
        if not is_turned(name, self._spec.model_type):
            return weight
        rows = turned_back(stored.shape[0], self._spec.head_dim)
        return weight.select(rows) if isinstance(weight, QuantizedWeight) else dense(weight)[rows]

    def _read(self, name: str, stored: StoredTensor) -> Weight:
        if stored.kind in FLOATS:
            dtype = FLOATS[stored.kind]
            return self._bytes(name, stored, prod(stored.shape) * dtype.itemsize).view(dtype).view(stored.shape)
        kind = _block_type(stored)
        if kind is None:
            return self._dequantized(name, stored)
        outputs, inputs = stored.shape
        blocks = self._bytes(name, stored, outputs * inputs // kind.inputs * kind.num_bytes).view(-1, kind.num_bytes)
        return read_blocks(blocks, kind, (outputs, inputs))

    def _dequantized(self, name: str, stored: StoredTensor) -> Tensor:
        """Dequantise a tensor of a block type that is not in `BLOCK_TYPES`, and return it as fp32. Raises ValueError if
        the type is unknown."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants  # takes a second, and is needed rarely

        unknown = f"tensor {name} of {self._path.name} is of type {stored.kind} of ggml, which cannot be read"
        if stored.kind not in set(GGMLQuantizationType):
            raise ValueError(unknown)
        kind = GGMLQuantizationType(stored.kind)
        inputs, size = GGML_QUANT_SIZES[kind]
        rows = self._bytes(name, stored, prod(stored.shape) // inputs * size).view(*stored.shape[:-1], -1)
        try:
            return torch.from_numpy(quants.dequantize(rows.numpy(), kind))
        except NotImplementedError as error:  # a type that the package names, but cannot dequantise
            raise ValueError(unknown) from error

    def _bytes(self, name: str, stored: StoredTensor, size: int) -> Tensor:
        path = stored.file or self._path
        data = np.fromfile(path, np.uint8, size, offset=stored.place)
        if len(data) < size:
            raise ValueError(f"{path.name} ends before tensor {name} does: it is damaged")
        return torch.from_numpy(data)


def _name_of_type(kind: int) -> str:
    from gguf import GGMLQuantizationType  # takes a second, and is needed rarely

    return GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else f"type-{kind}"


def _block_type(stored: StoredTensor) -> BlockType | None:
    """Return the block type in which a tensor's quantised weights are read as they are. None means that there is none:
    the tensor is not quantised, or has to be dequantised."""
    kind = BLOCK_TYPES.get(stored.kind)
    return kind if kind and len(stored.shape) == 2 and stored.shape[1] % kind.inputs == 0 else None


def is_turned(name: str, model_type: str) -> bool:
    """Return whether GGUF files of a `model_type` have the outputs of the projection `name`, or of its LoRA's B, in
    another order than Hugging Face (see `TURNED`)."""
    return model_type in TURNED_TYPES and TURNED.search(name) is not None


def turned_back(outputs: int, head_dim: int) -> Tensor:
    """Return, for each row of a q or k projection in Hugging Face's order, the number of that row in the GGUF file,
    int64 [outputs]. Files of Llama models have the rows of each head in another order."""
    return torch.arange(outputs).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
