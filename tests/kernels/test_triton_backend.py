"""The Triton backend against the reference, under Triton's interpreter; needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attention_checks import ATTENTION_CHECKS
from backend_checks import CHECKS
from dora_checks import DORA_CHECKS
from fp8_checks import FP8_CHECKS
from function_checks import FUNCTION_CHECKS
from grouped_checks import GROUPED_CHECKS
from int8_checks import INT8_CHECKS
from lora_checks import LORA_CHECKS
from operator_checks import OPERATOR_CHECKS
from quantized_checks import QUANTIZED_CHECKS

ROOT = Path(__file__).parents[2]
NAMES = [*(name for name in CHECKS if "bf16" not in name), *ATTENTION_CHECKS, *DORA_CHECKS, *LORA_CHECKS]
NAMES += [*OPERATOR_CHECKS, *FUNCTION_CHECKS, *QUANTIZED_CHECKS, *FP8_CHECKS, *INT8_CHECKS, *GROUPED_CHECKS]
NIGHTLY = {
    "recorded_launches_serve_any_set_of_adapters",
    "recorded_launches_have_the_bits_of_others",
    "recorded_launches_walk_what_is_beyond_them",
    "every_kind_of_tile_matches_the_reference",
    "functions: store",
    "attention: sinks, window None",
    "attention: a launch serves later chunks, window 40",
    "attention: a launch serves later chunks, window None",
    "attention: bits, window None",
    "lora: all ranks in one batch",
    "lora: long segments of all ranks",
    "lora: same bits, torch.float16, fp8",
    "lora: same bits, torch.float32",
    "entries_have_their_adapters_deltas",
}
"""The checks that take longest, together as long as all others: each repeats another one's kernel at greater length."""


@pytest.fixture(scope="module")
def outcomes(request):
    """Check -> traceback or None, from a process whose kernels are interpreted and that runs the checks asked for."""
    items = [item for item in request.session.items if item.path == request.path and "outcomes" in item.fixturenames]
    names = [item.callspec.params["name"] for item in items]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).parent / "interpreter_worker.py"
    done = subprocess.run(
        [sys.executable, worker, *names], env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nightly_checks_exist():
    assert set(NAMES) > NIGHTLY


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in NAMES]
)
def test_backend(outcomes, name):
    assert outcomes[name] is None, outcomes[name]
