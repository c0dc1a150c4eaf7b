"""The cache of compiled CPU kernels on disk, beside the sources if that directory is writable, else numba's own. Its
directory is named by a hash of all source files, because numba checks only a function's own file."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba

HERE = Path(__file__).parent
_TURN = threading.RLock()
"""Lock that is held while numba's cache directory, a setting of the whole process, is ours. Without it, a second thread
that compiles meanwhile would use one directory or the other by chance, and compile again what the other has."""


@contextmanager
def kernel_cache() -> Iterator[None]:
    """Have numba cache the functions that are decorated in the block in our directory."""
    config: Any = numba.config
    with _TURN:
        before = config.CACHE_DIR
        if os.access(HERE, os.W_OK):
            config.CACHE_DIR = str(HERE / "__pycache__" / f"kernels-{_hash_sources()}")
        try:
            yield
        finally:
            config.CACHE_DIR = before


def cached(decorate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `decorate`, a decorator of numba's with `cache=True`, so that it caches functions in our directory."""

    def decorated(function: Any) -> Any:
        with kernel_cache():
            return decorate(function)

    return decorated


@cache
def _hash_sources() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted([*HERE.parent.glob("*.py"), *HERE.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
