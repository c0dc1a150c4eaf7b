"""What linear layers in FP8 must satisfy, as functions run under the interpreter with torch's products for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from interpreter_numbers import tensor_cores
from torch import Tensor

from lora_kernels.fp8 import Fp8Weight, quantize_fp8
from lora_kernels.gpu.coded_rows import code_rows
from lora_kernels.gpu.fp8_linear import Fp8Part
from lora_kernels.gpu.quantized_linear import DeviceLinear

BF16, FEATURES, WIDTH = torch.bfloat16, 48, 5000 // 16 * 16
CODE = 2.0**-4
"""Largest relative error of a number in e4m3, whose mantissa has three bits, unless it is tiny."""


def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`torch._scaled_mm`, which torch before 2.13 does not have for rows on a CPU."""
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def rows_of(count: int) -> Tensor:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return (x * torch.arange(1, count + 1)[:, None]).to(BF16)


def fp8_weight(features: int = FEATURES, seed: int = 0) -> Fp8Weight:
    return quantize_fp8(torch.randn(features, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5)


def products(*weights: Any, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    linear = DeviceLinear(weights, bias, BF16)

    def run(x: Tensor) -> Tensor:
        has_rows = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
        with tensor_cores(), patch.object(torch, "_scaled_mm", torch._scaled_mm if has_rows else multiply):
            return linear(x)

    return run


def code(x: Tensor) -> tuple[Tensor, Tensor]:
    with tensor_cores():
        return code_rows(x, torch.float8_e4m3fn)


def rows_are_coded_with_their_own_scale() -> None:
    x = rows_of(3)
    codes, scales = code(x)
    torch.testing.assert_close(scales, x.float().abs().amax(1, keepdim=True) / 448)
    off = (codes.float() * scales - x.float()).abs()
    assert (off <= CODE * x.float().abs() + scales * 2.0**-9).all()
    assert code(x[:0])[0].shape == (0, WIDTH)


def products_are_those_of_the_codes() -> None:
    weight, x, bias = fp8_weight(), rows_of(4), torch.linspace(-3, 3, FEATURES).to(BF16)
    codes, scales = code(x)
    exact = (codes.double() * scales) @ weight.dequantize().double().T + bias.double()
    off = (products(weight, bias=bias)(x).double() - exact).abs()
    assert (off <= 2.0**-7 * exact.abs() + 0.05).all()
    plain = x.double() @ weight.dequantize().double().T + bias.double()
    assert 0.01 < (exact - plain).norm() / plain.norm() < 0.04, "activations have been coded"


def pieces_are_stacked_or_dequantised() -> None:
    """One of the pieces has too odd a shape for FP8 products, and one is a tensor."""
    pieces, x = [fp8_weight(), fp8_weight(9, seed=1), rows_of(2)], rows_of(3)
    found = products(*pieces)(x).float()
    plain = torch.cat([piece if isinstance(piece, Tensor) else piece.dequantize() for piece in pieces])
    expected = x.float() @ plain.float().T
    assert isinstance(DeviceLinear(pieces, None, BF16).parts[0], Fp8Part)
    assert (found - expected).norm() < 0.03 * expected.norm()
    torch.testing.assert_close(
        found[:, FEATURES : FEATURES + 9], expected[:, FEATURES : FEATURES + 9], rtol=0.02, atol=0.1
    )


def sick_rows_harm_no_other() -> None:
    run, x = products(fp8_weight()), rows_of(5)
    well = run(x)
    x[1], x[2, 7], x[4, 7] = 0.0, float("nan"), float("inf")
    found = run(x)
    assert torch.equal(found[[0, 3]], well[[0, 3]])
    assert (found[1] == 0).all()
    assert not found[[2, 4]].isfinite().any()


FP8_CHECKS: dict[str, Callable[[], None]] = {
    f"fp8: {check.__name__}": check
    for check in (
        rows_are_coded_with_their_own_scale,
        products_are_those_of_the_codes,
        pieces_are_stacked_or_dequantised,
        sick_rows_harm_no_other,
    )
}
