"""Print what loralane needs from PyPI, one requirement a line: `python deploy/requirements.py EXTRA...`.

An image installs these before the package itself, so that a change of the code alone changes only the image's last
layer. torch is left out: each image has a build of its own.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
NAME_END = re.compile(r"[^A-Za-z0-9._-]")


def requirements(extras: Iterable[str]) -> list[str]:
    """Return the requirements of the package and of these extras, without torch. Raises KeyError for an extra that
    pyproject.toml does not have."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    needed = [*project["dependencies"]]
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    return [line for line in needed if NAME_END.split(line)[0] != "torch"]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
