"""Functions of Triton's interpreter for the arguments that most of them have, which skip finding out types. No result
changes; all but the usual arguments still take the interpreter's way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.language import core
from triton.runtime import interpreter

from lab.without_gpu.interpreter_operators import OFFSETS, Operator, block_tensor, operand, replace, tensor_of

WIDER = {("int32", "int64"): np.int64, ("int32", "fp32"): np.float32, ("fp16", "fp32"): np.float32}
"""Changes of type that are numpy's own."""
Function = Callable[..., Any]


def quicken_functions() -> None:
    """Change functions of `triton.language` in this process for good, once the interpreter has replaced Triton's."""
    replace(tl, "load", _load_quickly)
    replace(tl, "store", _store_quickly)
    replace(tl, "where", _choose_quickly)
    replace(tl, "minimum", partial(_bound_quickly, np.minimum))
    replace(tl, "maximum", partial(_bound_quickly, np.maximum))
    replace(tl, "arange", _range_quickly)
    replace(core.tensor, "__getitem__", _index_quickly)
    replace(core.tensor, "to", _cast_quickly)


def _flags(mask: Any, pointer: Any) -> Any:
    """Return a mask as an array of the pointer's shape; None if it is of another kind or shape."""
    shape = pointer.handle.data.shape
    if mask is None:
        return np.ones(shape, dtype=bool)
    if type(mask) is not core.tensor or mask.dtype.name != "int1":
        return None
    return _spread(mask, pointer)


def _spread(given: Any, pointer: Any) -> Any:
    """Return the numbers of a tensor in the pointer's shape; None if it has none that fits."""
    data, shape, is_block = given.handle.data, pointer.handle.data.shape, pointer.type.is_block()
    if given.type.is_block() != is_block:
        return None
    if data.shape == shape:
        return data
    fits = len(data.shape) == len(shape) and all(map(_spreads, data.shape, shape))
    return np.broadcast_to(data, shape) if is_block and fits else None


def _spreads(one: int, other: int) -> bool:
    return one in (1, other)


def _element(pointer: Any) -> Any:
    """Return the type of what lies at a pointer; None if it is no pointer, or one to bits."""
    if type(pointer) is not core.tensor or not pointer.dtype.is_ptr() or pointer.dtype.element_ty.name == "int1":
        return None
    return pointer.dtype.element_ty


def _load_quickly(slow: Function) -> Function:
    def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        element, value = _element(pointer), other.value if type(other) is core.constexpr else other
        is_refused = mask is None and value is not None
        flags = None if element is None or is_refused else _flags(mask, pointer)
        rest = None if flags is None else _rest(element, value, flags.shape)
        if rest is None:
            return slow(pointer, mask, other, **options)
        data = memory.load(pointer.handle.data, flags, rest, rest.dtype)
        return tensor_of(data, element, element, pointer)

    return load


def _rest(element: Any, value: Any, shape: tuple[int, ...]) -> Any:
    """Return what is in the place of elements that are not loaded; None if the interpreter has to make it."""
    if value is None or (type(value) in (int, float) and value == 0):
        return np.zeros(shape, dtype=interpreter._get_np_dtype(element))
    number = operand(element.name, value) if type(value) in (int, float) else None
    return None if number is None else np.full(shape, number)


def _store_quickly(slow: Function) -> Function:
    def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        element = _element(pointer)
        is_alike = element is not None and type(value) is core.tensor and value.dtype.name == element.name
        flags, values = (_flags(mask, pointer), _spread(value, pointer)) if is_alike else (None, None)
        if flags is None or values is None:
            return slow(pointer, value, mask, **options)
        return memory.store(pointer.handle.data, values, flags)

    return store


def _choose_quickly(slow: Function) -> Function:
    def where(condition: Any, x: Any, y: Any) -> Any:
        given = x if type(x) is core.tensor else y
        if type(given) is core.tensor and type(condition) is core.tensor and condition.dtype.name == "int1":
            first, second = (operand(given.dtype.name, value) for value in (x, y))
            if first is not None and second is not None:
                data = np.where(condition.handle.data, first, second)
                return tensor_of(data, given.handle.dtype.scalar, given.dtype, condition, x, y)
        return slow(condition, x, y)

    return where


def _bound_quickly(operate: Operator, slow: Function) -> Function:
    """Integers only: numbers may be no numbers."""

    def bound(x: Any, y: Any, **options: Any) -> Any:
        given = x if type(x) is core.tensor else y
        if type(given) is core.tensor and given.dtype.name in OFFSETS:
            first, second = (operand(given.dtype.name, value) for value in (x, y))
            if first is not None and second is not None:
                return tensor_of(operate(first, second), given.handle.dtype.scalar, given.dtype, x, y)
        return slow(x, y, **options)

    return bound


def _range_quickly(slow: Function) -> Function:
    """Nothing changes a tensor's numbers, so that equal ranges may be one tensor."""
    return cache(lambda start, end: slow(start, end))


def _index_quickly(slow: Function) -> Function:
    def index(tensor: Any, slices: Any) -> Any:
        """Add dimensions of one element."""
        if type(slices) is not tuple or not tensor.type.is_block() or not all(map(_is_whole, slices)):
            return slow(tensor, slices)
        return block_tensor(tensor.handle.data[slices], tensor.handle.dtype.scalar, tensor.dtype)

    return index


def _is_whole(index: Any) -> bool:
    return index is None or (type(index) is slice and index.start is index.stop is index.step is None)


def _cast_quickly(slow: Function) -> Function:
    def to(tensor: Any, dtype: Any, *options: Any, **others: Any) -> Any:
        kind = dtype.value if type(dtype) is core.constexpr else dtype
        if options or others or type(kind) is not core.dtype:
            return slow(tensor, dtype, *options, **others)
        if kind.name == tensor.dtype.name:
            return tensor
        wider = WIDER.get((tensor.dtype.name, kind.name))
        if wider is None:
            return slow(tensor, dtype)
        return tensor_of(tensor.handle.data.astype(wider), kind, kind, tensor)

    return to
