"""Section A: linear layers of quantised weights at the 8B shape, against products of the dequantised weight in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarks.gpu.exact import BY_ROWS, inputs, random_fp8, random_weight, relative_error
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import groups_of, model_dtype, model_spec
from lora_kernels.forms import multiplies_fp8
from lora_kernels.fp8 import Fp8Weight
from lora_kernels.gpu.coded_rows import code_rows
from lora_kernels.gpu.quantized_linear import DeviceEmbedding, DeviceLinear
from lora_kernels.gpu.quantized_weights import pack
from lora_kernels.quantized import INT4, INT8, Coding, QuantizedWeight

Check = Callable[[], float | None]
"""Returns a relative error, or None if bits were compared. Raises AssertionError if the check fails."""
LEAST_S = 2.0
TABLE = "quantised weights at the 8B shape"
CODINGS = {
    "4 bits of 128": Coding(4, 128, 8),
    "4 bits of 128, zeros": Coding(4, 128, in_scales=True),
    "int4": INT4,
    "int8": INT8,
}
ROWS = (1, 16, 64, 200, 300)


def run(journal: Journal) -> None:
    for name, check in quantized_checks(journal.tiny, torch.device(journal.device)):
        with journal.case(name, LEAST_S):
            journal.row(TABLE, name, **{"relative error": check()})


def quantized_checks(tiny: bool, device: torch.device) -> Iterator[tuple[str, Check]]:
    """Yield (name, check): of all codings' products in each group of the model, of embeddings, bits and graphs."""
    dtype, rows = model_dtype(tiny), (1, 3) if tiny else ROWS
    shapes = {group.name: (sum(group.out_features), group.in_features) for group in groups_of(model_spec(tiny))}
    if tiny:
        shapes = {"o": (130, 256)}
    for form, coding in CODINGS.items():
        for name, shape in shapes.items():
            weight = random_weight(coding, shape, device)
            yield f"{form}, {name}", partial(check_products, weight, rows, dtype)
        yield f"{form}, embedding", partial(check_embedding, weight, dtype)
        yield f"{form}, bits of a row", partial(check_bits, weight, rows[:-1], dtype)
        if device.type == "cuda":
            yield f"{form}, replayed", partial(check_replay, weight, dtype)
    if device.type == "cuda":
        for name, shape in shapes.items():
            weight = random_weight(BY_ROWS, shape, device)
            yield f"int8 by rows, {name}", partial(check_int8, weight, rows, dtype)
        yield "int8 by rows, bits of a row", partial(check_bits, weight, rows, dtype)
        yield "int8 by rows, replayed", partial(check_replay, weight, dtype)
    yield from fp8_checks(shapes, rows, dtype, device)


def fp8_checks(
    shapes: Mapping[str, tuple[int, int]], rows: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Check]]:
    """Yield (name, check) of linear layers in FP8, on a GPU that has products of FP8."""
    if not multiplies_fp8(device, dtype):
        return
    for name, shape in shapes.items():
        weight = random_fp8(shape, device)
        yield f"fp8, {name}", partial(check_fp8, weight, rows, dtype)
    yield "fp8, replayed", partial(check_replay, weight, dtype)


def check_fp8(weight: Fp8Weight, rows: Sequence[int], dtype: torch.dtype) -> float:
    return check_coded(weight, rows, dtype, torch.float8_e4m3fn, 2.0**-4, 2.0**-9)


def check_int8(weight: QuantizedWeight, rows: Sequence[int], dtype: torch.dtype) -> float:
    return check_coded(weight, rows, dtype, torch.int8, 0.0, 0.501)


def check_coded(
    weight: Fp8Weight | QuantizedWeight,
    rows: Sequence[int],
    dtype: torch.dtype,
    codes_dtype: torch.dtype,
    rtol: float,
    atol: float,
) -> float:
    """Return the largest relative error over numbers of rows, of products of activations as they are coded. `rtol`, and
    `atol` in scales of a row, bound the error of a coded activation."""
    linear, exact, errors = DeviceLinear([weight], None, dtype), weight.dequantize(), []
    for count in rows:
        x = inputs(count, weight.shape[1], dtype, weight.device)
        codes, scales = code_rows(x, codes_dtype)
        coded = codes.float() * scales
        assert ((coded - x.float()).abs() <= rtol * x.float().abs() + atol * scales).all(), (
            "activations are coded wrong"
        )
        errors.append(relative_error(linear(x), coded @ exact.T, dtype))
    return max(errors)


def check_products(weight: QuantizedWeight, rows: tuple[int, ...], dtype: torch.dtype) -> float:
    """Return the largest relative error over numbers of rows."""
    linear, exact, device = DeviceLinear([weight], None, dtype), weight.dequantize(), weight.codes.device
    errors = []
    for count in rows:
        x = inputs(count, weight.shape[1], dtype, device)
        errors.append(relative_error(linear(x), x.float() @ exact.T, dtype))
    return max(errors)


def check_embedding(weight: QuantizedWeight, dtype: torch.dtype) -> float:
    ids = torch.tensor([0, 5, weight.shape[0] - 1, 5], device=weight.codes.device)
    return relative_error(DeviceEmbedding(pack(weight), dtype)(ids), weight.dequantize()[ids], dtype)


def check_bits(weight: QuantizedWeight, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that rows have the same bits in tiles of any height."""
    linear, x = DeviceLinear([weight], None, dtype), inputs(max(rows), weight.shape[1], dtype, weight.codes.device)
    among = linear(x)
    for count in rows:
        alone = linear(x[:count])
        assert torch.equal(alone, among[:count]), f"{int((alone != among[:count]).sum())} numbers differ, {count} rows"


def check_replay(weight: QuantizedWeight | Fp8Weight, dtype: torch.dtype) -> None:
    """Check that a captured layer computes other inputs right, with few rows and with many."""
    linear, device = DeviceLinear([weight], None, dtype), weight.device
    for rows in (16, 300):
        x = inputs(rows, weight.shape[1], dtype, device)
        linear(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = linear(x)
        x.mul_(-2)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, linear(x)), f"{rows} rows differ"
