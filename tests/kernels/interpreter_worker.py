"""Runs backend checks on the Triton backend, on the CPU. A script of its own, because Triton decides at import whether
kernels are interpreted: start it with TRITON_INTERPRET=1 and the names of checks.

Prints one JSON object: check -> null, or the traceback of its failure.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial

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

from lab.without_gpu.interpreter_speed import spare_repeated_work
from lora_kernels.gpu import triton_dora
from lora_kernels.gpu.triton_backend import TritonBackend


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    spare_repeated_work()
    # The interpreter computes wrongly in bf16: see interpreter_numbers.py, which corrects it where it is needed.
    checks = {name: check for name, check in CHECKS.items() if "bf16" not in name}
    runs = {name: partial(check, TritonBackend()) for name, check in checks.items()}
    runs |= ATTENTION_CHECKS
    runs |= {name: partial(check, triton_dora.prepare) for name, check in DORA_CHECKS.items()}
    runs |= OPERATOR_CHECKS | FUNCTION_CHECKS
    runs |= LORA_CHECKS | QUANTIZED_CHECKS | FP8_CHECKS | INT8_CHECKS | GROUPED_CHECKS
    print(json.dumps({name: outcome(runs[name]) for name in sys.argv[1:]}))
