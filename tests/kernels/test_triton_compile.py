"""The Triton kernels compile for GPUs that are not here, without spilling registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from all_launches import all_kernels
from compile_attention import PROCESSORS, programs_side_by_side
from compile_worker import SHARED_BYTES, cases, complaint, some_of

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "compile_worker.py"
IN_FULL = (80, 90)
"""Compute capabilities for which every configuration is compiled. For others CI compiles some of each kernel, to save
time; `python -m benchmarks.gpu.compiling` compiles all."""


@pytest.fixture(scope="module")
def compiled(triton_cache):
    """Compute capability -> kernel -> resources, each from a process whose kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(triton_cache)}
    workers = {
        capability: subprocess.Popen(
            [sys.executable, WORKER, str(capability), *([] if capability in IN_FULL else ["some"])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in SHARED_BYTES
    }
    found = {}
    for capability, worker in workers.items():
        output, errors = worker.communicate(timeout=600)
        assert worker.returncode == 0, errors
        found[capability] = json.loads(output)
    return found


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_fits_and_does_not_spill(compiled, capability):
    found = compiled[capability]
    assert ({"decode 256 of 4 fp32", "prefill 256 of 4 fp32"} < found.keys()) == (capability in IN_FULL)
    assert {name: what for name, used in found.items() if (what := complaint(name, used, capability))} == {}


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


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_lora_tile_is_multiplied_by_one_instruction(compiled, capability):
    """So that a row has the same bits in a tile of any height. Hopper has another (wgmma), for tall ones."""
    for fp8 in (False, True):
        kinds = {
            tuple(used["DOT"])
            for name, used in compiled[capability].items()
            if name.startswith(("shrink", "expand")) and name.endswith("fp8") == fp8
        }
        instruction = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        assert kinds == {(f"kWidth = {4 if fp8 else 2}", instruction)}


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_decode_programs_fit_side_by_side(compiled, capability):
    """The number that is launched runs at once: one that had to wait would double the time."""
    for name, programs in programs_side_by_side(capability).items():
        if name not in compiled[capability]:
            assert capability not in IN_FULL
            continue
        used = compiled[capability][name]
        registers = -(-used["REG"] // 8) * 8 * 128
        shared = used["SHARED"] + 1024
        assert programs >= 2
        assert programs * registers <= 65536
        assert programs * shared <= PROCESSORS[capability].shared_bytes, name
