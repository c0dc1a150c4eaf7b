"""A device of round numbers and traffic small enough to reason about. Also makes `bench_server`, and the doubles of the
gateway's own tests, importable by the tests in all rooms below."""

import sys
from pathlib import Path

import pytest

from engine.core.config import CoreConfig
from lab.devices.cost import DeviceSpec, LinearCost
from lab.sim.baselines import Mode
from lab.sim.run import Setup

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "gateway")]

COST = (0.010, 0.001, 0.0005, 1e-7, 1e-7, 0.001, 1e-6, 0.0001, 0.0)


@pytest.fixture
def device():
    """A step takes 10 ms, a prompt token 1 ms, a decode 0.5 ms."""
    return DeviceSpec("toy", "a toy", LinearCost(COST), 0.02, 1000, 500, 1e6, {})


@pytest.fixture
def make_setup(device):
    def make(**changes):
        mode = Mode(**{name: changes.pop(name) for name in ("policy", "scheduler") if name in changes})
        sizes = {"num_pages": 2000, "host_pages": 500, "max_seqs": 8, "token_budget": 128} | changes
        return Setup(device, CoreConfig(**sizes), mode)

    return make
