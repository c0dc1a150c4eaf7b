"""KV pages that move between engines: pages that this one fetches from another (imports), and those that others fetch
from it (exports). Both pass through the host tier, so that the core plans them like its own saves and restores.

    import   reserve host pages -> FetchPages -> PagesCame ... -> FetchEnded
    export   ExportPages -> save pages as they become full and lease the copies -> PagesReady, PagesSent ...
             -> ExportOver -> EndExport

Requests whose next page is being fetched wait until it has come, the fetch has ended or its deadline has passed; what
has not come by then is computed. A page holds all layers, so pages are what overlaps transfers with computing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.core.messages.requests import HostPageId, KvSource, PrefixKey


class PageMemory(Protocol):
    """Interface through which moves between engines read and write the host pages to which plans save KV. Any thread
    may use it."""

    @property
    def page_bytes(self) -> int: ...

    def page(self, host_page: HostPageId) -> memoryview:
        """Return the bytes of a host page, which may be written."""

    def settle(self) -> None:
        """Wait until all copies of the plans submitted so far between the device and host pages are done."""


class FetchEnd(Enum):
    """How a fetch of KV pages from another engine ended."""

    DONE = "done"
    """All pages have come."""
    LATE = "late"
    """The deadline passed before all pages had come, so that this engine gave up."""
    GONE = "gone"
    """The other engine did not have all pages, and was not computing them."""
    REFUSED = "refused"
    """The other engine speaks another version, serves another model or shape of pages, or serves too many others."""
    CORRUPT = "corrupt"
    """A checksum was wrong, or the other side did not follow the protocol."""
    CUT = "cut"
    """The other engine could not be reached, or the connection broke."""
    BUSY = "busy"
    """This engine had too many fetches under way, or no host page for another one."""
    CANCELLED = "cancelled"
    """No request needed the pages any more."""


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Order to the mover (the threads that move KV pages between engines): fetch the pages of `keys` from another
    engine and write each into the host page at its place. The mover answers with `PagesCame` as they come, in order,
    and with exactly one `FetchEnded`, after which it writes no more."""

    id: int
    source: KvSource
    deadline: float
    """When to give up, in seconds on the engine's clock."""
    keys: tuple[PrefixKey, ...]
    host_pages: tuple[HostPageId, ...]


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Order to the mover: end a fetch of KV pages from another engine soon. It may have ended already."""

    id: int


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Order to the mover: send the next KV pages that another engine fetches (an export), from these host pages."""

    id: int
    host_pages: tuple[HostPageId, ...]


@dataclass(frozen=True, slots=True)
class ExportOver:
    """Order to the mover: no further KV pages will be ready for an export to another engine."""

    id: int


@dataclass(frozen=True, slots=True)
class PagesCame:
    """Report of the mover: the next `count` KV pages of a fetch from another engine are in their host pages."""

    id: int
    count: int


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """Report of the mover, the last one about a fetch of KV pages from another engine. The pages came in `seconds`,
    without the time in which the other engine computed them."""

    id: int
    end: FetchEnd
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ExportPages:
    """Report of the mover: another engine wants the pages of these keys, in this order. With `waits`, it also wants
    those that requests will compute until the mover reports `EndExport`."""

    id: int
    keys: tuple[PrefixKey, ...]
    waits: bool


@dataclass(frozen=True, slots=True)
class PagesSent:
    """Report of the mover: another engine has received the next `count` KV pages of an export, and they are not read
    any more."""

    id: int
    count: int


@dataclass(frozen=True, slots=True)
class EndExport:
    """Report of the mover, the last one about an export of KV pages to another engine: it reads none of them any
    more."""

    id: int


MoveOrder = FetchPages | CancelFetch | PagesReady | ExportOver
MoveReport = PagesCame | FetchEnded | ExportPages | PagesSent | EndExport
