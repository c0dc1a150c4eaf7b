"""Every kernel goes through Triton's own JIT front end, compiler and launch code, with a CUDA driver that pretends."""

import ctypes
from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from all_launches import all_kernels, launch_all
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.messages.requests import SamplingParams
from engine.model.sample.device_sampler import DeviceSampler
from lab.without_gpu.pretended_cuda import can_pretend, pretend
from lora_kernels.gpu.triton_tuned import LEAST_EARLY

pytestmark = pytest.mark.skipif(not can_pretend(), reason="needs a C compiler, and no GPU")


@triton.jit(do_not_specialize=["free"])
def mixed_kernel(x_ptr, sizes, free, scale, offset: tl.constexpr):
    tl.store(x_ptr + free, scale * sizes[0] * sizes[1] + offset)


@pytest.fixture
def folder(triton_cache):
    return triton_cache


def test_a_launch_is_recorded_as_the_driver_gets_it(folder):
    x = torch.zeros(64)
    with pretend(folder) as cuda:
        mixed_kernel[(3, 2)](x, (48, 1), 5, 0.5, offset=7, num_warps=2)
        mixed_kernel[(4,)](x[1:], (48, 1), -1, 0.5, offset=7, num_warps=2)
        mixed_kernel[(4,)](x, (48, 1), 6, 0.5, offset=7, num_warps=2)
    first, unaligned, again = cuda.launches
    assert (first.kernel, first.grid) == ("mixed_kernel", (3, 2, 1))
    assert first.signature == {
        "x_ptr": "*fp32",
        "sizes": ("i32", "constexpr"),
        "free": "i32",
        "scale": "fp32",
        "offset": "constexpr",
    }
    values = (x.data_ptr().to_bytes(8, "little"), (48).to_bytes(4, "little"), (5).to_bytes(4, "little"))
    assert first.values == (*values, bytes(ctypes.c_float(0.5)))
    assert unaligned.values[0] == (x.data_ptr() + 4).to_bytes(8, "little")
    assert [launch.compiled for launch in cuda.launches] == [True, True, False]
    assert first.attributes[0,] == [["tt.divisibility", 16]] and not unaligned.attributes[0,]
    assert again.constants[4,] == 7
    assert cuda.compiled == ["mixed_kernel", "mixed_kernel"]


def test_launches_are_not_recorded_where_only_time_counts(folder):
    with pretend(folder) as cuda:
        launches = cuda.record(on=False)
        mixed_kernel[(3,)](torch.zeros(64), (48, 1), 5, 0.5, offset=7)
        assert launches == cuda.launches == []


def test_the_driver_before_is_active_afterwards(folder):
    before = triton.runtime.driver._active
    with pretend(folder) as cuda:
        assert triton.runtime.driver.active is cuda
    assert triton.runtime.driver._active is before


@pytest.mark.parametrize(("capability", "fp8"), [pytest.param(80, False, marks=pytest.mark.nightly), (90, True)])
def test_every_kernel_goes_through_the_jit_front_end(folder, capability, fp8):
    with pretend(folder, capability) as cuda:
        launch_all(fp8=fp8, early=capability >= LEAST_EARLY)
    assert {launch.kernel for launch in cuda.launches} == all_kernels() == set(cuda.compiled)


class Copies(TorchDispatchMode):
    """Notes the addresses that tensors are copied to."""

    def __init__(self):
        super().__init__()
        self.targets = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.targets.append(args[0].data_ptr())
        return function(*args, **(kwargs or {}))


def test_sampled_tokens_are_stored_in_host_memory_and_not_copied(folder):
    sampler, logits = DeviceSampler(300, torch.device("cpu"), max_seqs=2), torch.zeros(2, 300)
    for name in "ab":
        sampler.add(name, SamplingParams(temperature=0.0), [1, 2], 2)
    addresses = Counter()
    with pretend(folder) as cuda:
        for _ in range(5):
            cuda.record()
            with Copies() as copies:
                step = sampler.start(logits, ("a", "b"))
            choose = cuda.launches[-1]
            names = [name for name, kind in choose.signature.items() if kind != "constexpr"]
            address = int.from_bytes(choose.values[names.index("host_ptr")], "little")
            assert address == step.host_ids.data_ptr() and address not in copies.targets
            addresses[address] += 1
    assert sorted(addresses.values()) == [1, 1, 1, 2], "four blocks, used in turn"
    assert cuda.compiled == ["score_kernel", "choose_kernel"]
