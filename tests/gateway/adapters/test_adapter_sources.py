"""Where adapters may come from, and what is told when they may not or cannot."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fake_hub import REPO, fake_hub

from engine.process.adapter_files import PEFT_FILES
from gateway.adapters import fetch as adapter_fetch
from gateway.adapters.sources import AdapterSources
from gateway.config.sections import AdaptersConfig
from gateway.core.errors import ApiError, Fault

CONTENT = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": b"weights" * 1000}
ALLOWED = "memory://bucket/served/"
CONFIG = AdaptersConfig(hub=("acme/*",), urls=(ALLOWED,), fetch_timeout_s=20.0, max_fetch_gb=1e-4)


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "root"
    (folder / "tone").mkdir(parents=True)
    return folder


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make(root, cache):
    opened = []

    def build(endpoint: str | None = None, **changes) -> AdapterSources:
        opened.append(AdapterSources(replace(CONFIG, roots=(root,), **changes), cache, endpoint))
        return opened[-1]

    yield build
    for sources in opened:
        sources.close()


@pytest.fixture
def bucket():
    """What lies in an object store: `put(path below the allowed prefix)`."""
    store = fsspec.filesystem("memory")

    def put(path: str, content: dict[str, bytes] = CONTENT, base: str = ALLOWED) -> str:
        for name, data in content.items():
            store.pipe_file(f"{base}{path}/{name}", data)
        return f"{base}{path}"

    yield put
    store.rm("/", recursive=True)


@pytest.fixture
def hub():
    with fake_hub({**CONTENT, "adapter_model.bin": b"a pickle", "nested/adapter_config.json": b"{}"}) as running:
        yield running


async def refusal(sources: AdapterSources, source: str) -> str:
    with pytest.raises(ApiError) as caught:
        await sources.fetch(source)
    assert caught.value.fault is Fault.INVALID_REQUEST
    assert caught.value.param == "lora_path"
    assert "\n" not in caught.value.message
    return caught.value.message


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(cache: Path) -> list[Path]:
    return list((cache / "urls").glob(".*"))


# --- local folders ------------------------------------------------------------------------------------------------


async def test_folders_below_a_root(make, root, tmp_path):
    sources = make()
    for source in ("tone", str(root / "tone"), f"file://{root / 'tone'}", "./tone", f"{root}/../root/tone"):
        assert await sources.fetch(source) == root / "tone"
    (tmp_path / "link").symlink_to(root)
    assert await sources.fetch(str(tmp_path / "link" / "tone")) == root / "tone"


async def test_gguf_files_below_a_root(make, root, tmp_path):
    (root / "tone.gguf").touch()
    (tmp_path / "preloaded.gguf").touch()
    (tmp_path / "other.gguf").touch()
    sources = make(preload={"a": tmp_path / "preloaded.gguf"})
    for source in ("tone.gguf", str(root / "tone.gguf"), f"file://{root / 'tone.gguf'}"):
        assert await sources.fetch(source) == root / "tone.gguf"
    assert await sources.fetch(str(tmp_path / "preloaded.gguf")) == tmp_path / "preloaded.gguf"
    (root / "link.gguf").symlink_to(tmp_path / "other.gguf")
    (root / "tone.bin").touch()
    for source in (str(tmp_path / "other.gguf"), "link.gguf", "absent.gguf", "tone.bin"):
        assert "nor a GGUF file there" in await refusal(sources, source)


async def test_what_was_preloaded_is_a_root_and_so_is_the_cache(make, cache, tmp_path):
    for folder in (tmp_path / "elsewhere" / "a", cache / "urls" / "b"):
        folder.mkdir(parents=True)
    sources = make(preload={"a": tmp_path / "elsewhere" / "a"})
    assert await sources.fetch(str(tmp_path / "elsewhere" / "a")) == tmp_path / "elsewhere" / "a"
    assert await sources.fetch(str(cache / "urls" / "b")) == cache / "urls" / "b"
    assert "not a folder" in await refusal(sources, str(tmp_path / "elsewhere"))


WAYS_OUT = ("../outside", "/etc", "file:///etc", "file://../outside", "link", "loop", "a\0b", "x" * 5000)


async def test_what_is_allowed_later_holds_from_then_on(make, root, cache, tmp_path):
    """Folders that were preloaded are an exception: what they hold is served until an operator unloads it."""
    other, preloaded = tmp_path / "other", tmp_path / "preloaded"
    for folder in (other / "poet", preloaded):
        folder.mkdir(parents=True)
    sources = make(preload={"tone": preloaded})
    sources.allow(AdaptersConfig(roots=(other,)), cache)
    assert await sources.fetch("poet") == other / "poet"
    assert await sources.fetch(str(preloaded)) == preloaded
    for source in (str(root / "tone"), "tone", "acme/thing", ALLOWED + "x"):
        with pytest.raises(ApiError):
            await sources.fetch(source)


@pytest.mark.parametrize("source", WAYS_OUT, ids=lambda source: repr(source)[:20])
async def test_ways_out_of_the_roots(source, make, root, tmp_path):
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    assert "not a folder below a configured adapter root" in await refusal(make(), source)


# --- the hub ------------------------------------------------------------------------------------------------------


async def test_a_hub_id_is_fetched_with_its_two_files_only(make, hub, cache):
    folder = await make(hub.url).fetch(REPO)
    assert files_of(folder) == CONTENT
    assert folder.is_relative_to(cache / "hub")
    assert folder.name == hub.commit("main")
    assert not [path for path in hub.asked if "pickle" in path or "adapter_model.bin" in path or "nested" in path]


async def test_a_revision_is_fetched_by_name(make, hub):
    hub.revisions["v2"] = {**CONTENT, "adapter_config.json": b'{"r": 2}'}
    sources = make(hub.url)
    assert files_of(await sources.fetch(f"{REPO}@v2"))["adapter_config.json"] == b'{"r": 2}'
    assert files_of(await sources.fetch(REPO)) == CONTENT


async def test_a_changed_repository_is_fetched_again(make, hub):
    sources = make(hub.url)
    first = await sources.fetch(REPO)
    hub.revisions["main"] = {**CONTENT, "adapter_model.safetensors": b"newer"}
    second = await sources.fetch(REPO)
    assert first != second
    assert files_of(second)["adapter_model.safetensors"] == b"newer"
    assert files_of(first) == CONTENT


async def test_a_local_folder_goes_before_a_hub_id(make, hub, root):
    (root / REPO).mkdir(parents=True)
    assert await make(hub.url).fetch(REPO) == root / REPO
    assert hub.asked == []


async def test_the_hub_is_asked_for_nothing_that_is_not_allowed(make, hub):
    assert "adapters.hub does not allow it" in await refusal(make(hub.url), "other/tone")
    told = await refusal(make(hub.url, hub=()), REPO)
    assert "not a folder below a configured adapter root" in told
    assert "add a pattern such as 'acme/*' there" in told and "adapters.hub" in told
    assert "not a folder" in await refusal(make(hub.url), "acme/../absent")
    assert hub.asked == []


async def test_what_the_hub_has_not(make, hub):
    sources = make(hub.url)
    assert "'acme/absent' cannot be fetched: RepositoryNotFoundError" in await refusal(sources, "acme/absent")
    assert f"{REPO}@v9" in await refusal(sources, f"{REPO}@v9")
    del hub.revisions["main"]["adapter_model.safetensors"]
    told = await refusal(sources, REPO)
    assert f"'{REPO}' cannot be fetched: it has adapter_model.bin but no adapter_model.safetensors: pickle" in told
    hub.revisions["main"] |= {"adapters.safetensors": b"mlx"}
    assert "which makes it an adapter of mlx-lm: fuse it" in await refusal(sources, REPO)
    hub.revisions["main"] |= {"adapter_model-00001-of-00002.safetensors": b""}
    assert "has its weights in 1 parts such as adapter_model-00001-of-00002" in await refusal(sources, REPO)
    hub.revisions["main"] = {"adapter_config.json": b"{}"}
    assert "it has no adapter_model.safetensors: name what PEFT's" in await refusal(sources, REPO)


async def test_a_subfolder_of_a_repository_is_refused_with_what_to_do(make, hub):
    del hub.revisions["main"]["adapter_config.json"]
    command = f"`hf download {REPO} --include 'nested/*' --local-dir DIR`, and load DIR/nested"
    told = await refusal(make(hub.url), REPO)
    assert "it has no adapter_config.json at its top, and its folders nested have one" in told and command in told
    told = await refusal(make(hub.url), f"{REPO}/nested")
    assert "whole repositories are loaded" in told and command in told
    assert "hf download" not in await refusal(make(hub.url, hub=()), f"{REPO}/nested")


async def test_small_files_of_the_tokenizer_are_fetched_too(make, hub):
    hub.revisions["main"] |= {"chat_template.jinja": b"{{ messages }}", "tokenizer.json": b"{}"}
    folder = await make(hub.url).fetch(REPO)
    assert files_of(folder) == {**CONTENT, "chat_template.jinja": b"{{ messages }}"}


async def test_the_only_gguf_file_of_a_repository_is_fetched(make, hub):
    gguf = {"tone-f16.gguf": b"GGUF", "README.md": b"# Tone", "more/other.gguf": b"GGUF"}
    hub.revisions |= {"one": gguf, "several": {**gguf, "tone-q8_0.gguf": b"GGUF"}, "both": {**CONTENT, **gguf}}
    sources = make(hub.url)
    assert files_of(await sources.fetch(f"{REPO}@one")) == {"tone-f16.gguf": b"GGUF"}
    assert files_of(await sources.fetch(f"{REPO}@both")) == CONTENT
    assert f"{REPO}@several has 2 GGUF files: name" in await refusal(sources, f"{REPO}@several")


async def test_a_hub_repository_too_large_is_not_downloaded(make, hub):
    hub.sizes["adapter_model.safetensors"] = 1 << 40
    assert "adapters.max_fetch_gb" in await refusal(make(hub.url), REPO)
    assert not [path for path in hub.asked if "resolve" in path]


# --- URLs ---------------------------------------------------------------------------------------------------------


async def test_a_url_is_fetched_with_its_two_files_only(make, bucket, cache):
    url = bucket("tone", {**CONTENT, "adapter_model.bin": b"a pickle"})
    folder = await make().fetch(url)
    assert files_of(folder) == CONTENT
    assert folder.parent == cache / "urls"
    assert leftovers(cache) == []
    assert await make().fetch(f"{url}/") == folder


async def test_a_url_may_name_a_gguf_file(make, bucket, cache):
    url = f"{bucket('tone', {'a.gguf': b'GGUF', 'b.gguf': b'other', **CONTENT})}/a.gguf"
    folder = await make().fetch(url)
    assert files_of(folder) == {"a.gguf": b"GGUF"}
    assert folder.parent == cache / "urls"


async def test_content_names_the_folder(make, bucket):
    sources = make()
    first = await sources.fetch(bucket("tone"))
    assert await sources.fetch(bucket("copy")) == first
    second = await sources.fetch(bucket("tone", {**CONTENT, "adapter_config.json": b"{}"}))
    assert second != first
    assert files_of(first) == CONTENT


@pytest.mark.parametrize(
    "url",
    [
        "memory://bucket/other/tone",
        "memory://bucket/servedx",
        "s3://bucket/served/tone",
        "https://example.org/served/tone",
        "FILE:///etc",
        "local:///etc",
        f"{ALLOWED}../other/tone",
        f"{ALLOWED}a/../../other/tone",
        f"{ALLOWED}%2e%2e/other",
        f"{ALLOWED}x::file:///etc",
        f"simplecache::{ALLOWED}tone",
        f"{ALLOWED}tone?redirect=1",
        f"{ALLOWED}user@host",
    ],
)
async def test_urls_not_allowed(url, make, bucket, cache):
    bucket("tone", base="memory://bucket/other/")
    message = await refusal(make(), url)
    assert repr(url) in message
    assert "adapters.urls" in message or "without '..'" in message
    assert not cache.exists()


async def test_no_url_is_allowed_unless_configured(make, bucket):
    assert "adapters.urls" in await refusal(make(urls=()), bucket("tone"))


@pytest.mark.parametrize("missing", PEFT_FILES)
async def test_a_url_with_a_missing_file(missing, make, bucket, cache):
    url = bucket("tone", {name: data for name, data in CONTENT.items() if name != missing})
    message = await refusal(make(), url)
    assert f"{url!r} cannot be fetched: FileNotFoundError" in message
    assert missing in message
    assert leftovers(cache) == []


async def test_a_url_too_large_is_given_up(make, bucket, cache):
    url = bucket("tone", {**CONTENT, "adapter_model.safetensors": bytes(200_000)})
    assert "adapters.max_fetch_gb" in await refusal(make(), url)
    assert leftovers(cache) == []
    assert list((cache / "urls").iterdir()) == []


async def test_a_missing_library_is_named_with_what_to_install(make):
    fsspec.register_implementation("absent", "not_installed.FileSystem", errtxt="Install not_installed", clobber=True)
    message = await refusal(make(urls=("absent://bucket/",)), "absent://bucket/tone")
    assert "Install not_installed; pip install 'loralane[remote]'" in message


async def test_an_unknown_scheme(make):
    assert "Protocol not known" in await refusal(make(urls=("nowhere://bucket/",)), "nowhere://bucket/tone")


class Gate:
    """Holds every copy until it is opened, and counts them."""

    def __init__(self, monkeypatch) -> None:
        self.opened, self.entered, self.count = threading.Event(), threading.Event(), 0
        copy = adapter_fetch._copy

        def held(*arguments):
            self.count += 1
            self.entered.set()
            assert self.opened.wait(10)
            return copy(*arguments)

        monkeypatch.setattr(adapter_fetch, "_copy", held)


async def test_concurrent_fetches_of_one_source_are_one(make, bucket, monkeypatch):
    gate, sources, url = Gate(monkeypatch), make(), bucket("tone")
    fetches = [asyncio.create_task(sources.fetch(url)) for _ in range(5)]
    await asyncio.to_thread(gate.entered.wait, 10)
    fetches.pop().cancel()  # a caller that leaves takes the folder from no other
    gate.opened.set()
    folders = await asyncio.gather(*fetches)
    assert len(set(folders)) == gate.count == 1
    await sources.fetch(url)
    assert gate.count == 2


async def test_a_failed_fetch_fails_all_who_share_it_and_is_tried_again(make, bucket, monkeypatch):
    gate, sources = Gate(monkeypatch), make()
    gate.opened.set()
    outcomes = await asyncio.gather(*(sources.fetch(f"{ALLOWED}late") for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ApiError] * 3
    assert gate.count == 1
    assert files_of(await sources.fetch(bucket("late"))) == CONTENT


async def test_a_source_too_slow_is_given_up(make, bucket, cache, monkeypatch):
    gate, sources, url = Gate(monkeypatch), make(fetch_timeout_s=0.05), bucket("tone")
    message = await refusal(sources, url)
    assert "took longer than 0.05 s" in message
    gate.opened.set()  # the thread goes on, finds itself too late, and leaves nothing behind
    sources._threads.shutdown(wait=True)
    assert os.listdir(cache / "urls") == []
