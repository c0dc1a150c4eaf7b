"""Splits an adapter's matrices of fused projections into those of their parts, which have the same A and some rows of
B: the deltas are exactly the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from safetensors.torch import save
from torch import Tensor

from engine.model.adapters.peft.folder import PeftFolder
from engine.model.adapters.peft.hints import load_tensors
from engine.model.adapters.peft.settings import AdapterError
from engine.model.spec.fused import FUSED
from engine.process.adapter_files import WEIGHTS_FILE

MODULE = re.compile(rf"\.(?P<module>{'|'.join(FUSED)})\.lora_(?P<kind>A|B|magnitude_vector|output_scale)\b")


def split_fused(folder: PeftFolder, widths: Mapping[str, int]) -> PeftFolder:
    """Split the tensors of an adapter's fused projections (qkv_proj, gate_up_proj) into parts of `widths` outputs, and
    return the adapter with these. Raises AdapterError if the file is damaged or a projection does not fit."""
    tensors = load_tensors(folder.data)
    split = by_name(part for key, tensor in tensors.items() for part in _parts(key, tensor, widths))
    return replace(folder, settings=replace(folder.settings, fused=True), data=memoryview(save(split)))


def by_name(parts: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parts into which tensors were split, by name. Raises AdapterError if two have the same name, because a
    file has a module whole and in parts."""
    found: dict[str, Tensor] = {}
    for name, part in parts:
        if name in found:
            raise AdapterError(f"{WEIGHTS_FILE} has {name[:200]!r} twice, whole and in parts; save the adapter again")
        found[name] = part
    return found


def _parts(key: str, tensor: Tensor, widths: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors into which an adapter's tensor of a fused projection is split, by name: A whole for each part,
    other tensors by outputs. Yield a tensor of another module as it is."""
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
