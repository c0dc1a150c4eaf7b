"""What linear layers in INT8 must satisfy, as functions run under the interpreter with torch's sums for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from interpreter_numbers import tensor_cores
from torch import Tensor

from lora_kernels.gpu import int8_linear
from lora_kernels.gpu.coded_rows import code_rows
from lora_kernels.gpu.int8_linear import LEAST_ROWS, Int8Part
from lora_kernels.gpu.quantized_linear import DeviceLinear, QuantizedPart
from lora_kernels.gpu.quantized_weights import stored_bits
from lora_kernels.quantized import Coding, QuantizedWeight

BY_ROWS = Coding(8, 128, 128, by_rows=True)
FEATURES, WIDTH = 48, 384
BF16 = torch.bfloat16


def weight_of(features: int = FEATURES) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (features, WIDTH), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(features, 1, generator=generator) * 1e-3 + 1e-4).half()
    return QuantizedWeight(BY_ROWS, codes, scales.expand(-1, WIDTH // 128).contiguous())


def rows_of(count: int) -> Tensor:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return (x * torch.arange(1, count + 1)[:, None]).to(BF16)


def products_are_those_of_the_codes() -> None:
    weight, bias = weight_of(), torch.linspace(-1, 1, FEATURES).to(BF16)
    linear = DeviceLinear([weight], bias, BF16)
    assert isinstance(linear.parts[0], Int8Part)
    assert stored_bits(BY_ROWS) == 8
    for count in (3, LEAST_ROWS + 4):
        x = rows_of(count)
        codes, scales = code_rows(x, torch.int8)
        assert (codes.abs().amax(1) == 127).all()
        assert ((codes * scales - x.float()).abs() <= scales * 0.501).all()
        exact = (codes.double() * scales) @ weight.dequantize().double().T + bias.double()
        with tensor_cores():
            found = linear(x)
        assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    assert linear(rows_of(0)).shape == (0, FEATURES)


def sums_are_made_piece_by_piece() -> None:
    linear, x = DeviceLinear([weight_of(2048)], None, BF16), rows_of(2)
    whole = linear(x)
    with patch.object(int8_linear, "SUMS_BYTES", 1):
        assert torch.equal(linear(x), whole)


def other_shapes_keep_activations_as_they_are() -> None:
    assert isinstance(DeviceLinear([weight_of(9)], None, BF16).parts[0], QuantizedPart)


def sick_rows_harm_no_other() -> None:
    linear, x = DeviceLinear([weight_of()], None, BF16), rows_of(5)
    well = linear(x)
    x[1], x[2, 7], x[4, 7] = 0.0, float("nan"), float("inf")
    found = linear(x)
    assert torch.equal(found[[0, 3]], well[[0, 3]])
    assert (found[1] == 0).all()
    assert found[[2, 4]].isnan().all()


INT8_CHECKS: dict[str, Callable[[], None]] = {
    f"int8: {check.__name__}": check
    for check in (
        products_are_those_of_the_codes,
        sums_are_made_piece_by_piece,
        other_shapes_keep_activations_as_they_are,
        sick_rows_harm_no_other,
    )
}
