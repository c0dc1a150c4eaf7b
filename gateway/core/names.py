"""The rule for names that operators give: to base models, adapters, tenants, classes and engines.

Names stand in URLs, keys of Redis, folders and logs. So every part of a name begins with a letter or digit: none is
empty, `.` or `..`, which clients that normalise URLs leave out. Such a client would unload the adapter `b` in place of
`a/../b`. Ids of keys, files, batches and responses are made by the gateway, and need no rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NameRule:
    """Which names of one kind are valid: 1 to `most` characters, with `:` if `colon` is set, and in several parts with
    `/` between them if `parts` is set."""

    most: int
    colon: bool = False
    parts: bool = False

    @property
    def words(self) -> str:
        """The rule as part of a sentence: "must be ..." or "is ..."."""
        letters = "letters, digits, '_', '.', '-' or ':'" if self.colon else "letters, digits, '_', '.' or '-'"
        if self.parts:
            between = "perhaps in parts with '/' between them, and each part begins with a letter or digit"
            return f"1 to {self.most} {letters}, {between}"
        return f"1 to {self.most} {letters}, beginning with a letter or digit"

    def fits(self, name: str) -> bool:
        """Return whether a name is valid."""
        part = r"[A-Za-z0-9][A-Za-z0-9_.:-]*" if self.colon else r"[A-Za-z0-9][A-Za-z0-9_.-]*"
        pattern = f"{part}(?:/{part})*" if self.parts else part
        return len(name) <= self.most and re.fullmatch(pattern, name) is not None


MODEL_NAME = NameRule(128, colon=True, parts=True)
"""Names of base models, virtual models and upstreams, such as `org/name`."""
ADAPTER_NAME = NameRule(128, parts=True)
"""Names and aliases of adapters: without a colon, because a request may name an adapter as `base:adapter`."""
TENANT_NAME = NameRule(64)
"""Names of tenants and of their classes."""
ENGINE_NAME = NameRule(128, colon=True)
"""Names of engines that operators add. They have no slash, because each is one part of a path."""
