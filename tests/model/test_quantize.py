"""Models whose weights are quantised when they are loaded, against Hugging Face's with the dequantised weights."""

import pytest
import torch

from engine.config import EngineConfig
from engine.model.decode.assembly import build_decoder
from engine.model.runner.sizes import find_kept_bits
from engine.model.spec.config import read_spec
from engine.model.weights.quantize import quantized_source
from engine.model.weights.reader import open_weights
from lora_kernels.cpu.quantized_linear import QuantizedLinear
from lora_kernels.fp8 import Fp8Weight
from lora_kernels.quantized import QuantizedWeight, dense
from tests.model.test_decoder import CPU, Replay, save_model

BF16 = torch.bfloat16
TOKENS = [[(7 * place + 3 * index) % 97 for place in range(20 + 9 * index)] for index in range(3)]


def dequantized(model, source):
    """The Hugging Face model, with every weight as `source` has it, dequantised."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dense(source(name)))
    return model


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_logits_are_those_of_the_dequantised_weights(tmp_path, family, weights):
    model = save_model(family, tmp_path / "model")
    spec = read_spec(tmp_path / "model")
    source = quantized_source(open_weights(tmp_path / "model", spec), weights, None)
    run = Replay(tmp_path / "model")
    run.decoder = build_decoder(spec, source, torch.float32, CPU)
    linears = [part for layer in run.decoder.layers for part in (layer.qkv, layer.o, *layer.feed_forward.linears)]
    are_kept = [isinstance(linear, QuantizedLinear) for linear in (run.decoder.head.linear, *linears)]
    assert not any(are_kept) if weights == "fp8" else all(are_kept), "a CPU computes with dequantised FP8"
    found = run.run(TOKENS)
    reference = dequantized(model, source)
    for (index, position), row in found.items():
        with torch.inference_mode():
            expected = reference(torch.tensor([TOKENS[index]])).logits[0, position]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=5e-3)


def test_fp8_takes_a_byte_for_a_weight_where_it_is_multiplied(tmp_path, monkeypatch):
    save_model("llama", tmp_path)
    spec, config, cuda = read_spec(tmp_path), EngineConfig(str(tmp_path), weights="fp8"), torch.device("cuda")
    refusal = r"engine\.weights fp8 needs a GPU of compute capability 8\.9 or later and bfloat16, not"
    for capability, device, dtype in (((9, 0), CPU, BF16), ((8, 0), cuda, BF16), ((9, 0), cuda, torch.float16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(ValueError, match=rf"{refusal} {device.type}, {dtype}"):
            find_kept_bits(config, spec, device, dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    bits = find_kept_bits(config, spec, cuda, BF16)
    assert [bits(name) for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")] == [16, 8]
    weight = quantized_source(open_weights(tmp_path, spec), "fp8", None)("model.layers.0.mlp.up_proj.weight")
    assert isinstance(weight, Fp8Weight)
    plain = open_weights(tmp_path, spec)("model.layers.0.mlp.up_proj.weight")
    assert 0.01 < (dense(weight) - plain).norm() / plain.norm() < 0.04


def test_results_are_kept_and_read_again(tmp_path):
    save_model("llama", tmp_path / "model")
    spec = read_spec(tmp_path / "model")
    stored = open_weights(tmp_path / "model", spec)
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    first = {name: quantized_source(stored, "int4", tmp_path / "kept")(name) for name in names}

    def no_source(name):
        assert name == "model.norm.weight", "only what is not quantised is read again"
        return stored(name)

    again = quantized_source(no_source, "int4", tmp_path / "kept")
    for name in names:
        assert torch.equal(dense(again(name)), dense(first[name]))
    assert [first[name].coding.bits for name in names[:2]] == [8, 4]
    [damaged] = (tmp_path / "kept").glob("*down*")
    damaged.write_bytes(b"cut off")
    assert torch.equal(quantized_source(stored, "int4", tmp_path / "kept")(names[1]).codes, first[names[1]].codes)
    assert torch.equal(dense(again(names[1])), dense(first[names[1]])), "what was damaged has been written again"


def test_weights_that_cannot_be_quantised_are_refused():
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = torch.zeros(4, 64)
    quantised = quantized_source({name: weight}.__getitem__, "int8", None)(name)
    assert isinstance(quantised, QuantizedWeight)
    with pytest.raises(ValueError, match=r"q_proj\.weight is quantised already: engine\.weights must be auto"):
        quantized_source({name: quantised}.__getitem__, "int4", None)(name)
    with pytest.raises(ValueError, match=r"q_proj\.weight has numbers that are not finite"):
        quantized_source({name: weight + float("inf")}.__getitem__, "int8", None)(name)
    narrow = torch.ones(4, 40)
    assert quantized_source({name: narrow}.__getitem__, "int8", None)(name) is narrow
    with pytest.raises(ValueError, match="weights must be one of auto, int8, int4, fp8"):
        EngineConfig("model", weights="int3")
