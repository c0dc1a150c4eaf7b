"""The quick functions of Triton's interpreter give what its own give. To be run under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from operator_checks import ELEMENTS, NUMBERS, SHAPES, assert_same, tensors
from triton.language import core
from triton.runtime import interpreter

SLICES = (None, slice(None), (slice(None), None), (None, slice(None)), (None, slice(None), None), (slice(0, 1), None))
STORED = (tl.float32, tl.float16, tl.int32, tl.int64, tl.int8, tl.int1, tl.bfloat16)
OTHERS = (None, 0, 0.0, 3, -1.5, float("-inf"), tl.constexpr(0), tl.constexpr(2.0), tl.constexpr(None))
MEMORY = np.arange(64, dtype=np.uint8)


def of_type(element: Any) -> list[Any]:
    return [tensor for tensor in tensors(3) if tensor.dtype == element]


def pointers() -> Iterator[Any]:
    """Yield pointers of every shape to the first bytes of MEMORY, by the type of what lies there."""
    for element, shape in product(STORED, SHAPES):
        size = max(1, element.primitive_bitwidth // 8)
        offsets = np.arange(int(np.prod(shape or (1,))), dtype=np.uint64).reshape(shape or (1,))
        kind = tl.pointer_type(element)
        handle = interpreter.TensorHandle(np.uint64(MEMORY.ctypes.data) + np.uint64(size) * offsets, kind)
        yield core.tensor(handle, kind if shape is None else tl.block_type(kind, list(shape)))


def loads() -> None:
    masks = [None, tl.constexpr(None), *of_type(tl.int1)]
    assert_same(tl, "load", product(pointers(), masks, OTHERS))


def stores() -> None:
    """Compare what stores leave in memory: they have no result."""

    def written(store: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            MEMORY[:] = np.arange(len(MEMORY))
            store(*given)
            data = MEMORY.copy()
            return core.tensor(interpreter.TensorHandle(data, tl.uint8), tl.block_type(tl.uint8, [len(data)]))

        return call

    interpreter._patch_lang(stores)
    quick: Any = written(tl.store)
    quick.slow = written(tl.store.slow)
    values = [*(tensor for tensor in tensors(4) if not tensor.dtype.is_ptr()), 0, 1.5]
    masks = [None, *of_type(tl.int1)]
    assert_same(SimpleNamespace(store=quick), "store", product(pointers(), values, masks))


def choices() -> None:
    conditions = [*of_type(tl.int1), *of_type(tl.int32)[:1]]
    given = [*of_type(tl.float32), *of_type(tl.int32), *of_type(tl.int64)[:2], *of_type(tl.int1)[:2], *NUMBERS]
    assert_same(tl, "where", product(conditions, given, given))


def bounds(name: str) -> None:
    assert_same(tl, name, product(tensors(1), [*tensors(2), *NUMBERS]))


def ranges() -> None:
    assert_same(tl, "arange", product((*range(9), tl.constexpr(8)), (*range(17), tl.constexpr(16), -4)))


def indices() -> None:
    assert_same(core.tensor, "__getitem__", product(tensors(1), SLICES))


def casts() -> None:
    assert_same(core.tensor, "to", product(tensors(1), (*ELEMENTS, *STORED)))


FUNCTION_CHECKS: dict[str, Callable[[], None]] = {
    "functions: load": loads,
    "functions: store": stores,
    "functions: where": choices,
    "functions: minimum": partial(bounds, "minimum"),
    "functions: maximum": partial(bounds, "maximum"),
    "functions: arange": ranges,
    "functions: index": indices,
    "functions: to": casts,
}
