"""What quantised weights on a GPU must satisfy, as functions run under the interpreter, or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from backend_checks import assert_error_within_twice
from interpreter_numbers import tensor_cores
from torch import Tensor

from lora_kernels import forms
from lora_kernels.gpu import quantized_linear
from lora_kernels.gpu.quantized_linear import DeviceEmbedding, DeviceLinear
from lora_kernels.gpu.quantized_weights import pack, stored_bits
from lora_kernels.linear import make_embedding, make_linear
from lora_kernels.quantized import INT4, INT8, Coding, QuantizedWeight, quantize

CODINGS = {
    "4 bits of 32": Coding(4, 32, 8),
    "4 bits of 128, zeros": Coding(4, 128, in_scales=True),
    "4 bits of 64, minima": Coding(4, 64),
    "5 bits of 32, shared": Coding(5, 32, shared=4),
    "6 bits of 32": Coding(6, 32, 32),
    "8 bits of 32": INT8,
    "8 bits of 128, zeros": Coding(8, 128, in_scales=True),
}
FEATURES, WIDTH = 70, 384


def random_weight(coding: Coding, features: int = FEATURES, width: int = WIDTH, seed: int = 0) -> QuantizedWeight:
    """A weight of random codes, with whole zeros where the coding has minima in scales, and others elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    shape = features, width // coding.group
    codes = torch.randint(0, 1 << coding.bits, (features, width), dtype=torch.uint8, generator=generator)
    if coding.shared:
        numbers = torch.randint(0, 63, (2, *shape), dtype=torch.int8, generator=generator)
        units = (torch.rand(features, shape[1] // coding.shared, 2, generator=generator) * 1e-4).half()
        return QuantizedWeight(coding, codes, numbers[0], -numbers[1], units)
    scales = (torch.rand(shape, generator=generator) * 0.01 + 0.001).half()
    if coding.zero is not None:
        return QuantizedWeight(coding, codes, scales)
    zeros = torch.randint(0, 1 << coding.bits, shape, generator=generator).half()
    minima = -zeros if coding.in_scales else -(zeros + 0.25) * scales
    return QuantizedWeight(coding, codes, scales, minima)


def rows_of(count: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def expected(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """In fp64."""
    return x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())


def products_are_those_of_the_dequantised_weight(coding: Coding) -> None:
    weight, bias = random_weight(coding), torch.linspace(-1, 1, FEATURES)
    linear, x = DeviceLinear([weight], bias, torch.float32), rows_of(5)
    exact = expected(x, weight, bias)
    bound = 1e-3 if coding.shared else 1e-5  # scales in units are rounded to fp16
    assert (linear(x) - exact).abs().max() <= bound * exact.abs().max()
    packed = linear.parts[0].weight
    assert packed.nbytes == round(weight.codes.numel() * stored_bits(coding) / 8)
    dense = packed.dequantize(0, FEATURES, torch.float32)
    torch.testing.assert_close(dense, weight.dequantize(), rtol=1e-3, atol=1e-4)


def inputs_that_fill_no_span() -> None:
    weight = random_weight(Coding(4, 32), 33, 96)
    linear, x = DeviceLinear([weight], None, torch.float32), rows_of(3, 96)
    torch.testing.assert_close(linear(x).double(), expected(x, weight), rtol=1e-3, atol=1e-3)


def inputs_in_another_order() -> None:
    plain = random_weight(Coding(4, 128, 8))
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2))
    weight = QuantizedWeight(plain.coding, plain.codes, plain.scales, order=order)
    linear, x = DeviceLinear([weight], None, torch.float32), rows_of(2)
    torch.testing.assert_close(linear(x).double(), expected(x, weight), rtol=1e-4, atol=1e-4)


def many_rows_are_multiplied_by_a_scratch_tensor() -> None:
    weight, bias = random_weight(Coding(4, 128, 8), 200), torch.linspace(-1, 1, 200)
    linear, x = DeviceLinear([weight], bias, torch.float32), rows_of(9)
    with patch.multiple(quantized_linear, LARGEST_TILED=4, SCRATCH_BYTES=128 * WIDTH * 4):
        torch.testing.assert_close(linear(x).double(), expected(x, weight, bias), rtol=1e-4, atol=1e-4)


def a_fused_layer_equals_its_parts() -> None:
    """The layer has two codings, one that only a tensor can represent, and a tensor."""
    pieces = [random_weight(INT4, 40), random_weight(INT8, 30), random_weight(Coding(6, 16, 32), 8), rows_of(5)]
    linear, x, bias = DeviceLinear(pieces, torch.arange(83.0), torch.float32), rows_of(3), torch.arange(83.0)
    dense = torch.cat([piece if isinstance(piece, Tensor) else piece.dequantize() for piece in pieces])
    torch.testing.assert_close(linear(x), x @ dense.T + bias, rtol=2e-3, atol=2e-3)
    assert linear(x[:0]).shape == (0, 83)


def a_group_of_equal_weights_keeps_them() -> None:
    weight = quantize(torch.tensor([0.0, 0.37, -2.0])[:, None].expand(3, 32).contiguous(), INT4)
    assert torch.equal(pack(weight).dequantize(0, 3, torch.float32), weight.dequantize())


def an_embedding_looks_rows_up() -> None:
    weight, ids = random_weight(INT8), torch.tensor([3, 69, 0, 3], dtype=torch.int32)
    packed = pack(weight)
    out = torch.empty(4, WIDTH)
    assert DeviceEmbedding(packed, torch.float32)(ids, out) is out
    torch.testing.assert_close(out, weight.dequantize()[ids.long()], rtol=1e-6, atol=1e-7)


def as_on_gpu(table: tuple[forms.Form, ...]) -> tuple[forms.Form, ...]:
    """Return the table of forms with the row of a GPU's codes first, for all codes on any device."""
    [row] = [form for form in table if form.name == "codes on a GPU"]
    return (replace(row, fits=lambda stored: stored.coding is not None), *table)


def the_tables_make_a_device_layer_and_shares_tied_embeddings() -> None:
    weight, x = random_weight(INT8), rows_of(2)
    tables = as_on_gpu(forms.FORMS), as_on_gpu(forms.EMBEDDING_FORMS)
    with patch.multiple(forms, FORMS=tables[0], EMBEDDING_FORMS=tables[1]):
        head = make_linear(weight, dtype=torch.float32)
        embeddings = [make_embedding(weight, head, torch.float32, tied=tied) for tied in (True, False)]
    assert isinstance(head, DeviceLinear)
    assert [embedding.weight is head.parts[0].weight for embedding in embeddings] == [True, False]
    torch.testing.assert_close(head(x).double(), expected(x, weight), rtol=1e-4, atol=1e-4)


def sick_rows_harm_no_other() -> None:
    linear, x = DeviceLinear([random_weight(INT4)], None, torch.float32), rows_of(6)
    well = linear(x)
    x[2, 5], x[4] = float("nan"), float("inf")
    found, healthy = linear(x), [0, 1, 3, 5]
    assert torch.equal(found[healthy], well[healthy])
    assert not found[[2, 4]].isfinite().any()


def a_row_has_the_same_bits_in_tiles_of_any_height(dtype: torch.dtype) -> None:
    linear, x = DeviceLinear([random_weight(Coding(4, 64))], None, dtype), rows_of(70, dtype=dtype)
    with tensor_cores():
        among = linear(x)
        for rows in (1, 9, 20):
            assert torch.equal(linear(x[3 : 3 + rows]), among[3 : 3 + rows])


def error_is_that_of_a_dense_weight(dtype: torch.dtype) -> None:
    weight, x = random_weight(INT4), rows_of(20, dtype=dtype)
    linear = DeviceLinear([weight], None, dtype)
    with tensor_cores():
        assert_error_within_twice(linear(x), x @ weight.dequantize(dtype).T, expected(x, weight).float())


QUANTIZED_CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"quantised: {name}": (lambda coding=coding: products_are_those_of_the_dequantised_weight(coding))
        for name, coding in CODINGS.items()
    },
    **{
        f"quantised: {check.__name__}, {dtype}": (lambda check=check, dtype=dtype: check(dtype))
        for check in (a_row_has_the_same_bits_in_tiles_of_any_height, error_is_that_of_a_dense_weight)
        for dtype in (torch.bfloat16, torch.float16)
    },
    **{
        f"quantised: {check.__name__}": check
        for check in (
            inputs_that_fill_no_span,
            inputs_in_another_order,
            many_rows_are_multiplied_by_a_scratch_tensor,
            a_fused_layer_equals_its_parts,
            a_group_of_equal_weights_keeps_them,
            an_embedding_looks_rows_up,
            the_tables_make_a_device_layer_and_shares_tied_embeddings,
            sick_rows_harm_no_other,
        )
    },
}
