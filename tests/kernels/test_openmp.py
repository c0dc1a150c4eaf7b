"""Which OpenMP library kernels run on."""

from pathlib import Path

import pytest

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
