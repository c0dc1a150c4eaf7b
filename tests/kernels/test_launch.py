"""Launches that are kept give the driver what Triton's own launches give it, for any arguments."""

import logging
from itertools import product
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from all_launches import all_kernels, launch_all
from triton import knobs

from lab.without_gpu.pretended_cuda import can_pretend, pretend
from lora_kernels.gpu import launch
from lora_kernels.gpu.launch import Launcher, with_constants

pytestmark = pytest.mark.skipif(not can_pretend(), reason="needs a C compiler, and no GPU")


@triton.jit(do_not_specialize=["free", "free_ptr"])
def copy_kernel(x_ptr, free_ptr, stride, free, scale, BLOCK: tl.constexpr, PLUS: tl.constexpr = 0):  # noqa: N803
    i = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, (tl.load(free_ptr + i + free) * scale + PLUS).to(x_ptr.dtype.element_ty))


@triton.jit
def constant_first_kernel(BLOCK: tl.constexpr, x_ptr):  # noqa: N803
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@pytest.fixture
def cuda(triton_cache):
    with pretend(triton_cache) as cuda:
        yield cuda


def facts(launches):
    """Everything about launches but whether they compiled something."""
    return [
        (each.kernel, each.grid, each.options, each.signature, each.constants, each.attributes, each.values)
        for each in launches
    ]


def arguments():
    """Arguments of `copy_kernel` that differ in dtype, alignment, divisibility by 16, being 1, or size."""
    x, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    pointers = [x, x[1:], x[4:], half, half[1:], x.int()]
    numbers = [0, 1, 2, 16, 17, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**40, -(2**31), -(2**31) - 1]
    yield from ((x, free_ptr, 16, 3, 0.5) for free_ptr in pointers)
    yield from ((pointer, half, 16, 3, 0.5) for pointer in pointers)
    yield from ((x, x, stride, 3, 0.5) for stride in numbers)
    yield from ((x, x, 16, free, 0.5) for free in numbers)
    yield from ((x[1:], x, stride, free, scale) for stride, free, scale in product((1, 32), (1, 2**33), (0.0, 1.0)))


def test_the_driver_gets_what_triton_would_give_it(cuda):
    """Each of these arguments is launched by Triton, then twice with every other one between."""
    kernel, cases = with_constants(copy_kernel, BLOCK=16, PLUS=2), list(arguments())
    for case in cases:
        kernel.launch_by_triton((3, 2), *case)
    expected, kept = facts(cuda.launches), cuda.record()
    for order in (cases, cases[::-1], cases):
        for case in order:
            kernel((3, 2), *case)
    assert facts(kept) == expected + expected[::-1] + expected
    assert len({repr(each[3:6]) for each in expected}) > 15, "the cases are compiled as so many kernels"
    assert not any(each.compiled for each in kept)


def test_only_the_first_launch_is_by_triton(cuda):
    kernel, x = Launcher(copy_kernel, {"BLOCK": 16}), torch.zeros(64)
    with patch.object(copy_kernel, "run", wraps=copy_kernel.run) as run:
        for _ in range(3):
            kernel((5,), x, x, 16, 3, 0.5)
            kernel((5,), x[1:], x, 16, 3, 0.5)
        assert run.call_count == 2
    assert len(cuda.launches) == 6


@pytest.mark.parametrize(("one", "other"), [({"PLUS": 0}, {"PLUS": 1}), ({}, {"PLUS": 1}), ({}, {"num_warps": 8})])
def test_constants_and_options_are_told_apart(cuda, one, other):
    x = torch.zeros(64)
    for constants in (one, other) * 2:
        with_constants(copy_kernel, BLOCK=32, **constants)((1,), x, x, 16, 3, 0.5)
    first, second, third, fourth = cuda.launches
    assert [each.compiled for each in cuda.launches] == [True, True, False, False]
    assert (first.constants, second.constants) == (third.constants, fourth.constants)
    assert first.constants[6,] == one.get("PLUS", 0) and second.constants[6,] == other.get("PLUS", 0)


