"""The protobuf code is what the .proto files generate, by a compiler that the installed libraries understand."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load_generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    out = tmp_path_factory.mktemp("proto")
    load_generator().generate(out)
    return out


@pytest.mark.parametrize("package", ["gateway/pb", "engine/pb"])
def test_what_is_imported_is_what_the_proto_files_say(fresh, package):
    def contents(root):
        return {p.name: p.read_text() for p in (root / package).glob("*_pb2*")}

    assert contents(ROOT) == contents(fresh), "run `make proto`"


def numbers(text):
    return tuple(map(int, text.split(".")))


def pinned(name):
    return re.search(rf"^{name}==(\S+)$", (ROOT / "configs" / "constraints.txt").read_text(), re.M)[1]


def oldest(name):
    [found] = [line for line in PROJECT["project"]["dependencies"] if line.startswith(f"{name}>=")]
    return found.removeprefix(f"{name}>=")


def test_the_code_runs_with_every_library_that_the_project_allows(fresh):
    """Generated code refuses a library that is older than its compiler. The oldest ones allowed once were."""
    assert f"grpcio-tools=={pinned('grpcio-tools')}" in PROJECT["build-system"]["requires"]
    code = (fresh / "engine/pb/engine_pb2.py").read_text()
    protobuf = re.search(r"Protobuf Python Version: (\S+)", code)[1]
    assert numbers(protobuf) <= numbers(oldest("protobuf")) <= numbers(pinned("protobuf"))
    assert numbers(pinned("grpcio-tools")) <= numbers(oldest("grpcio")) <= numbers(pinned("grpcio"))


def test_git_keeps_no_generated_code():
    kept = subprocess.run(["git", "ls-files", "*_pb2*"], cwd=ROOT, capture_output=True, text=True)
    assert kept.stdout == "", "`make proto` makes these"
