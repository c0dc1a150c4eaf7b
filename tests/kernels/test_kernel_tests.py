"""How the kernels' tests run on a device."""

import kernel_tests
import torch
from on_device import OnDevice


def test_every_check_of_the_kernels_has_a_backend_of_its_own():
    """It launches for good what suits the first heads it sees."""
    tests = kernel_tests.find_tests(torch.device("cpu"))
    backends = [check.args[0] for _, check in tests if isinstance(check.args[0], OnDevice)]
    assert len({id(one._backend) for one in backends}) == len(backends) > 5
