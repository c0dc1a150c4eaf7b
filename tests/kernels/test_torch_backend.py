"""The torch backend against the reference."""

import pytest
from backend_checks import CHECKS

from lora_kernels.torch_ops import TorchBackend


@pytest.mark.parametrize("name", CHECKS)
def test_backend(name):
    CHECKS[name](TorchBackend())
