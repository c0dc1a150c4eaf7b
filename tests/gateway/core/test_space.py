"""The space that stays free on the disk: how much it is, and what is refused for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.core.errors import ApiError, Fault
from gateway.core.space import Disk, SpaceUse, reserve_bytes

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("total", "store", "reserve"),
    [
        (64 * MIB, 0, 16 * MIB),
        (1 * GIB, 0, 256 * MIB),
        (10 * GIB, 0, 256 * MIB),
        (100 * GIB, 0, 2 * GIB),
        (100 * GIB, 5 * GIB, 7 * GIB),
        (2**40 * 100, 0, 8 * GIB),
    ],
)
def test_the_reserve_follows_the_disk_and_the_store(total, store, reserve):
    assert reserve_bytes(total, store) == pytest.approx(reserve, rel=0.001)


def disk_with(folder: Path, free: int, store: Path | None = None) -> Disk:
    return Disk(folder, store, measure=lambda folder: SimpleNamespace(total=10 * GIB, free=free))


def test_uploads_end_before_answers_of_batches(tmp_path):
    for free, answers, uploads in ((256, True, False), (255, False, False), (512, True, True), (511, True, False)):
        disk = disk_with(tmp_path, free * MIB)
        assert (disk.has_room(SpaceUse.RESULT), disk.has_room(SpaceUse.UPLOAD)) == (answers, uploads)


def test_what_is_to_come_counts(tmp_path):
    disk = disk_with(tmp_path, 513 * MIB)
    disk.check(SpaceUse.UPLOAD, MIB)
    with pytest.raises(ApiError, match="almost full") as caught:
        disk.check(SpaceUse.UPLOAD, 2 * MIB)
    assert caught.value.fault is Fault.INSUFFICIENT_STORAGE


def test_the_store_needs_its_size_again(tmp_path):
    store = tmp_path / "appendonlydir"
    disk = disk_with(tmp_path, 258 * MIB, store)
    assert disk.has_room(SpaceUse.RESULT)
    store.mkdir()
    (store / "a.aof").write_bytes(b"x" * 3 * MIB)
    assert not disk_with(tmp_path, 258 * MIB, store).has_room(SpaceUse.RESULT)


def test_a_disk_that_cannot_be_measured_has_room(tmp_path):
    assert Disk(tmp_path / "absent").has_room(SpaceUse.UPLOAD, 2**60)
    sizeless = Disk(tmp_path, measure=lambda folder: SimpleNamespace(total=0, free=0))
    assert sizeless.has_room(SpaceUse.UPLOAD, 1)
