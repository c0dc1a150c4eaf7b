"""How long the OpenMP threads of an engine spin at a barrier before they sleep."""

from __future__ import annotations

import os
from collections.abc import Mapping

SPINS = 500
"""How many iterations an OpenMP thread of the engine spins at a barrier before it sleeps (GOMP_SPINCOUNT). The default
of libgomp is some millions. A spinning thread occupies the core that the thread it waits for needs. With two busy
processes beside an engine on two cores, ITL p50 was 59 to 370 ms with the default, 33 with 2,000, 20.8 with 500 and
17.9 with 100; for an engine alone it was 12.1, 12.2, 11.4 and 13.6 ms."""
WAIT_SETTINGS = frozenset(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
"""If the environment has one of these variables, `SPINS` is not applied."""


def wait_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to an environment `env` in which an engine's OpenMP is to be loaded."""
    return {} if env.keys() & WAIT_SETTINGS else {"GOMP_SPINCOUNT": str(SPINS)}


def load_torch() -> None:
    """Import torch with the variables of `wait_settings` in this process's environment, which its OpenMP reads when it
    is loaded. Changes nothing if torch is loaded already."""
    added = wait_settings(os.environ)
    os.environ.update(added)
    try:
        import torch  # noqa: F401
    finally:
        for name in added:
            os.environ.pop(name, None)
