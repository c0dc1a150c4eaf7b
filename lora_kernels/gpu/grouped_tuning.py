"""Block sizes of the experts' products: the same on every GPU, because no device's tuning file has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_kernels.tuning import require_power_of_two

LEAST_BLOCK = 16
"""Least size of a block: the inner dimension of a tensor-core instruction with 16-bit numbers."""


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Block sizes and launch options of one launch.

    Raises:
        ValueError: A size is not a power of two (`num_stages`: not positive), or a block is below 16.
    """

    block_m: int
    block_n: int
    block_k: int
    """`block_m`, `block_n` and `block_k`: entries and outputs of a tile, and its step over the inner dimension."""
    num_warps: int
    num_stages: int
    """`num_warps` and `num_stages`: launch options. Each tile should have as many warps as Hopper's instruction (wgmma)
    needs, so that an entry has the same bits in each."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            require_power_of_two(name, getattr(self, name))
        if min(self.block_m, self.block_n, self.block_k) < LEAST_BLOCK or self.num_stages < 1:
            raise ValueError(f"blocks have at least {LEAST_BLOCK} numbers and launches one stage: {self}")

    @property
    def constants(self) -> dict[str, int]:
        """The constants and launch options of kernels."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


FEW = GroupedTile(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
"""For experts with few entries, where reading weights takes the time: low tiles, and 64 KiB of weights under way in
each program, of which two fit on a multiprocessor of an H100. Not measured: no GPU has run it."""
MANY = GroupedTile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
"""For experts with many entries, where products take the time: two programs fit on a multiprocessor. Not measured."""
MOST_FEW = 16
"""Average number of entries of an expert up to which a step has low tiles (`GroupedTuning.few`)."""


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """The tiles for steps whose experts have few entries on average, and for those whose experts have many."""

    few: GroupedTile = field(default=FEW)
    many: GroupedTile = field(default=MANY)

    def tile(self, entries: int, experts: int) -> GroupedTile:
        """Return the tile for `entries` entries of a layer with `experts` experts: `few` or `many`, by the average
        number of entries of an expert. It does not depend on which experts have them."""
        return self.few if entries <= MOST_FEW * experts else self.many


SHIPPED = GroupedTuning()
