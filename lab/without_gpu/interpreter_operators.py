"""Operators of Triton's interpreter for the operands that most of them have: numbers of one type or integers of two go
straight to numpy, in place of some thirty calls. No result changes."""

from __future__ import annotations

from collections.abc import Callable, Container
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
FLOATS = frozenset(("fp32",))


def _divide_integers(left: Any, right: Any) -> Any:
    """Divide towards zero, as the interpreter does."""
    return (left - np.fmod(left, right)) // right


ARITHMETIC: dict[str, Operator] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
DIVISIONS: dict[str, tuple[Operator, frozenset[str]]] = {
    "floordiv": (_divide_integers, OFFSETS),
    "mod": (np.fmod, OFFSETS),
    "truediv": (np.divide, FLOATS),
}
"""What divides numbers of some types."""
COMPARISONS: dict[str, Operator] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_new: Callable[[type], Any] = object.__new__
_blocks: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
_of_one_number = core.tuple([]), core.constexpr(1)
"""Shape and number of elements of a tensor that is no block."""


def quicken_operators() -> None:
    """Change the operators of tensors in this process for good, once the interpreter has replaced Triton's own."""
    for name, operate in ARITHMETIC.items():
        replace(core.tensor, f"__{name}__", partial(_of_numbers, operate, None))
        replace(core.tensor, f"__r{name}__", partial(_of_numbers, _swapped(operate), None))
    for name, (operate, types) in DIVISIONS.items():
        replace(core.tensor, f"__{name}__", partial(_of_numbers, operate, None, types=types))
    replace(core.tensor, "__add__", _of_pointers)
    for name, operate in COMPARISONS.items():
        replace(core.tensor, f"__{name}__", partial(_of_numbers, operate, core.int1))
    replace(core.tensor, "__and__", _of_masks)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of `owner` with what `make` makes of it. Its attribute `slow` is the interpreter's own."""
    before = getattr(owner, name)
    quick: Any = make(before)
    quick.slow = getattr(before, "slow", before)
    setattr(owner, name, quick)


def _swapped(operate: Operator) -> Operator:
    return lambda left, right: operate(right, left)


def _of_numbers(
    operate: Operator, element: Any, slow: Operator, types: Container[str] = frozenset(NUMBERS)
) -> Operator:
    """`element`: type of the result's elements. None means that they have the operands' type, which is one of
    `types`."""

    def operator(left: Any, right: Any) -> Any:
        name = left.dtype.name
        other = operand(name, right) if name in types else None
        if other is not None:
            data = operate(left.handle.data, other)
            return tensor_of(data, left.handle.dtype.scalar, element or left.dtype, left, right)
        if name in OFFSETS and name in types and type(right) is core.tensor and right.dtype.name in OFFSETS:
            wide = left if name == "int64" else right
            data = operate(left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
            return tensor_of(data, wide.handle.dtype.scalar, element or wide.dtype, left, right)
        return slow(left, right)

    return operator


def operand(name: str, value: Any) -> Any:
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
        offset = _offset(right) if left.dtype.is_ptr() else None
        if offset is None:
            return otherwise(left, right)
        size = max(1, left.handle.get_element_ty().primitive_bitwidth // 8)
        data = left.handle.data + size * offset
        return tensor_of(data, left.handle.dtype.scalar, left.dtype, left, right)

    return add


def _offset(value: Any) -> Any:
    """Return what numpy adds to pointers to elements of one byte; None if the interpreter has to say."""
    if type(value) is core.tensor:
        return value.handle.data.astype(np.uint64) if value.dtype.name in OFFSETS else None
    number = value.value if type(value) is core.constexpr else value
    return np.uint64(number) if type(number) is int and 0 <= number < 1 << 31 else None


def _of_masks(slow: Operator) -> Operator:
    def both(left: Any, right: Any) -> Any:
        if type(right) is not core.tensor or not left.dtype.name == right.dtype.name == "int1":
            return slow(left, right)
        data = np.logical_and(left.handle.data, right.handle.data)
        return tensor_of(data, left.handle.dtype.scalar, core.int1, left, right)

    return both


def tensor_of(data: Any, stored: Any, element: Any, *operands: Any) -> Any:
    """Return the tensor of a result: a block if an operand is one. `stored` is what the interpreter notes as the type
    of the array."""
    for given in operands:
        if type(given) is core.tensor and type(given.type) is core.block_type:
            return block_tensor(data, stored, element)
    return _made(data, stored, element, (element, *_of_one_number))


def block_tensor(data: Any, stored: Any, element: Any) -> Any:
    """Return a block of `element`, of the array's shape. Blocks of one element and shape share their type."""
    key = element.name, getattr(element, "address_space", ""), data.shape
    facts = _blocks.get(key)
    if facts is None:
        kind = core.block_type(element, list(data.shape))
        like = core.tensor(TensorHandle(data, stored), kind)
        facts = _blocks[key] = kind, like.shape, like.numel
    return _made(data, stored, element, facts)


def _made(data: Any, stored: Any, element: Any, facts: tuple[Any, Any, Any]) -> Any:
    """Return a tensor as its class would make it, which for each one would check that the array's numbers are no wider
    than `stored`. `facts`: its type, shape, and number of elements."""
    handle, made = _new(TensorHandle), _new(core.tensor)
    handle.data, handle.dtype, handle.attr = data, stored, {}
    made.handle, made.dtype = handle, element
    made.type, made.shape, made.numel = facts
    return made
