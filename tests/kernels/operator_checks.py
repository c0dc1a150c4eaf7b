"""The quick operators of Triton's interpreter give what its own give. To be run under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from lab.without_gpu.interpreter_operators import ARITHMETIC, COMPARISONS, DIVISIONS

SHAPES = (None, (1,), (4,), (2, 4), (2, 1))
ELEMENTS = (tl.float32, tl.int32, tl.int64, tl.float16, tl.int1, tl.uint32, tl.pointer_type(tl.float32))
NUMBERS = (0, 3, -2, True, 1.5, float("nan"), 1 << 30, 1 << 40, (1 << 24) + 1, tl.constexpr(7), tl.constexpr(0.25))
OPERATORS = (*ARITHMETIC, *COMPARISONS, *DIVISIONS, "and")
NAMES = (*(f"__{name}__" for name in OPERATORS), *(f"__r{name}__" for name in ARITHMETIC))


def tensors(seed: int) -> list[Any]:
    generator, made = np.random.default_rng(seed), []
    for element, shape in product(ELEMENTS, SHAPES):
        data = (generator.normal(size=shape or (1,)) * 4).astype(interpreter._get_np_dtype(element))
        kind = element if shape is None else tl.block_type(element, list(shape))
        made.append(core.tensor(interpreter.TensorHandle(data, element), kind))
    return made


def outcome(function: Callable[..., Any], *given: Any) -> tuple[Any, ...] | type[Exception]:
    try:
        with np.errstate(all="ignore"):
            result = function(*given)
    except Exception as error:
        return type(error)
    handle = result.handle
    return result.type, result.shape, handle.dtype, handle.data.dtype, handle.data.shape, handle.data.tobytes()


def assert_same(owner: Any, name: str, cases: Iterable[tuple[Any, ...]]) -> None:
    """Compare a function with the interpreter's own for all cases, of which some have a result."""
    interpreter._patch_lang(assert_same)
    function, found = getattr(owner, name), 0
    for given in cases:
        quick, slow = (outcome(call, *given) for call in (function, function.slow))
        assert isinstance(quick, type) == isinstance(slow, type), given
        assert isinstance(quick, type) or quick == slow, given
        found += not isinstance(quick, type)
    assert found > 20


def results_are_the_interpreters(name: str) -> None:
    assert_same(core.tensor, name, product(tensors(1), [*tensors(2), *NUMBERS]))


OPERATOR_CHECKS: dict[str, Callable[[], None]] = {
    f"operators: {name}": partial(results_are_the_interpreters, name) for name in NAMES
}
