"""LoRA adapters in GGUF files, against the same adapters in PEFT's folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_adapters import VALUES, gguf_tensors, write_gguf, write_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft_folders import TARGETS, base_model, save_adapter

from engine.core.messages.requests import Request
from engine.model.adapters.peft.gguf import INVOCATION, GgufBase
from engine.model.adapters.peft.loader import load_peft
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.targets import TargetShapes
from engine.model.layers.lora import target_widths
from engine.model.spec.config import read_spec
from tests.examples import examples
from tests.model.test_peft_parity import GREEDY, PROMPTS, make_engine, run

HEAD_DIM = 8
KEY = "blk.1.attn_q.weight.lora_b"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    base_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shapes(model) -> TargetShapes:
    spec = read_spec(model)
    base = GgufBase(spec.model_type, spec.head_dim)
    return TargetShapes(spec.layers, TARGETS, target_widths(spec), lambda module: None, gguf=base)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """All projections in PEFT's form: ranks of 4, but 3 and 33 for two of them."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = {"q_proj": 3, "down_proj": 33}
    save_adapter(folder, size=0.3, target_modules=list(TARGETS), rank_pattern=ranks, lora_alpha=6)
    return folder


@pytest.fixture(scope="module")
def tensors(saved) -> dict[str, np.ndarray]:
    return gguf_tensors(saved, HEAD_DIM)


def refusal(file: Path, shapes: TargetShapes) -> str:
    with pytest.raises(AdapterError) as caught:
        load_peft(file, shapes)
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"target_modules": list(TARGETS)}, {"r": 1, "lora_alpha": 37}, {"layers_to_transform": [0, 2], "r": 40}, {}],
    ids=["all projections", "rank 1", "some layers", "ranks"],
)
def test_weights_are_those_of_the_same_folder(options, saved, shapes, tmp_path):
    folder = saved
    if options:
        folder = tmp_path / "peft"
        save_adapter(folder, **options)
    theirs, ours = load_peft(folder, shapes), load_peft(write_gguf(folder, tmp_path / "a.gguf"), shapes)
    assert ours.blocks.keys() == theirs.blocks.keys()
    assert np.array_equal(ours.ranks, theirs.ranks)
    assert (ours.target_modules, ours.rank) == (theirs.target_modules, theirs.rank)
    for place, (a, b) in ours.blocks.items():
        assert torch.equal(a, theirs.blocks[place][0])
        assert torch.equal(b, theirs.blocks[place][1])


def test_answers_are_those_of_the_same_folder(model, saved, tmp_path):
    engine = make_engine(model)
    file = write_gguf(saved, tmp_path / "a.gguf")
    forms = {"peft": saved, "file": file, "folder": tmp_path}
    hashes = {name: engine.load_adapter(str(path)).adapter_hash for name, path in forms.items()}
    assert hashes["file"] == hashes["folder"] != hashes["peft"]
    asked = {"peft": hashes["peft"], "file": hashes["file"], "base": None}
    streams = run(engine, [Request(name, PROMPTS["mine"], GREEDY, adapter) for name, adapter in asked.items()])
    assert streams["file"] == streams["peft"] != streams["base"]


def test_an_activated_adapter_waits_for_its_tokens(model, saved, tmp_path):
    """As PEFT's folder with the same tokens does, and not as the same adapter without them."""
    shutil.copytree(saved, tmp_path / "peft")
    config = tmp_path / "peft" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [14, 8]}))
    values = {**VALUES, INVOCATION: [14, 8]}
    file = write_tensors(tmp_path / "a.gguf", gguf_tensors(saved, HEAD_DIM), 6, values=values)
    engine, forms = make_engine(model), {"peft": tmp_path / "peft", "file": file, "plain": saved}
    hashes = {name: engine.load_adapter(str(path)).adapter_hash for name, path in forms.items()}
    streams = run(engine, [Request(name, PROMPTS["mine"], GREEDY, adapter) for name, adapter in hashes.items()])
    assert streams["file"] == streams["peft"] != streams["plain"]


@pytest.mark.parametrize(("kind", "step"), [(Kind.F16, 2**-11), (Kind.BF16, 2**-8), (Kind.Q8_0, 2**-7)])
def test_smaller_types_are_read(kind, step, saved, tensors, shapes, tmp_path):
    exact = load_peft(saved, shapes)
    read = load_peft(write_tensors(tmp_path / "a.gguf", tensors, 6, kind), shapes)
    for place, pair in read.blocks.items():
        for ours, theirs in zip(pair, exact.blocks[place], strict=True):
            assert (ours - theirs).abs().max() <= step * theirs.abs().max()


