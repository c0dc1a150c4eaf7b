"""Which OpenMP library kernels run on, and where compiled kernels are cached."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

from lora_kernels.cpu.kernel_cache import cached, kernel_cache
from lora_kernels.cpu.numba_pack import _pack
from lora_kernels.cpu.openmp import find_libgomp

TORCH = Path("/venv/site-packages/torch")
OURS, BESIDE = f"{TORCH}/lib/libgomp.so.1", "/venv/site-packages/torch.libs/libgomp-a34b.so.1.0.0"
SYSTEMS, SCIKITS = "/usr/lib/libgomp.so.1.0.0", "/venv/site-packages/scikit_learn.libs/libgomp-a34b.so.1.0.0"


def maps(*paths):
    return "".join(
        f"7f10{number:04x}-7f11 r-xp 00000000 08:01 123 {part:>40}\n"
        for number, path in enumerate(paths)
        for part in (path, path)
    )


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ((), None),
        (("/usr/lib/libc.so.6",), None),
        ((OURS,), OURS),
        ((SYSTEMS, OURS, SCIKITS), OURS),
        ((SCIKITS, BESIDE), BESIDE),
        ((SYSTEMS,), SYSTEMS),
        ((SYSTEMS, SCIKITS), None),
    ],
)
def test_torchs_own_is_found_or_none(loaded, expected):
    assert find_libgomp(maps(*loaded), TORCH) == expected


def twice(number):
    return 2 * number


def cache_folder(function):
    return Path(function.stats.cache_path)


def test_all_threads_cache_kernels_in_one_directory():
    """One that was decorated without ours while another thread had numba's setting changed was compiled once more."""
    decorate, before = cached(numba.njit(cache=True)), numba.config.CACHE_DIR
    with ThreadPoolExecutor(1) as thread:
        with kernel_cache():
            ours, other = decorate(twice), thread.submit(decorate, twice)
        folders = {cache_folder(function).parent.name for function in (ours, other.result(60), _pack)}
    assert len(folders) == 1 and folders.pop().startswith("kernels-")
    assert before == numba.config.CACHE_DIR
