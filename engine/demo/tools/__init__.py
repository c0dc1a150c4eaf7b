"""Conversations about tools: what the demo adapter `tools` learns from, and what its training is measured by.

Everything is generated from a seed. The held-out set has tools, phrasings and values that no training conversation has.
"""

from __future__ import annotations

from engine.demo.characters import Shape

TOOLS_SHAPE = Shape(
    rank=12,
    alpha=24,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Every projection, unlike the characters: copying values out of a request takes more than a manner of speech."""
