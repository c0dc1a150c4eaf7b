"""Files: what is kept, what is charged for it, and what is left of what went wrong, which is nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from file_fakes import LIMITS, MIB, FullFolder, build_files, filler, objects, pieces, stuck, whole

from gateway.core.errors import ApiError, Fault
from gateway.core.space import Disk
from gateway.files import service
from gateway.files.places import Folder
from gateway.files.record import new_file_id
from gateway.files.registry import Reservation
from gateway.files.service import Files
from gateway.files.storage import open_storage
from gateway.files.sweeper import NameAgeTracker, Sweeper

UNKNOWN = "file-" + "a" * 24


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "stored"


@pytest.fixture
def files(valkey, folder) -> Files:
    return build_files(valkey, folder)


async def refused(work, fault: Fault) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    assert caught.value.fault is fault
    return caught.value


async def charged(files: Files, tenant: str = "acme") -> tuple[int, int]:
    use = await files.use(tenant)
    return use.bytes, use.files


async def bring(files: Files, data: bytes = b"{}\n", tenant: str = "acme", **more):
    return await files.create(tenant, "in.jsonl", "batch", pieces(data), **more)


@pytest.mark.parametrize("where", ["folder", "memory://files9"])
async def test_what_comes_in_comes_out(valkey, folder, where):
    files = build_files(valkey, folder if where == "folder" else where)
    record = await files.create("acme", "a b.jsonl", "batch", filler(3 * MIB + 17))
    assert (record.bytes, record.filename, record.purpose) == (3 * MIB + 17, "a b.jsonl", "batch")
    assert record.expires_at == record.created_at + 30 * 86_400
    assert await files.get("acme", record.id) == record
    assert await whole(files.content(record)) == b"x" * record.bytes
    assert max([len(piece) async for piece in files.content(record)]) <= 256 * 2**10
    assert await whole(files.content(record, 5, 7)) == b"x" * 7
    assert await files.storage.size(record.object_name) == record.bytes
    assert await files.storage.list("files/") == [record.object_name]
    assert await charged(files) == (record.bytes, 1)
    await files.delete("acme", record.id)
    await refused(files.get("acme", record.id), Fault.FILE_NOT_FOUND)
    assert await files.storage.list("") == []
    assert await files.storage.size(record.object_name) is None
    assert await charged(files) == (0, 0)


async def test_a_url_leads_to_the_bytes(files):
    import fsspec

    record = await bring(files, b"hello")
    with fsspec.open(files.url(record), "rb") as file:
        assert file.read() == b"hello"


async def test_the_storage_is_in_the_data_directory_unless_a_url_says_else(tmp_path):
    for url, root in (("", tmp_path / "data" / "files"), (f"file://{tmp_path}/else", tmp_path / "else")):
        storage = open_storage(url, tmp_path / "data")
        await storage.write("a/b", pieces(b"x"))
        assert objects(root) == ["a/b"]
        storage.close()
    with pytest.raises(ValueError, match=r"batches\.storage"):
        open_storage("nosuch://place", tmp_path)


async def test_others_see_nothing(files):
    record = await bring(files)
    for work in (files.get, files.delete, lambda t, i: files.pin(t, i, "b")):
        told = [await refused(work("globex", name), Fault.FILE_NOT_FOUND) for name in (record.id, UNKNOWN)]
        assert told[0].message.replace(record.id, UNKNOWN) == told[1].message
    assert (await files.list("globex")).data == []
    assert await charged(files, "globex") == (0, 0)
    assert (await files.get("acme", record.id)).id == record.id


@pytest.mark.parametrize("name", ["", "file-", "../../etc/passwd", "file-" + "G" * 24, "file-" + "0" * 25, "*"])
async def test_ids_that_are_none(files, name):
    await refused(files.get("acme", name), Fault.FILE_NOT_FOUND)
    await refused(files.delete("acme", name), Fault.FILE_NOT_FOUND)


async def test_lists_in_pages(valkey, folder):
    files = build_files(valkey, folder)
    ids = [(await bring(files)).id for _ in range(4)]
    output = await files.adopt("acme", new_file_id(), "out.jsonl", pieces(b"answers"))
    for newest_first in (True, False):
        seen, after = [], None
        while True:
            page = await files.list("acme", after=after, limit=2, newest_first=newest_first)
            seen += [record.id for record in page.data]
            if not page.has_more:
                break
            after = seen[-1]
        assert seen == ([output.id, *ids[::-1]] if newest_first else [*ids, output.id])
    assert [record.id for record in (await files.list("acme", purpose="batch_output")).data] == [output.id]
    assert (await files.list("acme", purpose="batch", limit=4)).has_more is False
    await refused(files.list("acme", after=new_file_id()), Fault.INVALID_REQUEST)


@pytest.mark.parametrize("newest_first", [True, False])
async def test_a_list_goes_on_behind_a_file_that_was_deleted_meanwhile(files, newest_first):
    ids = [(await bring(files)).id for _ in range(5)]
    seen, has_more = [], True
    while has_more:
        page = await files.list("acme", after=seen[-1] if seen else None, limit=2, newest_first=newest_first)
        has_more = page.has_more
        for record in page.data:
            seen.append(record.id)
            await files.delete("acme", record.id)
    assert seen == (ids[::-1] if newest_first else ids)
    assert (await files.list("acme")).data == []
    await refused(files.list("globex", after=ids[0]), Fault.INVALID_REQUEST)


async def test_the_list_forgets_all_but_the_last_thousand_deleted_files(files, valkey):
    first = await bring(files)
    await valkey.zadd("loralane:file-gone:{acme}", {f"file-{number:024x}": number for number in range(1000)})
    await valkey.zadd("loralane:file-order:{acme}", {f"file-{number:024x}": number for number in range(1000)})
    await files.delete("acme", first.id)
    assert await valkey.zcard("loralane:file-gone:{acme}") == await valkey.zcard("loralane:file-order:{acme}") == 1000
    await refused(files.list("acme", after=f"file-{0:024x}"), Fault.INVALID_REQUEST)
    assert (await files.list("acme", after=first.id)).data == []


async def test_a_deleted_result_file_that_is_written_again_stays_in_the_list(files, valkey):
    file_id = new_file_id()
    for _ in range(2):
        await files.adopt("acme", file_id, "out.jsonl", pieces(b"answers"))
        assert [record.id for record in (await files.list("acme")).data] == [file_id]
        assert not await valkey.zcard("loralane:file-gone:{acme}")
        await files.delete("acme", file_id)


async def test_a_list_longer_than_what_redis_is_asked_at_once(files, monkeypatch):
    monkeypatch.setattr("gateway.files.service.AT_ONCE", 2)
    ids = [(await bring(files)).id for _ in range(5)]
    assert [record.id for record in (await files.list("acme", newest_first=False)).data] == ids
    page = await files.list("acme", newest_first=False, limit=3)
    assert ([record.id for record in page.data], page.has_more) == (ids[:3], True)


async def test_what_is_refused_is_not_charged(files, folder):
    await refused(files.create("acme", "a", "fine-tune", pieces(b"x")), Fault.INVALID_REQUEST)
    await refused(files.create("acme", "a" * 513, "batch", pieces(b"x")), Fault.INVALID_REQUEST)
    await refused(files.create("acme", "a", "batch", pieces()), Fault.INVALID_REQUEST)
    await refused(files.create("acme", "a", "batch", pieces(b"x"), expires_after=3599), Fault.INVALID_REQUEST)
    await refused(files.create("acme", "a", "batch", filler(4 * MIB + 1)), Fault.REQUEST_TOO_LARGE)
    assert (await charged(files), objects(folder)) == ((0, 0), [])


async def test_bytes_and_files_are_bounded_to_the_last(files, folder):
    for size in (4, 4, 2):
        await files.create("acme", "a", "batch", filler(size * MIB))
    assert await charged(files) == (10 * MIB, 3)
    await refused(bring(files, b"x"), Fault.INSUFFICIENT_QUOTA)
    assert await charged(files) == (10 * MIB, 3)
    await bring(files, tenant="globex")
    last = (await files.list("acme", newest_first=False)).data[-1]
    await files.delete("acme", last.id)
    await refused(files.create("acme", "a", "batch", filler(2 * MIB + 1)), Fault.INSUFFICIENT_QUOTA)
    for _ in range(3):
        await bring(files, b"x" * 10)
    await refused(bring(files), Fault.INSUFFICIENT_QUOTA)
    assert await charged(files) == (8 * MIB + 30, 5)
    assert len(objects(folder)) == 6


async def test_uploads_at_once_share_one_quota(files):
    results = await asyncio.gather(
        *[files.create("acme", "a", "batch", filler(3 * MIB)) for _ in range(5)], return_exceptions=True
    )
    kept = [result for result in results if not isinstance(result, ApiError)]
    assert {error.fault for error in results if isinstance(error, ApiError)} == {Fault.INSUFFICIENT_QUOTA}
    assert len(kept) <= 3, "bytes of uploads on their way count"
    assert await charged(files) == (3 * MIB * len(kept), len(kept))


async def test_who_says_how_much_will_come_is_told_at_once_and_then_has_room(files):
    async def upload() -> None:
        async with files.receiving("acme", filler(3 * MIB), expected=3 * MIB - 100) as upload:
            await upload.keep("a", "batch", None)

    results = await asyncio.gather(*[upload() for _ in range(5)], return_exceptions=True)
    assert [error.fault for error in results if error is not None] == [Fault.INSUFFICIENT_QUOTA] * 2
    assert await charged(files) == (9 * MIB, 3)
    async with files.receiving("acme", pieces(b"x"), expected=MIB) as upload:
        assert await charged(files) == (10 * MIB, 4)
        await upload.keep("a", "batch", None)
    assert await charged(files) == (9 * MIB + 1, 4)


async def test_a_full_disk_is_ours_and_leaves_nothing(valkey, folder):
    disk = FullFolder(folder)
    disk.room = 2 * MIB
    files = build_files(valkey, disk)
    error = await refused(files.create("acme", "a", "batch", filler(3 * MIB)), Fault.INSUFFICIENT_STORAGE)
    assert (error.http_status, error.headers()["x-should-retry"]) == (507, "false")
    assert (await charged(files), objects(folder)) == ((0, 0), [])
    disk.room = 3 * MIB
    await files.create("acme", "a", "batch", filler(3 * MIB))


async def test_a_disk_keeps_its_reserve(valkey, folder):
    """Uploads leave two reserves free and answers of batches one. Deleting needs no room."""
    disk = SimpleNamespace(total=2**30, free=2**29 + 2 * MIB)
    files = build_files(valkey, folder, disk=Disk(folder, measure=lambda folder: disk))
    record = await bring(files, b"x" * MIB)
    await refused(bring(files, b"x" * 3 * MIB), Fault.INSUFFICIENT_STORAGE)
    disk.free = 2**29 - 1
    await refused(bring(files), Fault.INSUFFICIENT_STORAGE)
    adopted = await files.adopt("acme", UNKNOWN, "out", filler(MIB))
    disk.free = 2**28 + MIB
    await refused(files.adopt("acme", new_file_id(), "out", filler(1), expected=2 * MIB), Fault.INSUFFICIENT_STORAGE)
    disk.free = 0
    await refused(files.adopt("acme", new_file_id(), "out", filler(1)), Fault.INSUFFICIENT_STORAGE)
    assert await charged(files) == (2 * MIB, 2)
    for kept in (record, adopted):
        await files.delete("acme", kept.id)
    assert (await charged(files), objects(folder)) == ((0, 0), [])


async def test_a_file_is_deleted_while_redis_refuses_writes(valkey, folder, monkeypatch):
    """Its content goes first, because that is what gives a full disk room; then Redis accepts the rest."""
    monkeypatch.setattr(service, "RECOVERY_SECONDS", 0.3)
    files = build_files(valkey, folder)
    record, pinned = await bring(files, b"x" * MIB), await bring(files)
    await files.pin("acme", pinned.id, "batch_1")
    await valkey.config_set("min-replicas-to-write", 1)
    try:
        await refused(bring(files), Fault.REGISTRY_UNAVAILABLE)
        await refused(files.delete("acme", UNKNOWN), Fault.FILE_NOT_FOUND)
        await refused(files.delete("acme", pinned.id), Fault.FILE_IN_USE)
        await refused(files.delete("acme", record.id), Fault.REGISTRY_UNAVAILABLE)
        assert objects(folder) == [pinned.object_name]
        deleting = asyncio.create_task(files.delete("acme", record.id))
        await asyncio.sleep(0.1)
    finally:
        await valkey.config_set("min-replicas-to-write", 0)
    await deleting
    await refused(files.get("acme", record.id), Fault.FILE_NOT_FOUND)
    assert await charged(files) == (3, 1)


async def test_answers_of_batches_count_in_a_tenants_bytes(valkey, folder):
    files = build_files(valkey, folder)
    for num_bytes in (4 * MIB, 5 * MIB):
        await files.charge_answers("acme", "batch_1", num_bytes)
    assert await charged(files) == (9 * MIB, 1)
    await refused(bring(files, b"x" * 2 * MIB), Fault.INSUFFICIENT_QUOTA)
    await files.charge_answers("acme", "batch_2", 3 * MIB)
    await refused(files.check_quota("acme"), Fault.INSUFFICIENT_QUOTA)
    await files.charge_answers("acme", "batch_2", -3 * MIB)
    await files.check_quota("acme")
    await files.refund_answers("acme", "batch_1")
    await files.refund_answers("acme", "batch_1")
    assert await charged(files) == (0, 0)


async def test_a_storage_that_is_gone_is_told(files):
    record = await bring(files)
    await files.storage.delete([record.object_name])
    await refused(whole(files.content(record)), Fault.STORAGE_UNAVAILABLE)


@pytest.mark.parametrize("sent", [b"x", b"x" * 3 * MIB])
async def test_who_leaves_in_the_middle_leaves_nothing(files, folder, sent):
    reached = asyncio.Event()
    upload = asyncio.create_task(files.create("acme", "a", "batch", stuck(sent, reached)))
    await reached.wait()
    assert (await charged(files))[1] == 1
    upload.cancel()
    with suppress(asyncio.CancelledError):
        await upload
    assert (await charged(files), objects(folder)) == ((0, 0), [])


@pytest.mark.parametrize("after", range(12))
async def test_who_is_cancelled_at_any_point_leaves_a_whole_file_or_nothing(files, folder, after):
    upload = asyncio.create_task(files.create("acme", "a", "batch", filler(2 * MIB)))
    for _ in range(after * 4):
        await asyncio.sleep(0)
    upload.cancel()
    with suppress(asyncio.CancelledError):
        await upload
    async with asyncio.timeout(60):  # what was asked of Redis in the last moment is answered
        while not await is_whole_or_nothing(files, folder):
            await asyncio.sleep(0.01)


async def is_whole_or_nothing(files, folder) -> bool:
    kept = (await files.list("acme")).data
    charge = (sum(record.bytes for record in kept), len(kept))
    return objects(folder) == sorted(record.object_name for record in kept) and await charged(files) == charge


class SlowFolder(Folder):
    """Takes its time to open a file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[BinaryIO] = []
        self.go_on = Event()

    def open(self, name: str) -> BinaryIO:
        self.opened.append(super().open(name))
        self.go_on.wait(10)
        return self.opened[-1]


