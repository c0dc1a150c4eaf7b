"""Scales of K and V in FP8: what is measured, what a checkpoint says, and what they do for a model with large keys.

K and V are rounded by torch here. The kernels that store and read them are tested with Triton's interpreter, whose own
rounding to e4m3 is not a GPU's (tests/kernels/attention_checks.py).
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from engine.model.decode.assembly import build_decoder
from engine.model.decode.kv_scales import LARGEST, _chunk, _Meter, find_kv_codings, measure_kv_codings
from engine.model.memory.arena import Arena, page_shape
from engine.model.spec.config import parse_spec
from engine.model.weights.reader import WeightsError, open_weights, parameter_shapes, read_kv_scales
from lora_kernels.backend import KvCoding
from lora_kernels.reference import ReferenceBackend

CPU = torch.device("cpu")
BIAS = 700.0
"""Size of the biases of some key dimensions. Qwen2.5's are of several hundreds."""
FAST, SLOW = (1, 4, 9, 13), (12, 13, 14, 15)
"""Pairs of a head's 16; the later ones turn more slowly, by less than 0.15 over 4,096 positions from 12 on."""
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
}
KEY_SCALES, VALUE_SCALE = torch.tensor([0.5, 2.0]), torch.tensor(3.0)
PROMPT = torch.randint(211, (48,), generator=torch.Generator().manual_seed(5))


def weights(spec, pairs=FAST, share=0.02, bias=BIAS):
    """Random parameters. Biases make the keys of KV head 0 large in `pairs`, of which the first turn fast and the last
    slowly. Queries are `share` of their size there."""
    generator = torch.Generator().manual_seed(1)
    made = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.15
        for name, shape in parameter_shapes(spec).items()
    }
    large = torch.tensor(pairs)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}.self_attn"
        made[f"{prefix}.k_proj.bias"][large] += bias
        made[f"{prefix}.q_proj.weight"].view(4, 2, 16, 64)[:2, :, large] *= share
        made[f"{prefix}.q_proj.bias"].view(4, 2, 16)[:2, :, large] *= share
    return made


@pytest.fixture(scope="module")
def spec():
    return parse_spec(CONFIG, {})


@pytest.fixture(scope="module")
def decoder(spec):
    made = weights(spec)
    return build_decoder(spec, made.__getitem__, torch.float32, CPU)


class Rounded(_Meter):
    """Keeps K and V as a GPU does in e4m3 with these codings, one for each layer."""

    def __init__(self, codings):
        super().__init__()
        self.codings = codings

    def rotate_and_write(self, *args):
        query = super().rotate_and_write(*args)
        coding, (key, value) = self.codings[len(self.keys) - 1], self._key_value
        shifted, scales = key - coding.key_shift, coding.scales[:, :, None]
        self._key_value = rounded(shifted, scales[0]), rounded(value, scales[1])
        return query


