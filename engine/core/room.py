"""Amounts of the resources that a sequence needs to start or to grow, or that are free."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """Amounts of resources, either needed or free.

    An adapter's pages count both as `pages` and as `adapter_pages`, because adapters may not take all pages.
    """

    pages: int
    slots: int = 0
    """Slots of running sequences, of which there are `max_seqs`."""
    adapter_pages: int = 0
    rows: int = 0
    """Rows of the adapter table."""

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