async def test_who_is_cancelled_while_a_file_is_opened_leaves_none_open(valkey, folder):
    place = SlowFolder(folder)
    files = build_files(valkey, place)
    record = await bring(files)
    reading = asyncio.create_task(whole(files.content(record)))
    while not place.opened:
        await asyncio.sleep(0.001)
    reading.cancel()
    place.go_on.set()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert [file.closed for file in place.opened] == [True]


async def test_an_upload_whose_gateway_died_is_given_back(valkey, folder):
    dead = build_files(valkey, folder)
    reservation = Reservation("acme", new_file_id(), "token", LIMITS.quota)
    await dead.registry.reserve(reservation, 7)
    await dead.registry.hold(reservation, MIB)
    assert await charged(dead) == (MIB, 1)
    await build_files(valkey, folder, lease_seconds=0.05).registry.hold(reservation, MIB)
    await asyncio.sleep(0.06)
    assert await charged(dead) == (0, 0)


async def test_a_slow_upload_keeps_its_lease(valkey, folder):
    files = build_files(valkey, folder, lease_seconds=3.0)

    async def slowly():
        yield b"x"
        [(token, ends)] = await valkey.zrange(leases, 0, -1, withscores=True)
        async with asyncio.timeout(60):
            while await valkey.zscore(leases, token) == ends:
                await asyncio.sleep(0.05)
        yield b"y"

    leases = "loralane:file-leases:{acme}"

    record = await files.create("acme", "a", "batch", slowly())
    assert await whole(files.content(record)) == b"xy"


