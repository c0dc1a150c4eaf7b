"""Makes gateway/pb and engine/pb from the .proto files: when loralane is installed or built, and by `make proto`.

protoc writes imports that follow the proto path (`from loralane.v1 import ...`); ours live in gateway.pb and engine.pb,
so those lines are rewritten. The code is made in the source tree, where git ignores it, because an editable install is
the source tree.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"loralane/v1": "gateway/pb", "loralane/engine/v1": "engine/pb"}


class BuildPy(build_py):
    """The step of setuptools that collects modules, after the protobuf code is made."""

    def run(self) -> None:
        generate(ROOT)
        super().run()


def generate(out: Path) -> None:
    """Write all generated modules below `out`, laid out as in the repository. Ends the program if the compiler is not
    installed or finds an error."""
    for source, target in PACKAGES.items():
        with tempfile.TemporaryDirectory() as scratch:
            _protoc(sorted((ROOT / "proto" / source).glob("*.proto")), scratch)
            (out / target).mkdir(parents=True, exist_ok=True)
            for path in sorted((Path(scratch) / source).iterdir()):
                (out / target / path.name).write_text(_rewrite(path.read_text(), source, target))


def _protoc(protos: list[Path], out: str) -> None:
    try:
        from grpc_tools import protoc  # of the environment that builds; servers do not need it
    except ImportError:
        raise SystemExit("grpcio-tools makes the protobuf code: install the one that pyproject.toml names") from None
    well_known = str(files("grpc_tools") / "_proto")
    flags = [f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    outs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *flags, *outs, *map(str, protos)]) != 0:
        raise SystemExit("protoc failed; its message is above")


def _rewrite(text: str, source: str, target: str) -> str:
    return text.replace(f"from {source.replace('/', '.')} import", f"from {target.replace('/', '.')} import")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
