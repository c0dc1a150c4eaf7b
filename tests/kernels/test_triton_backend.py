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


@pytest.fixture(scope="module")
def outcomes():
    """Check -> traceback or None, from a process whose kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).parent / "interpreter_worker.py"
    done = subprocess.run([sys.executable, worker], env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_backend(outcomes, name):
    assert outcomes[name] is None, outcomes[name]