async def test_an_upload_that_lost_its_lease_is_refused_and_leaves_nothing(valkey, files, folder):
    async with files.receiving("acme", pieces(b"late")) as upload:
        await valkey.flushall()
        await refused(upload.keep("a", "batch", None), Fault.REGISTRY_UNAVAILABLE)
    assert (await charged(files), objects(folder)) == ((0, 0), [])


async def test_redis_away_while_it_is_kept_leaves_what_it_may_have_kept(files, folder, monkeypatch):
    async def away(*args):
        raise ApiError(Fault.REGISTRY_UNAVAILABLE, "away")

    with monkeypatch.context() as patch:
        patch.setattr(files.registry, "keep", away)
        await refused(bring(files), Fault.REGISTRY_UNAVAILABLE)
    assert len(objects(folder)) == 1
    assert await charged(files) == (3, 1)


async def test_what_a_job_wrote_is_taken_whatever_the_quota_says(files):
    for size in (4, 4, 2):
        await files.create("acme", "a", "batch", filler(size * MIB))
    output = await files.adopt("acme", new_file_id(), "out.jsonl", filler(5 * MIB))
    assert (output.purpose, output.bytes) == ("batch_output", 5 * MIB)
    assert await charged(files) == (15 * MIB, 4)
    await refused(bring(files), Fault.INSUFFICIENT_QUOTA)


