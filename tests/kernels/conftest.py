"""Makes `kernel_cases` importable by the tests beside it, and keeps compiled kernels between runs."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

MOST_KERNELS = 4000
"""Compiled kernels that are kept, each with its launcher in a folder of its own; all tests together make some 90."""


@pytest.fixture(scope="session")
def triton_cache(data_dir: Path) -> Path:
    """Return the folder in which Triton keeps compiled kernels between runs, so that only kernels that have changed are
    compiled again. Triton finds them by the hash of their source, of what they call, and of the compiler."""
    folder = data_dir / "triton"
    if folder.exists() and sum(1 for _ in folder.iterdir()) > MOST_KERNELS:
        shutil.rmtree(folder, ignore_errors=True)
    return folder
