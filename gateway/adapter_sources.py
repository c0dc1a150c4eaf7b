"""Where adapters come from: folders below the roots an operator has named."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from gateway.core.errors import invalid_request


class LocalSources:
    """Folders of this machine, and nothing outside the roots."""

    def __init__(self, roots: Collection[Path]) -> None:
        """`roots`: folders below which adapters may lie; nothing else is ever read."""
        self._roots = tuple(root.resolve() for root in roots)

    async def fetch(self, source: str) -> Path:
        """The real folder, after symbolic links; `source` is absolute, or relative to a root.

        Raises:
            ApiError: INVALID_REQUEST, it is not a folder below a root.
        """
        with suppress(OSError, ValueError, RuntimeError):  # too long a name, a null byte, a loop of links
            for root in self._roots:
                folder = (root / source).resolve()
                if folder.is_relative_to(root) and (folder.is_dir() or Path(source).is_absolute()):
                    return folder
        raise invalid_request(f"{source!r} is not a folder below a configured adapter root", "lora_path")
