"""Section A: the kernels' own tests on the device, including bf16, which Triton's interpreter does not round correctly.

CI runs these tests under the interpreter, which uses the host's arithmetic and has no data races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from backend_checks import CHECKS
from dora_checks import DORA_CHECKS
from on_device import OnDevice

from benchmarks.gpu.journal import Journal
from lora_kernels.gpu import triton_dora
from lora_kernels.gpu.triton_backend import TritonBackend

TINY_EVERY = 11
"""In toy size only every eleventh test runs, because each takes a second under the interpreter."""
LEAST_S = 2.0


def run(journal: Journal, share: str = "0/1") -> None:
    """Run the tests of a share: "1/4" is the second of four, which several processes run side by side."""
    first, step = map(int, share.split("/"))
    checks, passed, failures = list(find_tests(torch.device(journal.device)))[first::step], 0, journal.failures
    try:
        for name, check in checks[:: TINY_EVERY if journal.tiny else 1]:
            with journal.case(name, LEAST_S):
                check()
                passed += 1
                journal.tell(f"passed {name}")
    finally:
        failed = journal.failures - failures
        journal.row("the kernels' own tests", f"on the device, {share}", passed=passed, failed=failed, all=len(checks))


def find_tests(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (name, function without arguments) of every check in this folder that uses the backend, and of the DoRA
    scale checks, each with a backend of its own on `device`. On a CPU, checks in bf16 are left out."""
    for name, check in CHECKS.items():
        if device.type == "cuda" or "bf16" not in name:
            yield name, partial(check, _backend(device))
    for name, check in DORA_CHECKS.items():
        yield name, partial(check, _backend(device).prepare_scales(triton_dora.prepare))


def _backend(device: torch.device) -> OnDevice:
    """Return a new untuned backend for one check. A backend chooses its tiles by the first head size that it sees, and
    tiles for small heads do not fit the shared memory with large ones. The checks' shapes are not those of models, so
    there are no tuned configurations for them."""
    return OnDevice(TritonBackend(), device)
