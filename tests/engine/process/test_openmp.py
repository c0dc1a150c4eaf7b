"""What an engine's OpenMP finds in the environment when it is loaded."""

import os

from engine.process.cores import SPINS, load_torch, wait_settings


def test_an_operators_settings_stay():
    assert wait_settings({"PATH": "/bin"}) == {"GOMP_SPINCOUNT": str(SPINS)}
    assert wait_settings({"GOMP_SPINCOUNT": "7"}) == wait_settings({"OMP_WAIT_POLICY": "passive"}) == {}


def test_the_environment_is_as_before_once_torch_is_loaded(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    load_torch()
    assert dict(os.environ) == before