def test_without_alpha_nothing_is_scaled(tensors, shapes, tmp_path):
    found = load_peft(write_tensors(tmp_path / "a.gguf", tensors, 0), shapes)
    plain = {place: b for place, (_, b) in found.blocks.items()}
    six = load_peft(write_tensors(tmp_path / "b.gguf", tensors, 6), shapes)
    for place, (a, b) in six.blocks.items():
        torch.testing.assert_close(b, plain[place] * 6 / len(a))


def test_rows_of_other_architectures_are_not_reordered(saved, shapes, tmp_path):
    rows = gguf_tensors(saved, head_dim=2)  # which reorders nothing
    qwen = TargetShapes(3, TARGETS, shapes.widths, shapes.base_linears, gguf=GgufBase("qwen2", HEAD_DIM))
    read = load_peft(write_tensors(tmp_path / "a.gguf", rows, 6, arch="qwen2"), qwen)
    for place, (_, b) in load_peft(saved, shapes).blocks.items():
        assert torch.equal(read.blocks[place][1], b)


def test_pefts_files_go_before_what_lies_beside_them(saved, tmp_path, shapes):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    write_gguf(saved, tmp_path / "converted.gguf")
    assert load_peft(tmp_path, shapes).adapter_hash == load_peft(saved, shapes).adapter_hash


def test_of_several_files_one_must_be_named(saved, tmp_path, shapes):
    for name in ("b.gguf", "a.gguf"):
        write_gguf(saved, tmp_path / name)
    assert f"{tmp_path} has 2 GGUF files: name the one to be loaded, such as a.gguf" == refusal(tmp_path, shapes)
    assert load_peft(tmp_path / "a.gguf", shapes).rank == 33


CHANGES = {
    "a bias": ({"blk.0.attn_q.bias": np.ones(32)}, "blk.0.attn_q.bias"),
    "a norm": ({"blk.0.attn_norm.weight": np.ones(32)}, "only lora_a and lora_b of projections"),
    "embeddings": ({"token_embd.weight.lora_a": np.ones((4, 32))}, "embeddings or lm_head is not supported"),
    "Hugging Face's name": (
        {"model.layers.0.self_attn.q_proj.weight.lora_a": np.ones((3, 32))},
        "only lora_a and lora_b of projections",
    ),
    "a layer beyond": ({"blk.3.attn_q.weight.lora_a": np.ones((3, 32))}, "is of layer 3"),
    "one side": ({KEY: None}, "model.layers.1.self_attn.q_proj has no lora_B"),
    "another rank": ({KEY: np.ones((32, 5))}, f"'{KEY}' of a.gguf has rank 5, and its partner 3"),
    "another width": ({KEY: np.ones((48, 3))}, "self_attn.q_proj.lora_B is [48, 3], and the model needs [32, 3]"),
    "a cube": ({KEY: np.ones((2, 16, 3))}, "it must be a matrix"),
    "NaN": ({KEY: np.full((32, 3), np.nan)}, "self_attn.q_proj.lora_B has NaN or infinite values"),
    "rank 257": (
        {KEY: np.ones((32, 257)), KEY.replace("lora_b", "lora_a"): np.ones((257, 32))},
        "rank 257 on model.layers.1.self_attn.q_proj: ranks of 1 to 256",
    ),
    "nothing": (None, "a.gguf has no tensors"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_refused_by_name(name, tensors, shapes, tmp_path):
    changes, reason = CHANGES[name]
    changed = {} if changes is None else tensors | changes
    sound = {key: tensor for key, tensor in changed.items() if tensor is not None}
    assert reason in refusal(write_tensors(tmp_path / "a.gguf", sound, 6), shapes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"arch": "qwen2"}, "a.gguf is an adapter of architecture 'qwen2', and this model is 'llama'"),
        ({"values": {}}, "a.gguf is no LoRA adapter: general.type is None, not 'adapter'"),
        ({"values": {**VALUES, "adapter.type": "other"}}, "adapter.type is 'other', not 'lora'"),
        ({"values": {**VALUES, INVOCATION: "1 2"}}, f"{INVOCATION} must be 1 to 256 token ids, not '1 2'"),
        ({"values": {**VALUES, INVOCATION: [5, -1]}}, f"{INVOCATION} must be 1 to 256 token ids, not (5, -1)"),
        ({"values": {**VALUES, INVOCATION: [5] * 257}}, f"{INVOCATION} must be 1 to 256 token ids"),
        ({"values": {**VALUES, INVOCATION: [5] * 1025}}, f"{INVOCATION} must be 1 to 256 token ids, not None"),
        ({"alpha": float("nan")}, "adapter.lora.alpha must be a number, not nan"),
        ({"alpha": 3e38}, "adapter.lora.alpha must be a number"),
    ],
)
def test_what_a_file_says_of_itself_is_checked(options, reason, tensors, shapes, tmp_path):
    file = write_tensors(tmp_path / "a.gguf", tensors, **{"alpha": 6.0, **options})
    assert reason in refusal(file, shapes)


