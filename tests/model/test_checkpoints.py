"""Quantised checkpoints of Hugging Face folders, written here as their formats say, against the weights that they
hold."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.model.checkpoints.folder import Folder
from engine.model.decode.assembly import build_decoder
from engine.model.layers.lora import TARGETS
from engine.model.runner.sizes import count_weight_bytes, find_kept_bits
from engine.model.spec.config import read_spec
from engine.model.weights.reader import WeightsError, open_weights, read_kv_scales
from lora_kernels.cpu.quantized_linear import QuantizedLinear
from lora_kernels.fp8 import FP8
from lora_kernels.quantized import Coding, QuantizedWeight, dense
from tests.model.test_decoder import CPU, Replay, random_adapter, save_model

SIZE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
GPU = torch.device("cuda")
TOKENS = [[(7 * place + 3 * index) % 97 for place in range(20 + 9 * index)] for index in range(2)]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(numbers, bits, axis):
    """Unsigned numbers in words of 32 bits along an axis, the first in the lowest bits."""
    count = 32 // bits
    moved = np.moveaxis(numbers, axis, 0).astype(np.uint32)
    words = sum(moved[place::count] << np.uint32(bits * place) for place in range(count))
    return torch.from_numpy(np.moveaxis(words, 0, axis).copy().view(np.int32))


def awq_packed(numbers):
    words = sum(numbers[:, of::8].astype(np.uint32) << np.uint32(4 * place) for place, of in enumerate(AWQ_ORDER))
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def integers(rng, shape, bits, size, symmetric=True, groups=None):
    """Random codes, scales, zero points and the weights that they make; `groups` is the group of each input."""
    (rows, width), top = shape, 1 << bits
    count = width // size
    groups = np.arange(width) // size if groups is None else groups
    codes = rng.integers(0, top, shape)
    scales = rng.uniform(0.2, 0.4, (rows, count)).astype(np.float16) / np.float16(top)
    zeros = np.full((rows, count), top // 2) if symmetric else rng.integers(0, top, (rows, count))
    weights = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
    return SimpleNamespace(codes=codes, scales=torch.from_numpy(scales), zeros=zeros, weights=torch.from_numpy(weights))


def gptq(rng, shape, bits=4, size=32, sym=True, act_order=False, v2=False, group_size=None):
    groups = np.repeat(np.arange(shape[1] // size), size)
    if act_order:
        groups = np.random.default_rng(5).permutation(groups)  # of all modules, as all have the same inputs
    made = integers(rng, shape, bits, size, sym, groups)
    stored_zeros = made.zeros.T if v2 else (made.zeros.T - 1) % (1 << bits)
    section = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size or size,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    tensors = {
        "qweight": packed(made.codes.T, bits, 0),
        "qzeros": packed(stored_zeros, bits, 1),
        "scales": made.scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
        "bias": torch.zeros(shape[0]),
    }
    return section, tensors, made.weights


def awq(rng, shape, size=32):
    made = integers(rng, shape, 4, size, symmetric=False)
    tensors = {"qweight": awq_packed(made.codes.T), "qzeros": awq_packed(made.zeros.T)}
    section = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    return section, tensors | {"scales": made.scales.T.contiguous()}, made.weights


def compressed(form, weights, inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return section | {"ignore": ["lm_head"]} | more


def ct_packed(rng, shape, bits=4, size=32, symmetric=False, act_order=False, strategy="group"):
    groups = np.repeat(np.arange(shape[1] // size), size)
    groups = np.random.default_rng(5).permutation(groups) if act_order else groups
    made = integers(rng, shape, bits, size, symmetric, groups)
    tensors = {
        "weight_packed": packed(made.codes, bits, 1),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(made.zeros, bits, 0)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    section = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    section["group_size"] = size if strategy == "group" else None
    return compressed("pack-quantized", section), tensors, made.weights


def ct_int8(rng, shape, strategy="channel", symmetric=True, inputs=None):
    made = integers(rng, shape, 8, shape[1], symmetric)
    scales, weights = made.scales.bfloat16().half(), None
    zeros = torch.from_numpy(made.zeros)
    if strategy == "tensor":
        scales, zeros = scales[:1, 0], zeros[:1, 0]
    weights = (torch.from_numpy(made.codes) - zeros) * scales.float()
    tensors = {
        "weight": torch.from_numpy((made.codes - 128).astype(np.int8)),
        "weight_scale": scales.bfloat16(),
        "input_scale": torch.ones(1),
    }
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    section = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    return compressed("int-quantized", section, inputs), tensors, weights.float()


def float8(rng, shape, grid, block=None):
    """Weights in e4m3, with a grid of scales."""
    raw = torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.uniform(0.02, 0.1, grid).astype(np.float32))
    weights = raw.float()
    rows, columns = block or (-(-shape[0] // grid[0]), -(-shape[1] // grid[1]))
    for row in range(grid[0]):
        for column in range(grid[1]):
            weights[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns] *= scales[row, column]
    return raw, scales, weights


def fp8_block(rng, shape):
    raw, scales, weights = float8(rng, shape, (-(-shape[0] // 128), -(-shape[1] // 128)), (128, 128))
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return section, {"weight": raw, "weight_scale_inv": scales}, weights


def fp8_scale(rng, shape, grid, stored):
    raw, scales, weights = float8(rng, shape, grid)
    tensors = {"weight": raw, "weight_scale": scales.view(stored), "input_scale": torch.tensor(0.5)}
    return {"quant_method": "fp8", "activation_scheme": "static"}, tensors, weights


def ct_float(rng, shape, strategy):
    grid = {"tensor": (1, 1), "channel": (shape[0], 1), "block": (2, 2)}[strategy]
    raw, scales, weights = float8(rng, shape, grid, (128, 128) if strategy == "block" else None)
    scales = scales.view(1) if strategy == "tensor" else scales
    section = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    section |= {"block_structure": [128, 128]} if strategy == "block" else {}
    return compressed("float-quantized", section), {"weight": raw, "weight_scale": scales}, weights


def write_module(folder, section, tensors, name="model.layers.0.mlp.up_proj"):
    save_file({f"{name}.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))


NAME = "model.layers.0.mlp.up_proj.weight"
IN_SCALES = {"in_scales": True}
FORMS = {
    "gptq": (gptq, {}, Coding(4, 32, 8), "gptq-4bit-g32"),
    "gptq_v2": (gptq, {"v2": True, "sym": False, "size": 64}, Coding(4, 64, **IN_SCALES), "gptq-4bit-g64"),
    "gptq_8": (gptq, {"bits": 8, "size": 128, "sym": False}, Coding(8, 128, **IN_SCALES), "gptq-8bit"),
    "gptq_whole": (gptq, {"size": 192, "group_size": -1}, Coding(4, 64, 8), "gptq-4bit"),
    "gptq_act": (gptq, {"act_order": True, "sym": False}, Coding(4, 32, **IN_SCALES), "gptq-4bit-g32"),
    "awq": (awq, {"size": 64}, Coding(4, 64, **IN_SCALES), "awq-4bit-g64"),
    "packed": (ct_packed, {}, Coding(4, 32, **IN_SCALES), "compressed-tensors-4bit-g32"),
    "packed_8": (
        ct_packed,
        {"bits": 8, "size": 64, "symmetric": True, "act_order": True},
        Coding(8, 64, 128),
        "compressed-tensors-8bit-g64",
    ),
    "packed_channel": (
        ct_packed,
        {"size": 192, "strategy": "channel"},
        Coding(4, 64, **IN_SCALES),
        "compressed-tensors-4bit",
    ),
    "int8": (ct_int8, {}, Coding(8, 64, 128), "compressed-tensors-8bit"),
    "int8_rows": (
        ct_int8,
        {"inputs": {"num_bits": 8, "type": "int", "dynamic": True}},
        Coding(8, 64, 128, by_rows=True),
        "compressed-tensors-8bit",
    ),
    "int8_tensor": (ct_int8, {"strategy": "tensor"}, Coding(8, 64, 128), "compressed-tensors-8bit"),
    "int8_zeros": (ct_int8, {"symmetric": False}, Coding(8, 64, **IN_SCALES), "compressed-tensors-8bit"),
    "float_tensor": (ct_float, {"strategy": "tensor"}, FP8, "compressed-tensors-fp8"),
    "float_channel": (ct_float, {"strategy": "channel"}, FP8, "compressed-tensors-fp8"),
    "float_block": (ct_float, {"strategy": "block"}, None, "compressed-tensors-fp8"),
    "fp8_block": (fp8_block, {}, None, "fp8"),
    "fp8_tensor": (fp8_scale, {"grid": (1, 1), "stored": ()}, FP8, "fp8"),
    "fp8_channel": (fp8_scale, {"grid": (136, 1), "stored": (136,)}, FP8, "fp8"),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_the_format_says(tmp_path, form):
    make, settings, coding, name = FORMS[form]
    shape = (136, 128 if form == "gptq_8" else 192)
    section, tensors, weights = make(np.random.default_rng(0), shape, **settings)
    write_module(tmp_path, section, tensors)
    folder = Folder(tmp_path, {NAME: shape})
    assert (folder.shapes, folder.coding(NAME)) == ({NAME: shape}, coding)
    assert (folder.form(NAME), folder.form("model.norm.weight")) == (name, None)
    found = folder.read(NAME)
    assert isinstance(found, torch.Tensor) == (coding is None)
    assert not isinstance(found, QuantizedWeight) or isinstance(coding, Coding)
    torch.testing.assert_close(dense(found), weights, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("v2", "named"), [(True, "gptq"), (False, "gptq_v2"), (True, "gptq_v2"), (False, "gptq")])
def test_symmetric_zero_points_tell_their_format_whatever_the_settings_name(tmp_path, v2, named):
    section, tensors, weights = gptq(np.random.default_rng(0), (64, 128), v2=v2)
    write_module(tmp_path, section | {"checkpoint_format": named}, tensors)
    torch.testing.assert_close(dense(Folder(tmp_path, {NAME: (64, 128)}).read(NAME)), weights, rtol=2e-7, atol=0)


AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("make", "file", "settings"),
    [
        (gptq, "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        (awq, "quant_config.json", AUTO_AWQ),
    ],
)
def test_settings_may_be_in_a_file_of_their_own(tmp_path, make, file, settings):
    section, tensors, weights = make(np.random.default_rng(0), (64, 128))
    write_module(tmp_path, section, tensors)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(settings))
    folder = Folder(tmp_path, {NAME: (64, 128)})
    assert folder.form(NAME) == f"{section['quant_method']}-4bit-g32"
    torch.testing.assert_close(dense(folder.read(NAME)), weights, rtol=2e-7, atol=0)
    (tmp_path / file).write_text("{")
    with pytest.raises(WeightsError, match=rf"{file} is not valid JSON"):
        Folder(tmp_path, {NAME: (64, 128)})


def test_files_may_have_auto_gptqs_names(tmp_path):
    section, tensors, weights = gptq(np.random.default_rng(0), (64, 128))
    write_module(tmp_path, section, tensors)
    name = "gptq_model-4bit-128g"
    first = (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    torch.testing.assert_close(dense(Folder(tmp_path, {NAME: (64, 128)}).read(NAME)), weights, rtol=2e-7, atol=0)
    part = first.rename(tmp_path / f"{name}-00001-of-00002.safetensors")
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / f"{name}-00002-of-00002.safetensors")
    with pytest.raises(WeightsError, match="several models"):
        Folder(tmp_path, {NAME: (64, 128)})
    others = dict.fromkeys(load_file(part), part.name) | {"model.norm.weight": f"{name}-00002-of-00002.safetensors"}
    (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": others}))
    folder = Folder(tmp_path, {NAME: (64, 128)})
    assert folder.shapes == {NAME: (64, 128), "model.norm.weight": (8,)}


def quantise(model, folder, make):
    """Quantises the linears of a saved model but the head, and gives the model the weights."""
    rng, tensors = np.random.default_rng(0), load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if "_proj.weight" in name:
            section, parts, weights = make(rng, tuple(parameter.shape))
            parameter.data.copy_(weights)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    tensors |= {f"model.layers.{layer}.self_attn.{side}_scale": torch.ones(1) for layer in range(2) for side in "kv"}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


MODELS = {
    "gptq": lambda rng, shape: gptq(rng, shape, sym=False, act_order=True),
    "awq": awq,
    "packed": ct_packed,
    "int8": lambda rng, shape: ct_int8(rng, shape, inputs={"num_bits": 8, "type": "int"}),
    "fp8": fp8_block,
}


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_the_dequantised_weights(tmp_path, family):
    model = save_model("llama", tmp_path, **SIZE)
    quantise(model, tmp_path, MODELS[family])
    run = Replay(tmp_path)
    assert isinstance(run.decoder.layers[0].qkv, QuantizedLinear) == (family != "fp8")
    assert (read_kv_scales(tmp_path, run.spec) == 1).all()
    adapter = random_adapter(run.spec, (8,) * 7)
    run.load("adapter", adapter)
    rows = run.run([*TOKENS, TOKENS[0]], [None, None, "adapter"])
    with torch.inference_mode():
        expected = [model(torch.tensor([tokens])).logits[0] for tokens in TOKENS]
        for (layer, target), (a, b) in adapter.items():
            block = model.model.layers[layer].self_attn if target < 4 else model.model.layers[layer].mlp
            getattr(block, TARGETS[target]).weight += b @ a
        expected.append(model(torch.tensor([TOKENS[0]])).logits[0])
    assert (expected[0] - expected[2]).abs().max() > 0.1
    for (index, position), row in rows.items():
        assert (row.log_softmax(-1) - expected[index][position].log_softmax(-1)).abs().max() < 0.005


def test_memory_is_counted_as_quantised(tmp_path):
    model = save_model("llama", tmp_path, **SIZE)
    quantise(model, tmp_path, ct_packed)
    spec = read_spec(tmp_path)
    plain = count_weight_bytes(spec, lambda name: 16)
    config, bf16 = EngineConfig(str(tmp_path)), torch.bfloat16
    counted = count_weight_bytes(spec, find_kept_bits(config, spec, CPU, bf16))
    linears = sum(weight.numel() for name, weight in model.named_parameters() if "_proj.weight" in name)
    assert plain - counted == linears * (16 - 5) // 8
    assert counted == count_weight_bytes(spec, find_kept_bits(config, spec, GPU, bf16))
    assert 2 * plain == count_weight_bytes(spec, find_kept_bits(config, spec, GPU, torch.float32))
    [layer, *_] = build_decoder(spec, open_weights(tmp_path, spec), torch.float32, CPU).layers
    assert isinstance(layer.feed_forward.down, QuantizedLinear)
    assert layer.feed_forward.down.nbytes >= 256 * 256 * 5 // 8


def test_targets_and_modules_to_ignore_are_honoured(tmp_path):
    rng, shape, prefix = np.random.default_rng(0), (64, 64), "model.layers.0"
    _, four, first = ct_packed(rng, shape)
    _, eight, second = ct_packed(rng, shape, bits=8, symmetric=True)
    plain = torch.randn(shape)
    groups = [
        {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "group_size": 32, "type": "int", "symmetric": True}},
        {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int", "symmetric": False}},
    ]
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": dict(enumerate(groups)),
        "ignore": ["lm_head", "re:.*o_proj"],
    }
    modules = {
        f"{prefix}.self_attn.q_proj": (four, first),
        f"{prefix}.mlp.up_proj": (eight, second),
        f"{prefix}.self_attn.o_proj": ({"weight": plain}, plain),
        "lm_head": ({"weight": plain}, plain),
        "model.embed_tokens": ({"weight": plain}, plain),
    }
    tensors = {
        f"{name}.{part}": tensor.clone() for name, (parts, _) in modules.items() for part, tensor in parts.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    folder = Folder(tmp_path, {f"{name}.weight": shape for name in modules})
    for name, (_, weights) in modules.items():
        torch.testing.assert_close(dense(folder.read(f"{name}.weight")), weights, rtol=2e-7, atol=0)


def without(name):
    return lambda tensors: tensors.pop(name)


def wrong(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("make", "settings", "change", "error"),
    [
        (gptq, {}, without("scales"), r"missing tensor .*up_proj\.scales"),
        (gptq, {}, wrong("qzeros", torch.zeros(2, 4, dtype=torch.int32)), r"qzeros has shape \[2, 4\], .*\[4, 8\]"),
        (gptq, {}, wrong("qweight", torch.zeros(16, 64)), r"qweight has dtype F32, expected is I32"),
        (gptq, {}, wrong("qzeros", torch.zeros(4, 8, dtype=torch.int32)), r"zero points besides 8.*sym is true"),
        (gptq, {"act_order": True}, wrong("g_idx", torch.zeros(128, dtype=torch.int32)), r"g_idx must name 32 inputs"),
        (gptq, {"size": 8}, lambda _: None, r"qweight has 128 inputs in groups of 8"),
        (awq, {}, without("qzeros"), r"missing tensor .*up_proj\.qzeros"),
        (ct_packed, {}, without("weight_scale"), r"missing tensor .*weight_scale"),
        (ct_packed, {}, wrong("weight_scale", torch.full((64, 4), 1e-6)), r"weight_scale has scales too small"),
        (ct_packed, {}, wrong("weight_scale", torch.full((64, 4), torch.nan)), r"weight_scale has scales too small"),
        (ct_int8, {}, without("weight_scale"), r"missing tensor .*weight_scale"),
        (fp8_block, {}, without("weight_scale_inv"), r"missing tensor .*weight_scale"),
        (fp8_block, {}, wrong("weight", torch.zeros(64, 128, dtype=torch.float8_e5m2)), r"weight is F8_E5M2"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(tmp_path, make, settings, change, error):
    section, tensors, _ = make(np.random.default_rng(0), (64, 128), **settings)
    change(tensors)
    write_module(tmp_path, section, tensors)
    with pytest.raises(WeightsError, match=error):
        Folder(tmp_path, {NAME: (64, 128)}).read(NAME)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' cannot be read: choose a GGUF file"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' of 4 bits"),
        (compressed("marlin-24", {"num_bits": 4, "group_size": 128}), "'marlin-24' with 4-bit int weights per group"),
        (
            compressed("dense", {}, kv_cache_scheme={"num_bits": 8, "type": "int"}),
            "kv_cache_scheme is supported for FP8",
        ),
        (compressed("dense", {}, sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        (compressed("dense", {}, transform_config={"config_groups": {"u": {}}}), "transforms of activations"),
    ],
)
def test_unknown_schemes_are_refused_by_name(tmp_path, section, error):
    write_module(tmp_path, section, {"weight": torch.zeros(16, 16)})
    with pytest.raises(WeightsError, match=error):
        Folder(tmp_path, {NAME: (16, 16)})


def test_a_module_of_gptq_may_differ_from_the_others(tmp_path):
    section, tensors, weights = gptq(np.random.default_rng(0), (64, 128), bits=8, size=64)
    section |= {"bits": 4, "group_size": 128, "dynamic": {r".*up_proj": {"bits": 8, "group_size": 64}, "-:.*head": {}}}
    write_module(tmp_path, section, tensors)
    assert torch.equal(dense(Folder(tmp_path, {NAME: (64, 128)}).read(NAME)), weights)
