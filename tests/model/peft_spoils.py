"""What can be wrong with an adapter folder: each spoils a sound one in place, in a way that is drawn."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
DTYPES = {"I32": 4, "U8": 1, "F8_E4M3": 1, "BOOL": 1, "C64": 8, "F64": 8, "NONSENSE": 4}

Spoil = Callable[[Path, st.DataObject], None]


def truncate(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])


def flip_bits(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    content = bytearray(file.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0] if file.name == WEIGHTS else len(content)
    reach = data.draw(st.sampled_from((8, header, len(content))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(reach, len(content)) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def rename_key(folder: Path, data: st.DataObject) -> None:
    def change(tensors):
        key = data.draw(st.sampled_from(sorted(tensors)))
        part = data.draw(st.sampled_from(("lora_A", "lora_B", "lora_", "layers.1", "base_model.", "weight", "q_proj")))
        tensors[key.replace(part, data.draw(st.text(max_size=12)))] = tensors.pop(key)

    rewrite(folder, change)


def drop_key(folder: Path, data: st.DataObject) -> None:
    rewrite(folder, lambda tensors: tensors.pop(data.draw(st.sampled_from(sorted(tensors)))))


def reshape(folder: Path, data: st.DataObject) -> None:
    def change(tensors):
        key = data.draw(st.sampled_from(sorted(tensors)))
        tensors[key] = torch.zeros(data.draw(st.lists(st.integers(0, 40), max_size=4)))

    rewrite(folder, change)


def break_numbers(folder: Path, data: st.DataObject) -> None:
    def change(tensors):
        key = data.draw(st.sampled_from(sorted(tensors)))
        tensors[key].view(-1)[0] = data.draw(st.sampled_from((float("nan"), float("inf"), 3e38)))

    rewrite(folder, change)


def write_header(folder: Path, header: bytes, body: bytes = b"", length: int | None = None) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)


def change_header(folder: Path, data: st.DataObject) -> None:
    """Wrong dtypes, shapes and offsets over the same bytes."""
    content = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    entry = header[data.draw(st.sampled_from(sorted(key for key in header if key != "__metadata__")))]
    field = data.draw(st.sampled_from(("dtype", "shape", "data_offsets")))
    numbers = st.lists(st.integers(-1, 2**65), max_size=4)
    entry[field] = data.draw(st.sampled_from(sorted(DTYPES)) if field == "dtype" else numbers)
    write_header(folder, json.dumps(header).encode(), body)


def huge_header(folder: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(("length", "padding", "nesting", "tensors")))
    if kind == "length":
        write_header(folder, b"{}", length=data.draw(st.integers(3, 2**64 - 1)))
    elif kind == "padding":
        write_header(folder, b"{" + b" " * (17 << 20) + b"}")
    elif kind == "nesting":
        write_header(folder, b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    else:
        entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
        write_header(folder, json.dumps(entries).encode())


def link_out(folder: Path, data: st.DataObject) -> None:
    """A file that is a link to one outside, or in circles."""
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    outside = folder.parent / "outside"
    if data.draw(st.booleans()):
        shutil.move(file, outside)
        file.symlink_to(data.draw(st.sampled_from((outside, Path("..") / "outside"))))
    else:
        file.unlink()
        file.symlink_to(file.name)


def only_a_pickle(folder: Path, data: st.DataObject) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / PICKLE)  # opening it would hang


def not_a_file(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    file.unlink()
    kind = data.draw(st.sampled_from(("absent", "folder", "fifo", "sparse")))
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "sparse":
        with file.open("wb") as empty:
            empty.truncate(1 << 42)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)
FIELDS = (
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "rank_pattern",
    "use_dora",
    "modules_to_save",
    "bias",
    "new",
)


def change_config(folder: Path, data: st.DataObject) -> None:
    fields = json.loads((folder / CONFIG).read_text())
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=3))
    (folder / CONFIG).write_text(json.dumps(fields | changes))


SPOILS: dict[str, Spoil] = {
    spoil.__name__: spoil
    for spoil in (
        truncate,
        flip_bits,
        rename_key,
        drop_key,
        reshape,
        break_numbers,
        change_header,
        huge_header,
        link_out,
        only_a_pickle,
        not_a_file,
        change_config,
    )
}