def replaced(file: Path, old: bytes, new: bytes) -> Path:
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    return file


def described(name: str, *shape: int) -> bytes:
    """How a header begins to describe a tensor."""
    numbers = b"".join(size.to_bytes(8, "little") for size in reversed(shape))
    return name.encode() + len(shape).to_bytes(4, "little") + numbers


def test_files_that_lie_about_their_tensors_are_refused(tensors, shapes, tmp_path):
    def file() -> Path:
        return write_tensors(tmp_path / "a.gguf", tensors, 6)

    other = KEY.replace("blk.1", "blk.0")
    assert "a.gguf is a damaged GGUF file" in refusal(replaced(file(), KEY.encode(), other.encode()), shapes)
    true = described(KEY, 32, 3)
    for shape, reason in (((2**60, 2**60), "damaged"), ((2**20, 2**20), "and no adapter"), ((0, 2**62), "be a matrix")):
        assert reason in refusal(replaced(file(), true, described(KEY, *shape)), shapes)
    beyond = true + Kind.F32.to_bytes(4, "little")
    place = file().read_bytes().index(beyond) + len(beyond)
    data = bytearray(file().read_bytes())
    data[place : place + 8] = (2**63).to_bytes(8, "little")
    (tmp_path / "a.gguf").write_bytes(data)
    assert f"'{KEY}' of a.gguf lies beyond the end of the file" in refusal(tmp_path / "a.gguf", shapes)
    deep = b"GGUF" + b"".join(n.to_bytes(size, "little") for n, size in ((3, 4), (0, 8), (1, 8), (1, 8)))
    nested = b"a" + (9).to_bytes(4, "little") + 100_000 * ((9).to_bytes(4, "little") + (1).to_bytes(8, "little"))
    (tmp_path / "a.gguf").write_bytes(deep + nested)
    assert "a.gguf is a damaged GGUF file" in refusal(tmp_path / "a.gguf", shapes)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.TQ2_0])
def test_types_are_read_or_refused_by_name(kind, tensors, shapes, tmp_path):
    name = "blk.0.attn_q.weight.lora_a"
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((3, -(-32 // inputs) * size), np.uint8)
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in VALUES.items():
        writer.add_string(key, value)
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.add_tensor(name[:-1] + "b", np.zeros((32, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind == Kind.Q4_0:
        assert load_peft(file, shapes).rank == 3
    else:
        assert f"'{name}' of a.gguf is of type 35 of ggml, which is not supported" in refusal(file, shapes)


def test_links_and_what_is_no_file_are_refused(saved, shapes, tmp_path):
    (tmp_path / "inside").mkdir()
    write_gguf(saved, tmp_path / "outside.gguf")
    link = tmp_path / "inside" / "a.gguf"
    link.symlink_to(tmp_path / "outside.gguf")
    assert "leaves the adapter's folder" in refusal(link, shapes)
    assert "leaves the adapter's folder" in refusal(link.parent, shapes)
    assert "absent.gguf does not exist" in refusal(tmp_path / "absent.gguf", shapes)
    (tmp_path / "big.gguf").touch()
    with (tmp_path / "big.gguf").open("wb") as empty:
        empty.truncate(1 << 42)
    assert "no adapter of this model has over" in refusal(tmp_path / "big.gguf", shapes)


@given(
    reach=st.sampled_from([200, 2000, None]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=4),
    length=st.just(1.0) | st.floats(0, 1),
)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_load_whole_or_are_refused(reach, flips, length, saved, shapes, tmp_path):
    data = bytearray(write_gguf(saved, tmp_path / "a.gguf").read_bytes())
    sound = bytes(data)
    for place, bit in flips:
        data[int(place * (reach or len(data)))] ^= 1 << bit
    (tmp_path / "a.gguf").write_bytes(data[: int(length * len(data))])
    try:
        adapter = load_peft(tmp_path / "a.gguf", shapes)
    except AdapterError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert (tmp_path / "a.gguf").read_bytes() != sound
        assert "\n" not in reason and len(reason) < 1000
        return
    assert all(torch.isfinite(a).all() and torch.isfinite(b).all() for a, b in adapter.blocks.values())
