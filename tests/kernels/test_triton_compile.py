"""The Triton kernels compile for GPUs that are not here, without spilling registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_attention import PROCESSORS, programs_side_by_side

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "compile_worker.py"
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory a program may have (CUDA programming guide, technical specifications by compute capability)."""


@pytest.fixture(scope="module")
def compiled(triton_cache):
    """Compute capability -> kernel -> resources, each from a process whose kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(triton_cache)}
    workers = {
        capability: subprocess.Popen(
            [sys.executable, WORKER, str(capability)],
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
def test_no_kernel_spills(compiled, capability):
    """One value may be parked on the stack: some assemblers do so to fit another program on the processor."""
    kernels = {name: used for name, used in compiled[capability].items() if not name.endswith("fp32")}
    assert len(kernels) >= 10
    assert {name: used for name, used in kernels.items() if used["STACK"] > 8 or used["LOCAL"]} == {}


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_shared_memory_fits(compiled, capability):
    limit = SHARED_BYTES[capability]
    assert {"decode 256 of 4 fp32", "prefill 256 of 4 fp32"} < compiled[capability].keys()
    assert {name: used for name, used in compiled[capability].items() if used["SHARED"] > limit} == {}


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
        used = compiled[capability][name]
        registers = -(-used["REG"] // 8) * 8 * 128
        shared = used["SHARED"] + 1024
        assert programs >= 2
        assert programs * registers <= 65536
        assert programs * shared <= PROCESSORS[capability].shared_bytes, name