def rounded(numbers, scale):
    return (numbers / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


@torch.inference_mode()
def logits(decoder, backend):
    arena = Arena(page_shape(decoder.spec, 16), 1, 1, torch.float32, CPU)
    return decoder.run(_chunk(PROMPT), arena, backend).logits


def error(found, exact):
    """Root mean square of the difference of two sets of logits, as a share of their spread."""
    return ((found - exact).square().mean().sqrt() / exact.std()).item()


def plain(spec):
    return (KvCoding(torch.ones(2, spec.kv_heads), torch.zeros(spec.kv_heads, spec.head_dim)),) * spec.layers


def errors(spec, pairs, share, bias=BIAS):
    """Errors of a model whose keys are large in `pairs`, and whose queries are `share` of their size there: with the
    measured codings, with their scales alone, and as the numbers are."""
    decoder = build_decoder(spec, weights(spec, pairs, share, bias).__getitem__, torch.float32, CPU)
    exact, measured = logits(decoder, _Meter()), measure_kv_codings(decoder, torch.float32, 4096)
    unshifted = tuple(KvCoding(coding.scales * 8, 0 * coding.key_shift) for coding in measured)
    return [error(logits(decoder, Rounded(codings)), exact) for codings in (measured, unshifted, plain(spec))]


def test_large_keys_that_turn_slowly_are_stored_as_well_as_small_ones(spec):
    """Measured: 0.09, and 0.07 without the biases; 0.53 if nothing is subtracted, whatever the scale."""
    measured, scaled, plain = errors(spec, pairs=SLOW, share=1.0)
    small, *_ = errors(spec, pairs=SLOW, share=1.0, bias=0)
    assert max(measured, small) < 0.1
    assert min(scaled, plain) > 4 * measured


def test_large_keys_that_turn_fast_are_at_least_not_clipped(spec):
    """Measured: 0.13, and 0.46 if they are."""
    measured, scaled, plain = errors(spec, pairs=FAST, share=0.02)
    assert max(measured, scaled) < 0.2
    assert plain > 2.5 * max(measured, scaled)


@pytest.mark.parametrize("pairs", [FAST, SLOW])
def test_scales_leave_room_at_every_position_that_is_served(spec, pairs):
    """A pair of a key's numbers turns with the position, and both of them may become as large as its norm."""
    decoder = build_decoder(spec, weights(spec, pairs, 1.0).__getitem__, torch.float32, CPU)
    codings = measure_kv_codings(decoder, torch.float32, 4096)
    for first in (0, 1000, 2300, 4000):
        batch, meter = _chunk(PROMPT), Largest(codings)
        with torch.inference_mode():
            arena = Arena(page_shape(spec, 16), 1, 1, torch.float32, CPU)
            decoder.run(replace(batch, positions=batch.positions + first), arena, meter)
        used = torch.stack(meter.used) / LARGEST
        assert (used < 0.8).all() and (used > 0.02).all(), "numbers fit, and their scale is not much too large"
    scales = torch.stack([coding.scales for coding in codings])
    assert scales[:, 0, 0].min() > scales[:, 0, 1].max(), "heads have scales of their own"
    assert torch.equal(scales.log2(), scales.log2().round()), "scaling by a power of two rounds nothing"


class Largest(_Meter):
    """Notes the largest numbers that are stored with these codings, of each layer and head."""

    def __init__(self, codings):
        super().__init__()
        self.codings, self.used = codings, []

    def rotate_and_write(self, *args):
        query = super().rotate_and_write(*args)
        coding, (key, value) = self.codings[len(self.used)], self._key_value
        stored = torch.stack([key - coding.key_shift, value]) / coding.scales[:, None, :, None]
        self.used.append(stored.abs().amax((1, 3)))
        return query


class Noted(_Meter):
    """Notes the codings that it is given for K and V, layer by layer."""

    def __init__(self):
        super().__init__()
        self.written, self.read = [], []

    def rotate_and_write(self, *args):
        self.written.append(args[6])
        return super().rotate_and_write(*args[:6])

    def attention(self, *args):
        self.read.append(args[5])
        return super().attention(*args[:5])


def test_every_layer_is_stored_and_read_with_its_own_coding(spec, decoder):
    codings, noted = tuple(KvCoding(torch.rand(2, 2), torch.rand(2, 32)) for _ in range(2)), Noted()
    arena = Arena(page_shape(spec, 16), 1, 1, torch.float32, CPU, kv_codings=codings)
    with torch.inference_mode():
        decoder.run(_chunk(PROMPT), arena, noted)
    assert tuple(noted.written) == tuple(noted.read) == codings


def test_a_cpu_refuses_scales(spec, decoder):
    arena = Arena(page_shape(spec, 16), 5, 1, torch.float32, CPU, kv_codings=plain(spec))
    with torch.inference_mode(), pytest.raises(ValueError, match="only where they are stored in FP8, on a GPU"):
        decoder.run(_chunk(PROMPT), arena, ReferenceBackend())


def test_nothing_is_subtracted_from_keys_whose_scores_are_bounded(spec):
    """The bound makes of equal differences of scores unequal ones."""
    capped = replace(spec, attention_cap=20.0)
    decoder = build_decoder(capped, weights(capped, bias=0).__getitem__, torch.float32, CPU)
    exact, measured = logits(decoder, _Meter()), measure_kv_codings(decoder, torch.float32, 4096)
    assert not any(coding.key_shift.any() for coding in measured)
    assert error(logits(decoder, Rounded(measured)), exact) < 0.1


def test_the_same_model_gets_the_same_codings(spec, decoder):
    again = build_decoder(spec, weights(spec).__getitem__, torch.float32, CPU)
    for one, other in zip(*(measure_kv_codings(each, torch.float32, 64) for each in (decoder, again)), strict=True):
        assert torch.equal(one.scales, other.scales) and torch.equal(one.key_shift, other.key_shift)


def test_keys_that_are_not_finite_are_refused(spec):
    made = weights(spec)
    made["model.layers.1.self_attn.k_proj.bias"][3] = torch.inf
    with pytest.raises(ValueError, match=r"engine\.kv_dtype is fp8, and the model computes K or V that are not finite"):
        measure_kv_codings(build_decoder(spec, made.__getitem__, torch.float32, CPU), torch.float32, 64)


@pytest.fixture
def checkpoint(tmp_path, spec):
    """Writes a checkpoint with these scales besides the model's own tensors, and returns its folder."""

    def write(scales):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        save_file(weights(spec) | scales, tmp_path / "model.safetensors")
        return tmp_path

    return write


def named(key, value, keys=KEY_SCALES, values=VALUE_SCALE):
    """Scales of both layers, the second's twice the first's."""
    places = ((layer, f"model.layers.{layer}.self_attn") for layer in range(2))
    return {
        name: scale * (layer + 1)
        for layer, prefix in places
        for name, scale in ((f"{prefix}.{key}", keys), (f"{prefix}.{value}", values))
    }


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale")]
)
def test_a_checkpoints_scales_are_taken(checkpoint, spec, decoder, names):
    folder = checkpoint(named(*names))
    found = find_kv_codings(folder, "auto", decoder, torch.float32, 64)
    first = torch.tensor([[0.5, 2.0], [3.0, 3.0]])
    assert torch.equal(torch.stack([coding.scales for coding in found]), torch.stack([first, 2 * first]))
    assert not any(coding.key_shift.any() for coding in found), "it was made for keys as they are"
    assert open_weights(folder, spec)("model.norm.weight").shape == (64,), "weights are loaded as without scales"
    assert not torch.equal(find_kv_codings(folder, "dummy", decoder, torch.float32, 64)[0].scales, first)


