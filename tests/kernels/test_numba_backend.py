"""The numba backend against the reference."""

import pytest
from backend_checks import CHECKS

from lora_kernels.numba_backend import NumbaBackend


@pytest.fixture(scope="module")
def backend():
    return NumbaBackend()


@pytest.mark.parametrize("name", CHECKS)
def test_backend(backend, name):
    CHECKS[name](backend)
