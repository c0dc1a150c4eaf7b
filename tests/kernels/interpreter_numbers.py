"""Triton's interpreter with the arithmetic of tensor cores.

It multiplies bf16 as if its bits were integers, cuts fp32 off where a GPU rounds it to bf16 or e4m3, and leaves the
order of a product's sums to BLAS, which takes another for another shape. Here every element of a product is a function
of its own row and column alone, summed in the order of the inner dimension, as one instruction after the other does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._convert_float


def round_to_nearest(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """`_convert_float`: bits of the converted numbers."""
    if (source, target) == (tl.float32, tl.bfloat16):
        bits = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16)
    if (source, target) == (tl.float32, tl.float8e4nv):
        numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return convert(values, source, target, mode)


def operand(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def multiply(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """`InterpreterBuilder.create_dot`."""
    left, right, total = operand(a), operand(b), d.data.astype(np.float32)
    with np.errstate(all="ignore"):
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k : k + 1]
    return interpreter.TensorHandle(total, d.dtype.scalar)


@contextmanager
def tensor_cores() -> Iterator[None]:
    with (
        patch.object(interpreter, "_convert_float", round_to_nearest),
        patch.object(interpreter.InterpreterBuilder, "create_dot", multiply),
    ):
        yield
