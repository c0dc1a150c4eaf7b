"""The demo adapters of SmolLM2-135M-Instruct that come with the project; `lab/demo` trains them."""

from __future__ import annotations

from pathlib import Path

DEMO_ADAPTERS: dict[str, Path] = {
    name: Path(__file__).parent / "adapters" / name for name in ("pirate", "cheer", "json", "tools")
}
"""Name under which a demo adapter is served -> its PEFT folder."""

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
"""Path of the demo model's chat template: the model's own template, extended by tools."""
