"""Block sizes of the LoRA kernels, which an autotuner may vary and a device's tuning file may set."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lora_kernels.layout import RANK_TILE
from lora_kernels.tuning import require_power_of_two

PART_UNIT = 256
"""Parts of the inner dimension are multiples of this, independent of block sizes: every block of the inner dimension
divides it."""
INSTRUCTION_ROWS = 8
"""Rows of the batch that one tensor-core instruction multiplies with 16 rows of weights: the n of m16n8k16."""
LEAST_K = 32
"""Least step over the inner dimension, and least ranks in FP8: the k of one instruction with 8-bit weights."""
WARP_GROUP, WARP_GROUP_HEIGHT = 4, 64
"""Hopper uses another instruction (wgmma), which gives other bits, from this many warps and rows of weights on."""


@dataclass(frozen=True, slots=True)
class LoraTuning:
    """Block sizes and launch options, with the shipped ones as defaults. Only `k_per_split` and `max_splits` change the
    bits of results.

    Raises:
        ValueError: A size is not a power of two (`long_from`, stages, programs: not positive), a k is not 32 to 256,
            `narrow_rows` is above `tile_rows`, a tile is less than an instruction, or one would use wgmma.
    """

    k_per_split: int = 1024
    """The inner dimension is cut into parts of about this size, as long as `max_splits` parts suffice."""
    max_splits: int = 8
    """Maximum number of parts of the inner dimension."""
    narrow_rows: int = 8
    narrow_k: int = 128
    """`narrow_rows` and `narrow_k`: maximum rows of a narrow tile, and the step over the inner dimension in narrow
    tiles. An expand program for short segments processes `narrow_rows` rows at a time."""
    tile_rows: int = 16
    tile_k: int = 128
    """`tile_rows` and `tile_k`: the same for the other tiles of short segments."""
    shrink_warps: int = 2
    shrink_stages: int = 4
    """`shrink_warps` and `shrink_stages`: launch options of shrink programs for short segments."""
    fp8_shrink_warps: int = 1
    """Replaces `shrink_warps` where A is FP8, because each warp of a narrow tile converts all of A."""
    expand_block: int = 128
    expand_warps: int = 1
    expand_stages: int = 1
    """`expand_block`, `expand_warps` and `expand_stages`: output columns of an expand program for short segments, and
    its launch options; `expand_stages` also holds for long segments."""
    expand_ranks: int = 16
    """Ranks that an expand program processes at a time (at least 32 in FP8)."""
    long_from: int = 128
    """Number of rows from which on a segment is long: it is cut into taller tiles, and each of its shrink programs
    computes all parts of the inner dimension."""
    long_rows: int = 64
    long_ranks: int = 32
    long_k: int = 64
    """`long_rows`, `long_ranks` and `long_k`: rows, ranks and inner step of a tile of a long segment."""
    long_shrink_warps: int = 8
    long_shrink_stages: int = 5
    long_expand_rows: int = 32
    """Rows that an expand program for long segments processes at a time."""
    long_expand_block: int = 128
    long_expand_warps: int = 2
    """`long_shrink_warps`, `long_shrink_stages`, `long_expand_block` and `long_expand_warps`: the same options for long
    segments."""
    most_programs: int = 2048
    """Programs of a launch that are enough to fill a device; they walk over the tiles beyond."""
    early: int = 0
    """1 if kernels begin before the kernel launched before them has ended (compute capability 9.0 and up)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name not in _COUNTS:
                require_power_of_two(field.name, size)
            elif size < (field.name != "early"):
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
        """Return the number of parts into which the inner dimension is cut. It depends only on `in_features`, so that a
        row's sums are always added in the same way."""
        return min(self.max_splits, -(-in_features // self.k_per_split))

    def shrink_options(self, long: bool, fp8: bool) -> dict[str, int]:
        """Return the constants and launch options of `shrink_kernel` for long or short segments, FP8 or 16-bit A."""
        if long:
            blocks = {"RANKS": self.long_ranks, "ROWS": self.long_rows, "BLOCK_K": self.long_k}
            launch = {"num_warps": self.long_shrink_warps, "num_stages": self.long_shrink_stages}
            return {"SERIAL": True, "NARROW_ROWS": self.long_rows, "NARROW_K": self.long_k, **blocks, **launch}
        blocks = {"RANKS": RANK_TILE, "ROWS": self.tile_rows, "BLOCK_K": self.tile_k}
        launch = {"num_warps": self.fp8_shrink_warps if fp8 else self.shrink_warps, "num_stages": self.shrink_stages}
        return {"SERIAL": False, "NARROW_ROWS": self.narrow_rows, "NARROW_K": self.narrow_k, **blocks, **launch}

    def expand_options(self, long: bool, splits: int, fp8: bool) -> dict[str, int]:
        """Return the constants and launch options of `expand_kernel` for long or short segments, FP8 or 16-bit B, and
        `splits` parts of short segments' sums."""
        # A program for FP8 has half as many columns, because it holds twice as many ranks.
        ranks, shares = (max(self.expand_ranks, LEAST_K), 2) if fp8 else (self.expand_ranks, 1)
        common = {"RANKS": ranks, "num_stages": self.expand_stages}
        if long:
            blocks = {"SPLITS": 1, "ROWS": self.long_expand_rows, "BLOCK_N": self.long_expand_block // shares}
            return {**common, **blocks, "num_warps": self.long_expand_warps}
        blocks = {"SPLITS": splits, "ROWS": self.narrow_rows, "BLOCK_N": self.expand_block // shares}
        return {**common, **blocks, "num_warps": self.expand_warps}

    def num_programs(self, tiles: int, others: int) -> int:
        """Return the size of a launch along the axis of its list of `tiles` tiles: one for each, or as many as fill the
        device. `others` is the size along the other axis."""
        return min(tiles, max(1, self.most_programs // others))

    def early_options(self) -> dict[str, bool]:
        """Return the constant EARLY of the LoRA kernels and, if `early` is 1, the launch option for programmatic
        dependent launch."""
        return {"EARLY": True, "launch_pdl": True} if self.early else {"EARLY": False}

    def _refuse_warp_groups(self) -> None:
        """Raises ValueError if a tile would use wgmma. A row's bits are independent of the tile that holds it only if
        all tiles use the same instruction."""
        heights = {"long_shrink": self.long_ranks, "expand": self.expand_block, "long_expand": self.long_expand_block}
        for name, height in heights.items():
            warps = getattr(self, f"{name}_warps")
            if height >= WARP_GROUP_HEIGHT and warps % WARP_GROUP == 0:
                raise ValueError(f"{name}_warps must be less than {WARP_GROUP} for tiles of {height} rows of weights")


_COUNTS = {"shrink_stages", "long_shrink_stages", "expand_stages", "long_from", "most_programs", "early"}
"""Fields that must be positive (`early` may be 0) but need not be powers of two."""
SHIPPED = LoraTuning()
