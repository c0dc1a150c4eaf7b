"""GGUF files that are read as they are, against the package gguf's own dequantisation and Hugging Face's model."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.config import EngineConfig
from engine.model.decode.assembly import build_decoder
from engine.model.gguf.blocks import BLOCK_TYPES, read_blocks
from engine.model.runner.sizes import count_weight_bytes, find_kept_bits
from engine.model.spec.config import read_spec
from engine.model.weights.reader import WeightsError, name_weights, open_weights
from engine.process.model_source import GGUF_NAME, find_prepared, is_prepared
from lora_kernels.quantized import dense
from tests.model.test_decoder import CPU, Replay, save_model

SCALES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where the fp16 numbers of a block lie. Random bits there would be infinite or NaN."""
SIZE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 97, "num_hidden_layers": 2}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
KINDS = {
    "attn_q": Kind.Q4_K,
    "attn_k": Kind.Q4_K,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.Q4_1,
    "ffn_gate": Kind.Q4_1,
    "ffn_up": Kind.Q4_1,
    "ffn_down": Kind.Q4_K,
    "token_embd": Kind.Q8_0,
}
TOKENS = [[(7 * place + 3 * index) % 97 for place in range(20 + 9 * index)] for index in range(3)]


def random_blocks(kind, count, rng):
    raw = rng.integers(0, 256, (count, kind.num_bytes), dtype=np.uint8)
    for place in SCALES.get(kind.name, [0]):
        numbers = rng.normal(0, 0.0002 if kind.inputs == 256 else 0.01, count).astype(np.float16)
        raw[:, place : place + 2] = numbers.view(np.uint8).reshape(count, 2)
    return raw


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_blocks_are_what_the_package_gguf_says(number):
    kind = BLOCK_TYPES[number]
    assert (Kind(number).name, (kind.inputs, kind.num_bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[Kind(number)])
    raw = random_blocks(kind, 24, np.random.default_rng(number))
    expected = torch.from_numpy(gguf.quants.dequantize(raw, Kind(number))).view(12, -1)
    found = read_blocks(torch.from_numpy(raw), kind, (12, 2 * kind.inputs)).dequantize()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def ggml_rows(tensor, head_dim):
    """Rows in the order of llama.cpp's converter: the two halves of each head interleaved."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def write_gguf(model, folder, change=None):
    """Writes the GGUF file of a tiny Llama, with quantised linears and the tensors of `change`, and gives the model the
    dequantised weights."""
    writer, rng = gguf.GGUFWriter(folder / GGUF_NAME, "llama"), np.random.default_rng(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[1] == "layers":
            short = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.weight"
        else:
            short = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        kind = KINDS.get(short.split(".")[-2])
        if kind is None:
            tensors[short] = (parameter.detach().numpy().copy(), None)
            continue
        if kind.name.endswith("_K"):
            inputs = gguf.GGML_QUANT_SIZES[kind][0]
            raw = random_blocks(BLOCK_TYPES[kind], parameter.numel() // inputs, rng).reshape(len(parameter), -1)
        else:
            rows = parameter.detach()
            raw = gguf.quants.quantize(ggml_rows(rows, 64).numpy() if "attn_q" in short else rows.numpy(), kind)
        back = torch.from_numpy(gguf.quants.dequantize(raw, kind))
        if short.split(".")[-2] in ("attn_q", "attn_k"):
            back = back.view(-1, 32, 2, back.shape[1]).transpose(1, 2).reshape(back.shape)
        parameter.data.copy_(back)
        tensors[short] = (raw, kind)
    for name, (data, kind) in (tensors | (change or {})).items():
        if data is not None:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path):
    """A tiny tied Llama as a folder with a GGUF file, and Hugging Face's model with its weights."""
    model = save_model("llama_tied", tmp_path, **SIZE)
    (tmp_path / "model.safetensors").unlink()
    write_gguf(model, tmp_path)
    return tmp_path, model


def test_logits_are_those_of_the_dequantised_weights(tiny):
    folder, model = tiny
    run = Replay(folder)
    qkv = run.decoder.layers[0].qkv
    assert [panels.coding.bits for panels in qkv.panels] == [4, 6], "q and k are of one type, v of another"
    for (index, position), row in run.run(TOKENS).items():
        with torch.inference_mode():
            expected = model(torch.tensor([TOKENS[index]])).logits[0, position]
        assert (row.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 0.005


def test_memory_is_counted_and_taken_as_the_file_has_it(tiny):
    folder, _ = tiny
    spec, size = read_spec(folder), (folder / GGUF_NAME).stat().st_size
    counted = count_weight_bytes(spec, find_kept_bits(EngineConfig(str(folder)), spec, CPU, torch.bfloat16))
    decoder = build_decoder(spec, open_weights(folder, spec), torch.float32, CPU)
    linears = [part for layer in decoder.layers for part in (layer.qkv, layer.o, *layer.feed_forward.linears)]
    taken = sum(linear.nbytes for linear in (decoder.head.linear, *linears))
    assert counted <= 1.1 * size
    assert counted <= taken <= 1.2 * counted, "panels of 48 outputs pad these tiny weights"
    assert name_weights(folder, spec, "auto", "auto", torch.float32) == "Q4_1+Q4_K+Q6_K+Q8_0"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"blk.1.ffn_up.weight": None}, r"missing tensor model\.layers\.1\.mlp\.up"),
        ({"blk.0.attn_q.bias": np.ones(8, np.float32)}, r"unexpected tensor .*self_attn\.q_proj\.bias"),
        ({"blk.0.new.weight": np.ones(8, np.float32)}, r"unexpected tensor blk\.0\.new"),
        ({"output_norm.weight": np.ones(8, np.float32)}, r"norm\.weight has shape \[8\]"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path, change, error):
    model = save_model("llama_tied", tmp_path, **SIZE)
    write_gguf(model, tmp_path, {name: (data, None) for name, data in change.items()})
    with pytest.raises(WeightsError, match=error):
        open_weights(tmp_path, read_spec(tmp_path))


def test_other_types_are_dequantised_and_damage_is_told(tmp_path):
    model = save_model("llama_tied", tmp_path, **SIZE)
    raw = np.random.default_rng(0).integers(0, 200, (256, 66), dtype=np.uint8)  # of TQ2_0, whose scales come last
    raw[:, 64:] = np.full(256, 0.01, np.float16).view(np.uint8).reshape(256, 2)
    write_gguf(model, tmp_path, {"blk.0.ffn_up.weight": (raw, Kind.TQ2_0)})
    name, spec = "model.layers.0.mlp.up_proj.weight", read_spec(tmp_path)
    found = open_weights(tmp_path, spec)(name)
    assert "TQ2_0" in name_weights(tmp_path, spec, "auto", "auto", torch.float32).split("+")
    assert torch.equal(found, torch.from_numpy(gguf.quants.dequantize(raw, Kind.TQ2_0)))
    file = tmp_path / GGUF_NAME
    source = open_weights(tmp_path, spec)
    file.write_bytes(file.read_bytes()[:-200_000])
    with pytest.raises(ValueError, match="ends before tensor"):
        [dense(source(f"model.layers.{layer}.mlp.down_proj.weight")) for layer in range(2)]


def test_a_folder_whose_file_has_moved_is_made_again(tmp_path):
    file, folder = tmp_path / "model.gguf", tmp_path / "made"
    file.write_bytes(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    (folder / GGUF_NAME).symlink_to(file)
    assert is_prepared(folder)
    assert find_prepared(str(folder), tmp_path) == folder
    file.unlink()
    assert not is_prepared(folder)
