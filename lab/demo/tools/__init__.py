"""Generates, from a seed, the conversations about tools that the demo adapter `tools` is trained with and measured by.
The held-out set has tools of its own, and mostly other values."""

from __future__ import annotations

from lab.demo.characters import Shape

TOOLS_SHAPE = Shape(
    rank=12,
    alpha=24,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Shape of the adapter `tools`. Unlike the characters' adapters, it targets every projection, because copying values
from a request takes more than a manner of speech."""
