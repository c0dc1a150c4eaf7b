"""Demo adapters of SmolLM2-135M-Instruct that come with the project, and what trains them."""

from __future__ import annotations

from pathlib import Path

DEMO_ADAPTERS: dict[str, Path] = {
    name: Path(__file__).parent / "adapters" / name for name in ("pirate", "cheer", "json", "tools")
}
"""Served name -> PEFT folder."""

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
"""The demo model's chat template: its own one, extended by tools."""
