"""Runs a suite against a server, and tells what became of its tests."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.peers.classes import Class, class_of
from tests.peers.proxy import Names, proxied
from tests.peers.suites import Suite

SHIMS = Path(__file__).parent / "shims"
KEY = "sk-demo-acme"
ADAPTER = "pirate"


class Result(NamedTuple):
    """What became of a test."""

    test: str
    outcome: str
    """`passed`, `failed`, `skipped` or `not collected`: a file of tests that could not be imported."""
    text: str

    @property
    def class_of_failure(self) -> Class | None:
        """Return the class of a failed test, or of a file that was not collected. None means that it did not fail."""
        return class_of(self.test, self.text) if self.outcome in ("failed", "not collected") else None


def run(
    suite: Suite,
    path: Path,
    url: str,
    tokenizer: str = "",
    options: Sequence[str] = (),
    key: str = KEY,
    seconds: float | None = None,
) -> list[Result]:
    """Run the tests of a suite in the folder `path` against the server at `url`. `tokenizer` is the folder of its
    model's tokenizer, for tests that encode texts themselves; `options` are passed on to pytest; `key` is that of the
    tenant that the tests become; after so many `seconds` the rest is left out. Raises FileNotFoundError: the folder has
    none of the suite's tests."""
    tests = suite.found(path)
    if not tests:
        raise FileNotFoundError(f"{path} has none of {', '.join(suite.tests)} below {suite.folder}")
    served = models(url, key)
    base = next(iter(served))
    names = Names(base, any_name=suite.any_name, served=frozenset(served))
    with proxied(url, key, names) as proxy, tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        environment = {
            "PYTHONPATH": str(SHIMS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PEERS_SHIM": suite.shim,
            "PEERS_RESULTS": str(results),
            "PEERS_URL": proxy,
            "PEERS_BASE": base,
            "PEERS_ADAPTER": ADAPTER if ADAPTER in served else base,
            "PEERS_TOKENIZER": tokenizer,
        }
        plugins = [word for name in ("peer_plugin", *suite.fixtures(path)) for word in ("-p", name)]
        fixed = ["-q", "--noconftest", "-c", str(SHIMS / "pytest.ini"), "--rootdir", str(path / suite.folder)]
        fixed += [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            "-p",
            "no:xdist",
            "--continue-on-collection-errors",
        ]
        command = [sys.executable, "-m", "pytest", *fixed, *plugins, *options, *tests]
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # what has ended is told all the same
            subprocess.run(command, cwd=path / suite.folder, env={**os.environ, **environment}, timeout=seconds)
        return read(results)


def models(url: str, key: str) -> list[str]:
    """Return the models that the server has for the tenant with this key, the base model first."""
    answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).raise_for_status()
    return [model["id"] for model in answer.json()["data"]]


def read(results: Path) -> list[Result]:
    """Read what the plugin has written. A test that failed after its call counts once, as a failure."""
    found: dict[str, Result] = {}
    with suppress(FileNotFoundError):
        for line in results.read_text().splitlines():
            result = Result(**json.loads(line))
            if result.test not in found or result.class_of_failure:
                found[result.test] = result
    return list(found.values())


def report(results: Sequence[Result]) -> str:
    """Return the failures by class, each with the first line of what it says, and the counts."""
    classes = Counter(kind for result in results if (kind := result.class_of_failure))
    lines = []
    for kind, _ in classes.most_common():
        lines.append(f"\n{kind.name}: {kind.why}")
        lines += [_told(result) for result in results if result.class_of_failure == kind]
    counts = Counter(result.outcome for result in results)
    lines.append(
        f"\n{counts['passed'] + counts['failed']} run, {counts['passed']} passed; {counts['skipped']} skipped, "
    )
    lines[-1] += f"{counts['not collected']} files not collected; failures by class:"
    return "\n".join([*lines, *(f"{count:6} {kind.name}" for kind, count in classes.most_common())])


def _told(result: Result) -> str:
    said = result.text.strip().splitlines() or [""]
    return f"  {result.test}\n      {said[0].removeprefix('E').strip()[:160]}"