async def test_adopting_twice_gives_one_file(files, folder):
    file_id = new_file_id()
    first = await files.adopt("acme", file_id, "out.jsonl", pieces(b"one"))
    again = await files.adopt("acme", file_id, "out.jsonl", pieces(b"two!"))
    assert again == first
    same = await asyncio.gather(*[files.adopt("acme", UNKNOWN, "o", filler(MIB)) for _ in range(4)])
    assert len({record.token for record in same}) == 1
    kept = (await files.list("acme")).data
    assert objects(folder) == sorted(record.object_name for record in kept)
    assert await charged(files) == (sum(record.bytes for record in kept), len(kept))
    assert await whole(files.content(first)) == b"one"


async def test_a_file_in_use_stays(files, folder):
    record = await bring(files)
    assert await files.pin("acme", record.id, "batch_1") == record
    await files.pin("acme", record.id, "batch_1")
    await files.pin("acme", record.id, "batch_2")
    for holder in ("batch_1", "batch_2"):
        await refused(files.delete("acme", record.id), Fault.FILE_IN_USE)
        await files.unpin("acme", record.id, holder)
    await files.delete("acme", record.id)
    await files.unpin("acme", record.id, "batch_2")
    await refused(files.pin("acme", record.id, "batch_3"), Fault.FILE_NOT_FOUND)
    assert (await charged(files), objects(folder)) == ((0, 0), [])


