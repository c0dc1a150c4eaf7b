"""Configuration of the scheduling core: frozen, validated once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Sizes and limits the planner works within.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    num_pages: int
    """Pages in the pool. Page 0 is the null page: always zero, never handed out."""
    block_size: int = 16
    """Tokens a page."""
    max_seqs: int = 32
    """Sequences running at once."""
    max_model_len: int = 2048
    """Prompt and output tokens of one sequence."""
    token_budget: int = 256
    """Tokens computed a step, over all sequences."""
    max_resident_adapters: int = 1024
    """Rows of the adapter indirection table; what truly bounds residency is pages."""
    max_waiting: int = 10_000
    """Requests in the waiting queue before new ones are refused."""
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_seqs", "max_model_len", "token_budget", "max_resident_adapters", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is the null page), not {self.num_pages}")
        if self.token_budget < self.max_seqs:
            raise ValueError(f"token_budget ({self.token_budget}) must be at least max_seqs ({self.max_seqs})")

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of KV."""
        return -(-num_tokens // self.block_size)
