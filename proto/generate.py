"""Regenerates gateway/pb and engine/pb from the .proto files: `make proto`.

protoc writes imports that follow the proto path (`from loralane.v1 import ...`); ours live in gateway.pb and engine.pb,
so those lines are rewritten. A test runs `generate` into a temporary folder and fails when the checked-in code differs.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"loralane/v1": "gateway/pb", "loralane/engine/v1": "engine/pb"}


def generate(out: Path) -> None:
    """Writes all generated modules below `out`, laid out as in the repository."""
    for source, target in PACKAGES.items():
        with tempfile.TemporaryDirectory() as scratch:
            _protoc(sorted((ROOT / "proto" / source).glob("*.proto")), scratch)
            (out / target).mkdir(parents=True, exist_ok=True)
            for path in sorted((Path(scratch) / source).iterdir()):
                (out / target / path.name).write_text(_rewrite(path.read_text(), source, target))


def _protoc(protos: list[Path], out: str) -> None:
    well_known = str(files("grpc_tools") / "_proto")
    flags = [f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    outs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *flags, *outs, *map(str, protos)]) != 0:
        raise SystemExit("protoc failed; its message is above")


def _rewrite(text: str, source: str, target: str) -> str:
    return text.replace(f"from {source.replace('/', '.')} import", f"from {target.replace('/', '.')} import")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
