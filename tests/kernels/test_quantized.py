"""Quantised weights: what they stand for, and linear layers and embeddings that compute with them as they are."""

import pytest
import torch

from lora_kernels.cpu.numba_quantized_gemm import code_bits
from lora_kernels.cpu.quantized_linear import Panels, QuantizedEmbedding, QuantizedLinear
from lora_kernels.linear import make_embedding, make_linear
from lora_kernels.quantized import INT4, INT8, Coding, QuantizedWeight, find_coding, quantize, stack

FEATURES, WIDTH = 130, 384
SIX = Coding(6, 16, 32, shared=8)
CODINGS = (INT8, INT4, SIX, Coding(5, 32, shared=4), Coding(4, 128, in_scales=True))
ROWS = (1, 3, 8, 13)


def weight(coding, seed=0, features=FEATURES, width=WIDTH):
    """A weight of random codes: its scales and minima need not be those of any real weight."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**coding.bits, (features, width), dtype=torch.uint8, generator=generator)
    shape = (features, width // coding.group)
    if coding.shared:
        scales, minima = torch.randint(-9, 99, (2, *shape), dtype=torch.int8, generator=generator)
        sides = 1 if coding.zero else 2
        units = (torch.rand((features, shape[1] // coding.shared, sides), generator=generator) * 1e-4).half()
        return QuantizedWeight(coding, codes, scales, None if coding.zero else minima, units)
    scales = (torch.rand(shape, generator=generator) * 0.01 + 0.001).half()
    zeros = torch.randint(0, 16, shape, generator=generator).half()
    minima = None if coding.zero is not None else -zeros if coding.in_scales else -zeros * scales
    return QuantizedWeight(coding, codes, scales, minima)


def rows(count, dtype, seed=1):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_coded(x, coding):
    """Activations as products with weights in `coding` see them: in so many bits each, with a scale for each block."""
    if not (bits := code_bits(x.dtype, coding.bits)):
        return x.double()
    largest, blocks = 2 ** (bits - 1) - 1, x.float().view(len(x), -1, min(coding.group, 32))
    tops = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.tensor(float(largest)).div(tops)).round()  # a number / tops multiplies by a reciprocal
    return (codes.double() * tops / largest).view(len(x), -1)


def outcomes(linear, one, bias, dtype, seen):
    """For batches of several sizes, what a layer with weight `one` returns, and the exact product in fp64 of what it
    sees of its inputs."""
    for count in ROWS:
        x = rows(count, dtype)
        yield linear(x).double(), seen(x) @ one.dequantize().double().T + bias


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_products_in_fp32_are_those_of_the_dequantised_weight(coding):
    one, bias = weight(coding), torch.randn(FEATURES)
    linear = QuantizedLinear([one], bias, torch.float32)
    for found, exact in outcomes(linear, one, bias, torch.float32, lambda x: as_coded(x, coding)):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("features", "of_fp32", "of_bf16", "beside_4_bits"),
    [
        ("+neon", 0, 0, 0),
        ("+avx,+f16c", 0, 0, 0),
        ("+avx2,+avxvnni", 16, 16, 8),
        ("+avx2,+avx512f", 0, 0, 0),
        ("+avx2,+avx512f,+avx512vnni", 0, 8, 8),
    ],
)
def test_codes_of_activations_are_those_that_the_processor_multiplies_fast(
    features, of_fp32, of_bf16, beside_4_bits, monkeypatch
):
    monkeypatch.setattr("numba.core.codegen.get_host_cpu_features", lambda: features)
    assert {code_bits(torch.float32, bits) for bits in (4, 5, 6, 8)} == {of_fp32}
    assert {code_bits(torch.bfloat16, bits) for bits in (5, 6, 8)} == {of_bf16}
    assert code_bits(torch.float16, 4) == beside_4_bits


@pytest.mark.parametrize("coding", [INT4, SIX], ids=str)
def test_products_with_fp32_weights_are_exact_on_any_processor(coding, monkeypatch):
    monkeypatch.setattr("lora_kernels.cpu.quantized_linear.code_bits", lambda dtype, weight_bits: 0)
    one, bias = weight(coding), torch.randn(FEATURES)
    linear = QuantizedLinear([one], bias, torch.float32)
    for found, exact in outcomes(linear, one, bias, torch.float32, lambda x: x.double()):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_products_in_bf16_are_exact_but_for_the_activations_codes(coding):
    one, bias = weight(coding), torch.randn(FEATURES)
    linear = QuantizedLinear([one], bias, torch.bfloat16)
    for found, exact in outcomes(linear, one, bias, torch.bfloat16, lambda x: as_coded(x, coding)):
        assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 2e-3).all()
    x = rows(ROWS[-1], torch.bfloat16)
    unrounded = QuantizedLinear([one], bias, torch.bfloat16, torch.float32)(x)
    assert unrounded.dtype == (torch.float32 if code_bits(torch.bfloat16, 4) else torch.bfloat16)
    assert torch.equal(unrounded.to(torch.bfloat16), linear(x))


def test_activations_in_16_bits_are_nearly_exact():
    if code_bits(torch.float32, 8) != 16:
        pytest.skip("activations are coded in 16 bits only by processors with AVX2 and without AVX-512")
    one, x = weight(INT8), rows(13, torch.float32)
    exact = x.double() @ one.dequantize().double().T
    assert (QuantizedLinear([one], None, torch.float32)(x) - exact).abs().max() <= 5e-5 * exact.abs().max()
    largest = QuantizedWeight(INT8, torch.full((48, 32), 255, dtype=torch.uint8), torch.ones(48, 1).half())
    sums = QuantizedLinear([largest], None, torch.float32)(torch.ones(7, 32))
    assert (sums == 32 * 127).all(), "sums of the largest codes must not overflow"


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_codes_of_4_bits_do_not_overflow(sign):
    largest = QuantizedWeight(Coding(4, 32, 8), torch.full((48, 32), 15, dtype=torch.uint8), torch.ones(48, 1).half())
    linear, x = QuantizedLinear([largest], None, torch.bfloat16), torch.full((7, 32), float(sign)).bfloat16()
    assert (linear(x) == sign * 32 * 7).all() and (linear(x[:1]) == sign * 32 * 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_keeps_its_bits_among_others_and_harms_none(dtype):
    linear = QuantizedLinear([weight(INT4)], None, dtype)
    x = rows(70, dtype)
    among = linear(x)
    for first, count in ((5, 1), (5, 2), (5, 3), (5, 8), (5, 13), (60, 9), (2, 65)):
        assert torch.equal(linear(x[first : first + count]), among[first : first + count])
    x[3, 100], x[9, 0], x[11] = float("nan"), float("inf"), 0.0
    out = linear(x)
    assert out[3].isnan().all()
    assert not out[9].isfinite().any()
    assert (out[11] == 0).all()
    healthy = [row for row in range(70) if row not in (3, 9, 11)]
    assert torch.equal(out[healthy], among[healthy])


def test_a_fused_layer_of_several_codings_equals_its_parts():
    pieces = [weight(INT4, 1, 50), weight(INT4, 2, 70), weight(INT8, 3, 33)]
    linear, x = make_linear(pieces, torch.arange(153.0), torch.float32), rows(5, torch.float32)
    assert len(linear.panels) == 2, "pieces of one coding are one"
    expected = x @ torch.cat([piece.dequantize() for piece in pieces]).T + torch.arange(153.0)
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)
    mixed = make_linear([pieces[0], torch.ones(3, WIDTH)], None, torch.float32)
    assert not isinstance(mixed, QuantizedLinear)
    torch.testing.assert_close(mixed(x)[:, 50:], x.sum(1, keepdim=True).expand(5, 3), rtol=1e-4, atol=1e-4)


def test_inputs_in_another_order():
    one = weight(INT4)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))
    moved = QuantizedWeight(one.coding, one.codes, one.scales, one.minima, order=order)
    assert torch.equal(moved.dequantize()[:, order], one.dequantize())
    linear, x = QuantizedLinear([moved], None, torch.float32), rows(4, torch.float32)
    assert linear.reorders
    torch.testing.assert_close(linear(x), x @ moved.dequantize().T, rtol=1e-4, atol=1e-4)
    assert len(stack([moved, moved, one])) == 2


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_an_embedding_reads_rows_out_of_panels(coding):
    one, ids = weight(coding), torch.tensor([0, 129, 48, 47, 77, 0], dtype=torch.int32)
    embedding = QuantizedEmbedding(Panels(one), torch.float32)
    torch.testing.assert_close(embedding(ids), one.dequantize()[ids.long()], rtol=1e-6, atol=1e-7)
    out = torch.empty(6, WIDTH)
    assert embedding(ids, out) is out


def test_tied_embeddings_are_in_memory_once():
    one = weight(INT8)
    head = make_linear(one, dtype=torch.bfloat16)
    embedding = make_embedding(one, head, torch.bfloat16, tied=True)
    assert embedding._panels is head.panels[0]
    assert head.nbytes <= 1.2 * one.nbytes, "panels of 48 outputs pad 130"


def test_quantising_keeps_what_the_bits_can_hold():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    errors = {coding: (quantize(x, coding).dequantize() - x).abs().mean().item() for coding in (INT8, INT4)}
    assert errors[INT8] < 0.006
    assert errors[INT4] < 0.07
    grid = weight(INT8, 2).dequantize()
    assert torch.allclose(quantize(grid, INT8).dequantize(), grid, atol=grid.abs().max().item() / 127)
    assert (quantize(torch.zeros(2, 32), INT4).dequantize() == 0).all()
    assert find_coding(INT8, 48) == Coding(8, 16, 128)
    assert find_coding(INT8, 40) is None
    with pytest.raises(ValueError, match="too large"):
        quantize(torch.full((1, 32), 1e9), INT8)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="bits, not 3"):
        Coding(3, 32)
    with pytest.raises(ValueError, match="not 48"):
        Coding(4, 48)
    with pytest.raises(ValueError, match="384 inputs in groups of 32"):
        QuantizedWeight(INT8, torch.zeros(2, 384, dtype=torch.uint8), torch.ones(2, 3).half())
    linear = QuantizedLinear([weight(INT4)], None, torch.bfloat16)
    for wrong in (rows(1, torch.float32), torch.zeros(1, 32, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"a quantised linear of torch.bfloat16 \[num_rows, 384\]"):
            linear(wrong)
