"""Client libraries of JavaScript against the demo: each file of `javascript/` is a run of Node's own tests, and
`make test-clients` installs the libraries where Node and npm are installed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "javascript"
INSTALLED = Path(os.environ.get("LORALANE_JAVASCRIPT", ".venv/javascript")).absolute()
SECONDS = 600

pytestmark = [
    pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed"),
    pytest.mark.skipif(not (INSTALLED / ".setup").is_file(), reason="npm has not installed the libraries"),
]


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("*.test.mjs")))
def test_library(url, name, tmp_path):
    """Node finds libraries beside a file or above it: the folder where they are installed links to the files."""
    options = ["--preserve-symlinks", "--preserve-symlinks-main", "--test", "--test-reporter=tap"]
    done = subprocess.run(
        ["node", *options, str(INSTALLED / "cases" / name)],
        env={**os.environ, "LORALANE_URL": url, "NODE_OPTIONS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE), "no test ran"