def test_constants_that_are_equal_but_of_other_types_are_told_apart():
    kernels = [with_constants(copy_kernel, BLOCK=16, PLUS=plus) for plus in (1, True, 1.0, 1)]
    assert kernels[0] is kernels[3]
    assert len(set(map(id, kernels))) == 3


def test_another_device_has_kernels_of_its_own(tmp_path):
    kernel, x = Launcher(copy_kernel, {"BLOCK": 16}), torch.zeros(64)
    for capability in (80, 90):
        with pretend(tmp_path, capability) as cuda:
            kernel((1,), x, x, 16, 3, 0.5)
            assert cuda.compiled == ["copy_kernel"]


@pytest.mark.parametrize("odd", [True, None, triton.reinterpret(torch.zeros(64, dtype=torch.int32), tl.uint32)])
def test_arguments_of_other_kinds_are_launched_by_triton(cuda, odd):
    kernel, x = Launcher(copy_kernel, {"BLOCK": 16}), torch.zeros(64)
    case = (x, x, 16, odd, 0.5) if odd is True else (x, x if odd is None else odd, 16, 3, 0.5)
    if odd is None:
        case = (x, x, 16, 3, None)
    with patch.object(kernel, "launch_by_triton") as by_triton:
        kernel((1,), *case)
    by_triton.assert_called_once()


def test_kernels_whose_constants_come_first_are_launched_by_triton(cuda):
    kernel, x = Launcher(constant_first_kernel, {"BLOCK": 16}), torch.zeros(64)
    with patch.object(kernel, "launch_by_triton") as by_triton:
        kernel((1,), x)
    by_triton.assert_called_once()


def test_what_is_kept_is_bounded(cuda, monkeypatch):
    monkeypatch.setattr(launch, "MOST_KEYS", 3)
    kernel, x = Launcher(copy_kernel, {"BLOCK": 16}), torch.zeros(64)
    for stride in range(16, 16 * 12, 16):
        kernel((1,), x, x, stride, 3, 0.5)
        assert len(kernel._ready) <= 3
    assert [int.from_bytes(each.values[2], "little") for each in cuda.launches] == list(range(16, 16 * 12, 16))


def test_a_profiler_sees_each_launch(cuda):
    kernel, x, seen = Launcher(copy_kernel, {"BLOCK": 16}), torch.zeros(64), []

    def enter(metadata):
        seen.append(metadata.get()["name"])

    kernel((1,), x, x, 16, 3, 0.5)
    knobs.runtime.launch_enter_hook.add(enter)
    try:
        kernel((1,), x, x, 16, 3, 0.5)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    kernel((1,), x, x, 16, 3, 0.5)
    assert seen == ["copy_kernel"]
    assert len(cuda.launches) == 3


def test_an_unknown_triton_launches_itself_and_this_is_logged_once(cuda, monkeypatch, caplog):
    monkeypatch.setattr(launch, "FORM", None)
    monkeypatch.setattr(launch, "_launchers", {})
    x = torch.zeros(64)
    with caplog.at_level(logging.WARNING), patch.object(copy_kernel, "run", wraps=copy_kernel.run) as run:
        for plus in (0, 1, 0):
            with_constants(copy_kernel, BLOCK=16, PLUS=plus)((1,), x, x, 16, 3, 0.5)
        assert run.call_count == 3
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"Triton {triton.__version__} is not known"
    ]


def test_every_kernel_is_launched_directly_with_what_triton_would_give(triton_cache):
    pairs, direct = [], Launcher.__call__

    def both(self, grid, *args):
        for _ in range(2):
            direct(self, grid, *args)
        assert self._ready, f"{self._kernel.__name__} is launched by Triton"
        self.launch_by_triton(grid, *args)
        pairs.append(facts(cuda.launches[-2:]))

    with pretend(triton_cache) as cuda, patch.object(Launcher, "__call__", both):
        launch_all(fp8=True)
    assert {kept[0] for kept, _ in pairs} == all_kernels()
    assert {kept[0] for kept, _ in pairs if kept[2]} == {"shrink_kernel", "expand_kernel"}, "these begin early"
    for kept, own in pairs:
        assert kept == own
