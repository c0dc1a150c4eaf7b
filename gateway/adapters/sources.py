"""Finds adapters in folders and GGUF files below the configured roots and, where an operator allows it, on the Hugging
Face Hub and in object stores. Fetched adapters become local folders."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from engine.process.adapter_files import is_place
from gateway.adapters.fetch import FetchLimits, fetch_hub, fetch_url
from gateway.config.sections import AdaptersConfig
from gateway.core.errors import MAX_QUOTED, ApiError, clip, invalid_request

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})(?:@(?P<revision>\S{1,200}))?"
)
"""`org/name`, or `org/name@revision`."""
HUB_FOLDER = re.compile(r"(?P<repo>[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95})/(?P<folder>[\w-][\w./-]{0,200})")
"""`org/name/folder`, a subfolder of a repository."""
FILE_URL = "file://"
FETCH_THREADS = 4
"""Maximum number of concurrent downloads."""

Work = Callable[[], Path]


class LocalSources:
    """Finds adapters in local folders and GGUF files: all those below the given roots, and further ones that are listed
    one by one."""

    def __init__(self, roots: Collection[Path], folders: Collection[Path] = ()) -> None:
        """
        Args:
            roots: folders below which adapters may lie.
            folders: further folders with one adapter each, or GGUF files. No other folder is ever read.
        """
        self._roots = tuple(root.resolve() for root in roots)
        self._folders = frozenset(folder.resolve() for folder in folders)

    async def fetch(self, source: str) -> Path:
        """Return the folder or file of an adapter, without symbolic links. `source` is absolute, or relative to a root.
        Raises ApiError (INVALID_REQUEST) if it is neither below a root nor listed, or is missing."""
        return self.confine(source)

    def confine(self, source: str) -> Path:
        """Return the folder or file of an adapter as `fetch` does, without awaiting. An absolute path need not
        exist."""
        with suppress(OSError, ValueError, RuntimeError):  # too long a name, a null byte, a loop of links
            for root in self._roots:
                folder = (root / source).resolve()
                if folder.is_relative_to(root) and (is_place(folder) or Path(source).is_absolute()):
                    return folder
            if Path(source).is_absolute() and (folder := Path(source).resolve()) in self._folders:
                return folder
        raise _refused(f"{_quoted(source)} is not a folder below a configured adapter root, nor a GGUF file there")


class AdapterSources:
    """Makes adapters in folders and files, on the Hugging Face Hub and at URLs available. Local ones are served in
    place; others are fetched anew for each load, in one fetch for concurrent requests."""

    def __init__(self, config: AdaptersConfig, cache: Path, hub_endpoint: str | None = None) -> None:
        """
        Args:
            config: the allowed sources and the limits of fetches.
            cache: folder for fetched adapters. It is a root, too.
            hub_endpoint: address of the hub. None means the default of huggingface_hub.
        """
        self._hub_endpoint = hub_endpoint
        self._preloaded: set[Path] = set()
        self.allow(config, cache)
        self._threads = ThreadPoolExecutor(FETCH_THREADS, "adapter-sources")
        self._fetches: dict[str, asyncio.Task[Path]] = {}

    def allow(self, config: AdaptersConfig, cache: Path) -> None:
        """Set the allowed sources and limits from `config`, and the folder for downloads (`cache`). Folders that were
        ever preloaded stay allowed: their adapters are served until an operator unloads them, also by a later
        engine."""
        self._preloaded |= set(config.preload.values())
        self._local = LocalSources((*config.roots, cache), self._preloaded)
        self._config, self._cache = config, cache

    async def fetch(self, source: str) -> Path:
        """Return a local folder or GGUF file of the adapter at `source`: a path, a hub id, `org/name` or
        `org/name@revision`, or a URL. Downloads outlive a cancelled caller. Raises ApiError: INVALID_REQUEST;
        INSUFFICIENT_STORAGE."""
        work = self._work(source)
        if work is None:
            return await self._local.fetch(source.removeprefix(FILE_URL))
        if source not in self._fetches:
            task = self._fetches[source] = asyncio.create_task(self._run(source, work))
            task.add_done_callback(partial(self._forget, source))
        # A caller that is cancelled must not cancel the fetch for the others.
        return await asyncio.shield(self._fetches[source])

    def close(self) -> None:
        """Cancel downloads that have not started, and start no more. A running one goes on in its thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, source: str) -> Work | None:
        """Return a blocking function that downloads `source`, or None for a local folder. Raises ApiError
        (INVALID_REQUEST) if the configuration does not allow the URL or hub id, or it names a hub repository's
        subfolder."""
        if "://" in source and not source.startswith(FILE_URL):
            return self._url_work(source)
        if (hub_id := HUB_ID.fullmatch(source)) and not self._is_local(source):
            return self._hub_work(hub_id["repo"], hub_id["revision"])
        if (inner := HUB_FOLDER.fullmatch(source)) and self._config.hub and not self._is_local(source):
            raise _whole(inner["repo"], inner["folder"])
        return None

    def _url_work(self, url: str) -> Work:
        if any(part in url for part in ("::", "?", "#", "@", "\\", "%")) or ".." in url.split("/"):
            raise _refused(
                f"{_quoted(url)}: a URL of an adapter is scheme://place/path, without '..', '@', '?' or '::'"
            )
        if not any(url.startswith(prefix) for prefix in self._config.urls):
            raise _refused(f"{_quoted(url)} is not below any of adapters.urls")
        return partial(fetch_url, url, self._cache / "urls", self._bounds())

    def _hub_work(self, repo: str, revision: str | None) -> Work:
        if not any(fnmatchcase(repo, pattern) for pattern in self._config.hub):
            raise _refused(
                f"{_quoted(repo)} is not a folder below a configured adapter root, and adapters.hub does not allow it: "
                "to fetch it from the Hugging Face Hub, add a pattern such as "
                f"{_quoted(repo.partition('/')[0] + '/*')} there"
            )
        return partial(fetch_hub, repo, revision, self._cache / "hub", self._bounds(), self._hub_endpoint)

    def _bounds(self) -> FetchLimits:
        return FetchLimits.within(self._config.fetch_timeout_s, int(self._config.max_fetch_gb * 2**30))

    def _is_local(self, source: str) -> bool:
        try:
            return is_place(self._local.confine(source))
        except ApiError:
            return False

    async def _run(self, source: str, work: Work) -> Path:
        seconds = self._config.fetch_timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise _refused(f"{_quoted(source)} took longer than {seconds:g} s (adapters.fetch_timeout_s)") from error

    def _forget(self, source: str, task: asyncio.Task[Path]) -> None:
        del self._fetches[source]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved


def _whole(repo: str, folder: str) -> ApiError:
    return _refused(
        f"{_quoted(f'{repo}/{folder}')} is not a folder below a configured adapter root, and of the hub, whole "
        f"repositories are loaded: download it with `hf download {repo} --include '{folder}/*' --local-dir DIR`, and "
        f"load DIR/{folder}"
    )


def _quoted(source: str) -> str:
    """Return a source in quotation marks for an error message, so short that what the message says of it is not cut."""
    return clip(repr(source), MAX_QUOTED)


def _refused(message: str) -> ApiError:
    return invalid_request(message, "lora_path")
