"""Operators of Triton's interpreter for the operands that most of them have. No result changes.

For `a + b` the interpreter calls some thirty functions that find out which types the operands, the sum and its
elements have, and makes an array of each number. Here the usual operands, which have one type of numbers, go straight
to numpy; all others take the interpreter's way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime.interpreter import TensorHandle

Operator = Callable[[Any, Any], Any]

NUMBERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "fp32": (np.float32, 1 << 24),
    "int32": (np.int32, 1 << 31),
    "int64": (np.int64, 1 << 63),
}
"""Types of numbers: what makes one of an integer, and a bound of those that it holds exactly."""
OFFSETS = frozenset(("int32", "int64"))
ARITHMETIC: dict[str, Operator] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS: dict[str, Operator] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_blocks: dict[tuple[Any, ...], Any] = {}


def quicken_operators() -> None:
    """Change the operators of tensors in this process for good, once the interpreter has replaced Triton's own."""
    for name, operate in ARITHMETIC.items():
        _replace(f"__{name}__", partial(_of_numbers, operate, None))
        _replace(f"__r{name}__", partial(_of_numbers, _swapped(operate), None))
    _replace("__add__", _of_pointers)
    for name, operate in COMPARISONS.items():
        _replace(f"__{name}__", partial(_of_numbers, operate, core.int1))
    _replace("__and__", _of_masks)


def _replace(name: str, make: Callable[[Operator], Operator]) -> None:
    before = getattr(core.tensor, name)
    quick: Any = make(before)
    quick.slow = getattr(before, "slow", before)
    setattr(core.tensor, name, quick)


def _swapped(operate: Operator) -> Operator:
    return lambda left, right: operate(right, left)


def _of_numbers(operate: Operator, element: Any, slow: Operator) -> Operator:
    """`element`: type of the result's elements. None means that they have the operands' type."""

    def operator(left: Any, right: Any) -> Any:
        other = _operand(left.dtype.name, right)
        if other is None:
            return slow(left, right)
        data = operate(left.handle.data, other)
        return _tensor(data, left.handle.dtype.scalar, element or left.dtype, left, right)

    return operator


def _operand(name: str, value: Any) -> Any:
    """Return what numpy takes for a value of the type of numbers called `name`; None if it is another or none."""
    if name not in NUMBERS:
        return None
    kind = type(value)
    if kind is core.constexpr:
        value = value.value
        kind = type(value)
    if kind is core.tensor:
        return value.handle.data if value.dtype.name == name else None
    number, bound = NUMBERS[name]
    if kind is int:
        return number(value) if -bound < value < bound else None
    return number(value) if kind is float and name == "fp32" else None


def _of_pointers(otherwise: Operator) -> Operator:
    def add(left: Any, right: Any) -> Any:
        if not left.dtype.is_ptr() or type(right) is not core.tensor or right.dtype.name not in OFFSETS:
            return otherwise(left, right)
        size = max(1, left.handle.get_element_ty().primitive_bitwidth // 8)
        data = left.handle.data + size * right.handle.data.astype(np.uint64)
        return _tensor(data, left.handle.dtype.scalar, left.dtype, left, right)

    return add


def _of_masks(slow: Operator) -> Operator:
    def both(left: Any, right: Any) -> Any:
        if type(right) is not core.tensor or not left.dtype.name == right.dtype.name == "int1":
            return slow(left, right)
        data = np.logical_and(left.handle.data, right.handle.data)
        return _tensor(data, left.handle.dtype.scalar, core.int1, left, right)

    return both


def _tensor(data: Any, stored: Any, element: Any, left: Any, right: Any) -> Any:
    """Return the tensor of a result: a block if an operand is one. `stored` is what the interpreter notes as the type
    of the array."""
    kind = element
    if left.type.is_block() or (type(right) is core.tensor and right.type.is_block()):
        key = element.name, getattr(element, "address_space", ""), data.shape
        kind = _blocks.get(key)
        if kind is None:
            kind = _blocks[key] = core.block_type(element, list(data.shape))
    return core.tensor(TensorHandle(data, stored), kind)