async def test_a_holder_that_died_does_not_hold_for_ever(files):
    record = await bring(files)
    await files.pin("acme", record.id, "batch_1", seconds=0.02)
    await asyncio.sleep(0.03)
    await files.delete("acme", record.id)


async def expire(valkey, record) -> None:
    """Set the file's expiry to a moment in the past."""
    assert await valkey.zadd(f"loralane:file-expiry:{{{record.tenant}}}", {record.id: 1}, xx=True, ch=True) == 1


async def test_an_expired_file_is_gone_at_once_and_swept_soon(valkey, files, folder):
    old, new = await bring(files), await bring(files, b"new")
    await expire(valkey, old)
    await refused(files.get("acme", old.id), Fault.FILE_NOT_FOUND)
    assert [record.id for record in (await files.list("acme")).data] == [new.id]
    await refused(files.pin("acme", old.id, "batch_1"), Fault.FILE_NOT_FOUND)
    sweeper = Sweeper(files.storage, files.registry)
    await sweeper.sweep()
    assert await charged(files) == (3, 1)
    assert old.object_name not in await sweeper.sweep()
    assert new.object_name in objects(folder)


async def test_the_sweeper_removes_what_expired(valkey, files, folder):
    old, new = await bring(files), await bring(files)
    await expire(valkey, old)
    assert await Sweeper(files.storage, files.registry).sweep() == [old.object_name]
    assert objects(folder) == [new.object_name]
    assert await charged(files) == (3, 1)


