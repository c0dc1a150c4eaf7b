"""The public suites of other servers' tests: where they lie in a folder of the peer's sources, and how they are run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Suite(NamedTuple):
    """A suite of tests."""

    shim: str
    """Module in `shims/` that stands between the suite and the server."""
    folder: str
    """Folder, within the peer's sources, in which the suite is run."""
    tests: Sequence[str]
    """Files and folders of tests, as patterns from there. Those that do not exist in the version at hand are left
    out."""
    any_name: bool = False
    """True means that the peer serves its one model under any name."""
    plugins: Sequence[str] = ()
    """Modules of the suite whose fixtures its tests use. Other `conftest.py` are not read, because they import the
    peer itself."""

    def found(self, path: Path) -> list[str]:
        """Return the tests of this suite that are in a folder of sources."""
        folder = path / self.folder
        return [str(found.relative_to(folder)) for pattern in self.tests for found in sorted(folder.glob(pattern))]

    def fixtures(self, path: Path) -> list[str]:
        """Return those of `plugins` that are in a folder of sources."""
        return [name for name in self.plugins if (path / self.folder / f"{name.replace('.', '/')}.py").exists()]


SUITES = {
    "vllm": Suite(
        "peer_vllm",
        ".",
        (
            "tests/entrypoints/openai/*.py",
            "tests/entrypoints/openai/chat_completion",
            "tests/entrypoints/openai/completion",
            "tests/entrypoints/openai/models",
            "tests/entrypoints/openai/responses",
            "tests/entrypoints/anthropic",
            "tests/entrypoints/serve/tokenize",
            "tests/entrypoints/serve/instrumentator",
            "tests/entrypoints/pooling/basic",
            "tests/entrypoints/pooling/embed",
            "tests/entrypoints/pooling/scoring",
        ),
        plugins=("tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest"),
    ),
    "sglang": Suite("peer_sglang", ".", ("test/srt/openai_server", "test/registered/openai_server"), any_name=True),
    "llama.cpp": Suite("peer_llama", "tools/server/tests", ("unit/test_*.py",), any_name=True),
}
