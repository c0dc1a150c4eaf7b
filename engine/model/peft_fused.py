"""Splits an adapter's matrices of fused projections into those of their parts, which have the same A and some rows of
B: the deltas are exactly the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from engine.model.fused import FUSED
from engine.model.peft_folder import PeftFolder
from engine.model.peft_settings import AdapterError
from engine.process.adapter_files import WEIGHTS_FILE

MODULE = re.compile(rf"\.(?P<module>{'|'.join(FUSED)})\.lora_(?P<kind>A|B|magnitude_vector|output_scale)\b")


def split_fused(folder: PeftFolder, widths: Mapping[str, int]) -> PeftFolder:
    """Returns the adapter with tensors of q, k, v, gate and up, in memory of its own. Its hash stays as it is.

    Args:
        widths: number of outputs of each part.

    Raises:
        AdapterError: the file is damaged, or a fused projection has another number of outputs.
    """
    try:
        tensors = load(bytes(folder.data))
    except (SafetensorError, KeyError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged or cut short ({error}); copy it again") from error
    split = {name: part for key, tensor in tensors.items() for name, part in _parts(key, tensor, widths)}
    return replace(folder, settings=replace(folder.settings, fused=True), data=memoryview(save(split)))


def _parts(key: str, tensor: Tensor, widths: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the parts of a fused projection, by name; of other modules the tensor itself."""
    found = MODULE.search(key)
    if found is None:
        yield key, tensor
        return
    names, start = FUSED[found["module"]], 0
    outputs = sum(widths[name] for name in names)
    if found["kind"] != "A" and tensor.shape[:1] != (outputs,):
        raise AdapterError(f"{key[:200]!r} is {list(tensor.shape)}, and the model needs {outputs} rows")
    for name in names:
        stop = start + widths[name]
        part = tensor.clone() if found["kind"] == "A" else tensor[start:stop].clone()
        yield f"{key[: found.start('module')]}{name}{key[found.end('module') :]}", part
        start = stop
