"""The Triton kernels compile for a GPU that is not here, without spilling registers.

A configuration takes a second to compile, so these tests compile the largest ones of each kernel for Hopper alone.
`python -m benchmarks.gpu.compiling` compiles all, for three generations of GPUs, and checks the same.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from all_launches import all_kernels
from compile_worker import SHARED_BYTES, cases, complaint, complaints, fit_side_by_side, some_of

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "compile_worker.py"
HOPPER = 90
TILE = {"REG": 168, "STACK": 0, "LOCAL": 0, "SHARED": 32 << 10, "DOT": []}
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@pytest.fixture(scope="module")
def compiled(triton_cache):
    """Kernel -> resources, from a process whose kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(triton_cache)}
    command = [sys.executable, WORKER, str(HOPPER)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_every_kernel_fits_and_does_not_spill(compiled):
    assert complaints(compiled, HOPPER) == []
    lora = {
        f"{kernel} {kind}"
        for kernel in ("shrink", "expand")
        for kind in ("down", "down long", "qkv fp8", "qkv long fp8")
    }
    assert lora | {"decode 256 of 2 window cap", "decode 256 of 4 fp8", "prefill 256 of 4 fp8"} < compiled.keys()


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_is_compiled(capability):
    assert {case[1].__name__ for case in some_of(cases(capability))} == all_kernels()


@pytest.mark.parametrize(
    ("used", "what"),
    [
        ({"STACK": 8, "LOCAL": 0, "SHARED": 163 << 10}, ""),
        ({"STACK": 16, "LOCAL": 0, "SHARED": 0}, "spills 16 bytes"),
        ({"STACK": 0, "LOCAL": 4, "SHARED": 0}, "spills 4 bytes"),
        ({"STACK": 0, "LOCAL": 0, "SHARED": (163 << 10) + 1}, "166913 bytes of shared memory, of 166912"),
    ],
)
def test_a_kernel_that_takes_too_much_is_named(used, what):
    assert complaint("decode 128", used, 80) == what
    assert complaint("decode 128 fp32", used, 80) == ("" if what.startswith("spills") else what)


@pytest.mark.parametrize(
    ("name", "used", "what"),
    [
        ("shrink qkv", {"DOT": ["kWidth = 2", MMA]}, ""),
        ("shrink qkv", {"DOT": ["kWidth = 2", "wgmma.mma_async"]}, "is multiplied by"),
        ("shrink qkv fp8", {"DOT": ["kWidth = 2", MMA]}, "is multiplied by"),
        ("expand qkv fp8", {"DOT": ["kWidth = 2", MMA]}, ""),
        ("decode 128 of 4", {}, ""),
        ("decode 128 of 4", {"REG": 168}, ""),
        ("decode 128 of 4", {"REG": 255}, "programs do not fit"),
        ("decode 128 of 4", {"SHARED": 120 << 10}, "programs do not fit"),
    ],
)
def test_another_product_and_too_few_programs_are_named(name, used, what):
    found = complaints({name: TILE | used}, HOPPER)
    assert len(found) == bool(what)
    assert all(line.startswith(f"{name}: ") and what in line for line in found)


@pytest.mark.parametrize(
    ("registers", "programs", "fit"), [(168, 1, False), (168, 2, True), (168, 3, True), (176, 3, False)]
)
def test_programs_share_the_registers(registers, programs, fit):
    assert fit_side_by_side(TILE | {"REG": registers}, programs, HOPPER) == fit
