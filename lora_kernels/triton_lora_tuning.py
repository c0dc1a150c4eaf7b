"""Block sizes of the LoRA kernels: what an autotuner may vary, and a file for a device may set."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lora_kernels.layout import RANK_TILE
from lora_kernels.tuning import require_power_of_two

PART_UNIT = 256
"""Parts of the inner dimension are multiples of this, whatever the blocks: every block of it divides it."""
INSTRUCTION_ROWS = 8
"""Rows of the batch that one tensor-core instruction multiplies with 16 rows of weights: its n, in m16n8k16."""
LEAST_K = 32
"""Inner dimension that is fed to an instruction at once where weights have 8 bits."""
WARP_GROUP, WARP_GROUP_HEIGHT = 4, 64
"""From this many warps and rows of weights on, Hopper multiplies by another instruction (wgmma), to other bits."""


@dataclass(frozen=True, slots=True)
class LoraTuning:
    """Shipped block sizes. None of them changes a bit of a result, but for `k_per_split` and `max_splits`.

    Attributes:
        k_per_split: inner dimension that one shrink program sums up at least, until there are `max_splits` parts.
        max_splits: parts of the inner dimension at most.
        narrow_rows, narrow_k: rows of a tile with few of them, and the step over the inner dimension there.
        tile_rows, tile_k: the same of other tiles of short segments.
        shrink_warps, shrink_stages: of programs that shrink either.
        fp8_shrink_warps: where A is FP8: each warp of a narrow tile converts all of it.
        expand_block, expand_warps, expand_stages: output columns of a program that expands either, and its launch.
        long_from: rows from which on a segment is long: cut into higher tiles, its inner dimension left in one piece.
        long_rows, long_ranks, long_k: rows, ranks and inner step of a tile of a long segment.
        long_shrink_warps, long_shrink_stages, long_expand_block, long_expand_warps: likewise.
        long_expand_rows: rows that are expanded at a time.
        shrink_programs, expand_programs: tiles side by side in a recorded launch; what is beyond them is walked.

    Raises:
        ValueError: a size is no power of two, or does not fit the others; the message names it.
    """

    k_per_split: int = 1024
    max_splits: int = 8
    narrow_rows: int = 8
    narrow_k: int = 128
    tile_rows: int = 32
    tile_k: int = 64
    shrink_warps: int = 2
    shrink_stages: int = 4
    fp8_shrink_warps: int = 1
    expand_block: int = 128
    expand_warps: int = 2
    expand_stages: int = 1
    long_from: int = 512
    long_rows: int = 64
    long_ranks: int = 32
    long_k: int = 64
    long_shrink_warps: int = 8
    long_shrink_stages: int = 4
    long_expand_rows: int = 32
    long_expand_block: int = 64
    long_expand_warps: int = 2
    shrink_programs: int = 128
    expand_programs: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name not in _COUNTS:
                require_power_of_two(field.name, size)
            elif size < 1:
                raise ValueError(f"{field.name} must be positive, not {size}")
        for name in ("narrow_k", "tile_k", "long_k"):
            if not LEAST_K <= getattr(self, name) <= PART_UNIT:
                raise ValueError(f"{name} must be {LEAST_K} to {PART_UNIT}, not {getattr(self, name)}")
        if not INSTRUCTION_ROWS <= self.narrow_rows <= self.tile_rows:
            raise ValueError(f"narrow_rows must be {INSTRUCTION_ROWS} to tile_rows, not {self.narrow_rows}")
        if self.long_rows < INSTRUCTION_ROWS or self.long_ranks < RANK_TILE:
            raise ValueError(f"a tile of {self.long_rows} rows and {self.long_ranks} ranks is less than an instruction")
        self._refuse_warp_groups()

    def num_splits(self, in_features: int) -> int:
        """Parts of the inner dimension. Depends on nothing else, so that a row's sums are always added the same way."""
        return min(self.max_splits, -(-in_features // self.k_per_split))

    def shrink_options(self, long: bool, fp8: bool) -> dict[str, int]:
        """Constants and launch options of `shrink_kernel`, for segments that are long or not."""
        if long:
            blocks = {"RANKS": self.long_ranks, "ROWS": self.long_rows, "BLOCK_K": self.long_k}
            launch = {"num_warps": self.long_shrink_warps, "num_stages": self.long_shrink_stages}
            return {"SERIAL": True, "NARROW_ROWS": self.long_rows, "NARROW_K": self.long_k, **blocks, **launch}
        blocks = {"RANKS": RANK_TILE, "ROWS": self.tile_rows, "BLOCK_K": self.tile_k}
        launch = {"num_warps": self.fp8_shrink_warps if fp8 else self.shrink_warps, "num_stages": self.shrink_stages}
        return {"SERIAL": False, "NARROW_ROWS": self.narrow_rows, "NARROW_K": self.narrow_k, **blocks, **launch}

    def expand_options(self, long: bool, splits: int) -> dict[str, int]:
        """The same of `expand_kernel`, after a shrink in so many parts."""
        if long:
            blocks = {"SPLITS": 1, "ROWS": self.long_expand_rows, "BLOCK_N": self.long_expand_block}
            return {**blocks, "num_warps": self.long_expand_warps, "num_stages": self.expand_stages}
        blocks = {"SPLITS": splits, "ROWS": self.narrow_rows, "BLOCK_N": self.expand_block}
        return {**blocks, "num_warps": self.expand_warps, "num_stages": self.expand_stages}

    def _refuse_warp_groups(self) -> None:
        """One instruction for all tiles is what makes a row's bits independent of the tile it came to lie in."""
        heights = {"long_shrink": self.long_ranks, "expand": self.expand_block, "long_expand": self.long_expand_block}
        for name, height in heights.items():
            warps = getattr(self, f"{name}_warps")
            if height >= WARP_GROUP_HEIGHT and warps % WARP_GROUP == 0:
                raise ValueError(f"{name}_warps must be less than {WARP_GROUP} for tiles of {height} rows of weights")


_COUNTS = {"shrink_stages", "long_shrink_stages", "expand_stages", "long_from", "shrink_programs", "expand_programs"}
"""Need not be powers of two."""
SHIPPED = LoraTuning()
