"""What must be free for a sequence to start, in every kind of thing that can be short."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """Needed, or there. Pages of adapters are counted twice, because adapters may not take all pages."""

    pages: int
    slots: int = 0
    """Of running sequences."""
    adapter_pages: int = 0
    rows: int = 0
    """Of the adapter table."""

    def covers(self, need: Room) -> bool:
        return (
            self.pages >= need.pages
            and self.slots >= need.slots
            and self.adapter_pages >= need.adapter_pages
            and self.rows >= need.rows
        )

    def plus(self, other: Room) -> Room:
        return Room(
            self.pages + other.pages,
            self.slots + other.slots,
            self.adapter_pages + other.adapter_pages,
            self.rows + other.rows,
        )
