"""The checked-in protobuf code is what the .proto files generate."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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
def test_generated_code_has_not_drifted(fresh, package):
    def contents(root):
        return {p.name: p.read_text() for p in (root / package).glob("*_pb2*")}

    assert contents(ROOT) == contents(fresh), "run `make proto` and commit the result"