async def test_a_file_in_use_expires_when_it_is_not(valkey, files):
    record = await bring(files)
    await files.pin("acme", record.id, "batch_1")
    await expire(valkey, record)
    sweeper = Sweeper(files.storage, files.registry)
    assert await sweeper.sweep() == []
    assert await files.get("acme", record.id) == record
    await files.unpin("acme", record.id, "batch_1")
    await refused(files.get("acme", record.id), Fault.FILE_NOT_FOUND)
    assert await sweeper.sweep() == [record.object_name]


async def test_the_sweeper_removes_strays_once_they_are_old(valkey, files, folder):
    now = 0.0
    kept = await bring(files)
    output = await files.adopt("acme", new_file_id(), "o", pieces(b"x"))
    await files.storage.write(f"files/acme/{new_file_id()}", pieces(b"left"))
    await files.storage.write(f"files/globex/{kept.id}", pieces(b"left"))
    await files.storage.write(f"files/acme/{output.id}.00000000", pieces(b"left"))
    (folder / "partial").mkdir(exist_ok=True)
    (folder / "partial" / "dead").write_bytes(b"half")
    reached = asyncio.Event()
    upload = asyncio.create_task(files.create("acme", "a", "batch", stuck(b"x" * 2 * MIB, reached)))
    await reached.wait()
    under_way = [name for name in objects(folder) if name.startswith("partial/") and not name.endswith("dead")]
    sweeper = Sweeper(files.storage, files.registry, NameAgeTracker(10, lambda: now), NameAgeTracker(20, lambda: now))
    assert await sweeper.sweep() == []
    now = 9.9
    assert await sweeper.sweep() == []
    now = 10.0
    assert len(await sweeper.sweep()) == 3
    assert objects(folder) == sorted([kept.object_name, output.object_name, "partial/dead", *under_way])
    upload.cancel()
    now = 20.0
    with suppress(asyncio.CancelledError):
        await upload
    assert await sweeper.sweep() == ["partial/dead"]
    assert objects(folder) == sorted([kept.object_name, output.object_name])


async def test_an_upload_between_its_bytes_and_its_record_is_no_stray(files):
    sweeper = Sweeper(files.storage, files.registry, NameAgeTracker(0))
    async with files.receiving("acme", pieces(b"x")) as upload:
        assert await sweeper.sweep() == []
        record = await upload.keep("a", "batch", None)
    assert await sweeper.sweep() == []
    assert await whole(files.content(record)) == b"x"


async def test_a_redis_without_its_data_costs_nothing_for_an_hour(valkey, files, folder):
    record = await bring(files)
    await valkey.flushall()
    assert await Sweeper(files.storage, files.registry).sweep() == []
    assert objects(folder) == [record.object_name]


async def test_empty_folders_go_with_what_was_in_them(files, folder):
    await asyncio.gather(*[files.storage.write(f"batches/{i}/parts/0", pieces(b"x")) for i in range(20)])
    names = await files.storage.list("batches/")
    assert len(names) == 20
    await asyncio.gather(*[files.storage.delete([name]) for name in names])
    assert [path for path in folder.rglob("*") if path.name != "partial"] == []