def test_a_checkpoint_without_scales_has_none(checkpoint, spec, decoder):
    folder = checkpoint({"model.layers.0.self_attn.q_scale": torch.ones(1)})
    open_weights(folder, spec)
    assert read_kv_scales(folder, spec) is None
    found = find_kv_codings(folder, "auto", decoder, torch.float32, 64)
    assert torch.equal(found[1].key_shift, measure_kv_codings(decoder, torch.float32, 64)[1].key_shift)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.tensor([1.0, 0.0]), torch.tensor(-1.0), torch.tensor(torch.nan)]
)
def test_wrong_scales_are_refused(checkpoint, spec, wrong):
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.v_scale must have 1 or 2 positive numbers"):
        read_kv_scales(checkpoint(named("k_scale", "v_scale", values=wrong)), spec)


def test_a_missing_scale_is_named(checkpoint, spec):
    scales = named("k_scale", "v_scale")
    del scales["model.layers.1.self_attn.v_scale"]
    with pytest.raises(WeightsError, match=r"missing tensor model\.layers\.1\.self_attn\.v_scale"):
        read_kv_scales(checkpoint(scales), spec)


def test_a_configuration_may_quantize_nothing_but_the_cache(checkpoint, spec):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    for_cache = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    folder = checkpoint(named("k_scale", "v_scale"))
    for served in (for_cache, for_cache | {"config_groups": {"group_0": {"targets": []}}}):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": served}))
        assert torch.equal(open_weights(folder, spec)("model.norm.weight"), weights(spec)["model.norm.weight"])
        assert read_kv_scales(folder, spec)[1, 0].tolist() == [1.0, 4.0]
