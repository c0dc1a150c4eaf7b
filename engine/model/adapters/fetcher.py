"""Reads adapters from disk into host memory, in threads that run concurrently with the steps."""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import structlog
import torch

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AdapterFetched, FetchAnswer, FetchCancelled, FetchFailed
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch
from engine.executor.base import Claim, Report
from engine.model.adapters.packing import Packer
from engine.model.adapters.peft.folder import PeftFolder
from engine.model.memory.host_store import HostStore

log = structlog.get_logger("fetcher")

RETRY_AFTER_S = (0.05, 0.2)
"""Pauses before the second and the third try, in seconds: long enough for a busy network file system, and short enough
for the requests that wait."""
LASTING = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors that another attempt cannot fix."""


def start_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of `count` threads, named after `name`, that run torch operations without further threads."""
    # With more OpenMP threads than cores libgomp stops spinning in all of them: every step took 2.5 times as long after
    # one adapter was loaded by a thread with four.
    return ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(1,))


class _CalledOff(Exception):
    """Raised in a fetch that was cancelled, because no request waits for the adapter any more."""


class Fetcher:
    """Reads and packs adapters into `store`: for plans, or for callers that wait. `report` gets exactly one answer to
    each fetch, which is tried up to three times, in the thread that reads. A fetch fails for another content hash."""

    def __init__(self, packer: Packer, store: HostStore, report: Report, num_threads: int) -> None:
        self._packer = packer
        self._store = store
        self._report = report
        self._threads = start_threads(num_threads, "fetch")
        self._loaders = start_threads(num_threads, "load")
        self._called_off: dict[AdapterHash, Event] = {}

    def begin(self, fetch: AdapterFetch) -> None:
        event = self._called_off[fetch.adapter_hash] = Event()
        self._threads.submit(self._answer, fetch, event)

    def cancel(self, adapter_hash: AdapterHash) -> None:
        """Cancel a fetch, which stops before its next read or before packing and is answered with `FetchCancelled`. A
        fetch that is being packed continues. Does nothing if the fetch has been answered."""
        event = self._called_off.get(adapter_hash)
        if event is not None:
            event.set()

    def load(self, path: str, claim: Claim) -> HostAdapter:
        """Read and validate a PEFT folder in a loader thread, wait, and return its facts. If `claim` then returns True,
        pack the adapter and report it. Raises ValueError, which says why, if the adapter is refused. Thread-safe."""
        return self._loaders.submit(self._load, path, claim).result()

    def _load(self, path: str, claim: Claim) -> HostAdapter:
        started = time.perf_counter()
        folder = self._packer.read(path)
        host = self._packer.check(folder)
        if claim(host):
            try:
                self._store.put(self._packer.pack(folder))
            except Exception as error:  # every claim is answered, also after an error
                self._report(FetchFailed(host.adapter_hash, repr(error)))
                raise
            self._report(AdapterFetched(host.adapter_hash, time.perf_counter() - started))
        return host

    def _answer(self, fetch: AdapterFetch, called_off: Event) -> None:
        answer = self._try(fetch, called_off)
        del self._called_off[fetch.adapter_hash]
        self._report(answer)

    def _try(self, fetch: AdapterFetch, called_off: Event) -> FetchAnswer:
        started = time.perf_counter()
        try:
            self._store.put(self._packer.pack(self._read(fetch, called_off)))
        except _CalledOff:
            return FetchCancelled(fetch.adapter_hash)
        except (ValueError, OSError) as error:
            log.warning("adapter_not_read", adapter=fetch.adapter_hash, path=fetch.path, reason=str(error))
            return FetchFailed(fetch.adapter_hash, str(error))
        except Exception as error:  # a bug, but requests that wait must get an answer, or would wait for ever
            log.error("fetch_failed", adapter=fetch.adapter_hash, path=fetch.path, trace=traceback.format_exc())
            return FetchFailed(fetch.adapter_hash, repr(error))
        return AdapterFetched(fetch.adapter_hash, time.perf_counter() - started)

    def _read(self, fetch: AdapterFetch, called_off: Event) -> PeftFolder:
        for pause in (*RETRY_AFTER_S, None):
            if called_off.is_set():
                raise _CalledOff
            try:
                folder = self._packer.read(fetch.path)
                break
            except (ValueError, OSError) as error:
                if pause is None or not _may_pass(error):
                    raise
                called_off.wait(pause)
        if called_off.is_set():
            raise _CalledOff
        if folder.adapter_hash != fetch.adapter_hash:
            raise ValueError(f"{fetch.path} has changed since it was loaded; load it again to serve what it holds now")
        return folder


def _may_pass(error: Exception) -> bool:
    """Return whether the error is, or was caused by, an OSError other than `LASTING`: the disk or the network failed,
    so the next attempt may succeed."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, LASTING)
