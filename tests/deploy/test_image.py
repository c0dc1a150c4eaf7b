"""The Dockerfile: who the images run as, what they pin, and what reaches the builder."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gateway.core.part import COMMON

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TARGETS = ("cpu", "cuda")


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of the Dockerfile, with continued lines joined and comments removed."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage by its name, with those of the stage that it is built on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.split()
            found[stage] = [*found.get(base, [("FROM", base)])]
            current = found[stage]
        elif found:
            current.append((name, rest))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_a_user_that_is_not_root(target):
    steps = stages()[target]
    user = [rest for name, rest in steps if name == "USER"][-1]
    assert user == "10001:10001"
    assert steps[-1] == ("USER", user)


@pytest.mark.parametrize("target", TARGETS)
def test_images_start_loralane_keep_data_in_volumes_and_ask_a_route_that_exists(target):
    steps = dict(stages()[target])
    assert steps["ENTRYPOINT"] == '["loralane"]'
    assert "/var/lib/loralane" in steps["VOLUME"]
    environment = " ".join(rest for name, rest in stages()[target] if name == "ENV")
    assert "LORALANE_DATA_DIR=/var/lib/loralane" in environment
    [url] = re.findall(r"LORALANE_HEALTH_URL=\S+", environment)
    assert "LORALANE_HEALTH_URL" in steps["HEALTHCHECK"]
    assert "/" + url.rpartition("/")[2] in COMMON


def test_every_image_is_pinned_to_a_version():
    tag = dict(rest.split("=") for name, rest in instructions() if name == "ARG" and rest.startswith("PYTHON="))[
        "PYTHON"
    ]
    assert re.fullmatch(r"3\.\d+\.\d+-slim-\w+", tag)
    bases = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert [base for base in bases if base not in stages() and base != "python:${PYTHON}"] == []


def test_libraries_are_those_that_the_constraints_pin():
    for target in TARGETS:
        installs = [rest for _, rest in stages()[f"libraries-{target}"] if "pip install" in rest]
        assert installs
        for command in " && ".join(installs).split("&&"):
            assert "pip install" not in command or "-c configs/constraints.txt" in command
    assert re.search(r"^torch==\S+$", (ROOT / "configs" / "constraints-cpu.txt").read_text(), re.M)


def test_the_builder_gets_what_is_copied_and_no_secrets():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    allowed = [line[1:] for line in patterns if line.startswith("!")]
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed, source
    for secret in ("deploy/.env", "deploy/certificates/authority/ca.key", ".git", "tests", "shared"):
        assert not any(fnmatch.fnmatch(secret, pattern) or secret.startswith(f"{pattern}/") for pattern in allowed)


def test_secrets_are_not_arguments_of_the_build():
    names = [rest for name, rest in instructions() if name in ("ARG", "ENV")]
    assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", " ".join(names))


def test_requirements_are_those_of_the_project_without_torch():
    script = ROOT / "deploy" / "requirements.py"
    done = subprocess.run([sys.executable, script, "gpu", "otel"], capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    expected = [*project["dependencies"], *extras["gpu"], *extras["otel"]]
    printed = done.stdout.splitlines()
    assert [line for line in expected if line not in printed] == [line for line in expected if line.startswith("torch")]
    assert len(printed) == len(expected) - 1
