"""No module of the project turns data into code: no pickles, no eval, no shells, no unsafe YAML, no models' code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway.config.file import _UniqueKeyLoader

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "engine", "lora_kernels", "lab", "benchmarks", "proto")
MODULES = {"pickle", "_pickle", "pickletools", "dill", "cloudpickle", "joblib", "jsonpickle", "marshal", "shelve"}
NAMES = {"eval", "exec", "__import__", "compile"}
CALLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "tempfile.mktemp"),
    *("ssl._create_unverified_context", "pandas.read_pickle"),
}
DANGEROUS = {("shell", True), ("allow_pickle", True), ("trust_remote_code", True), ("verify", False)}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "_UniqueKeyLoader"}


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def named(call: ast.Call) -> dict[str | None, object]:
    return {each.arg: getattr(each.value, "value", each.value) for each in call.keywords}


def dangers_of_call(call: ast.Call) -> Iterator[str]:
    name, options = dotted(call.func), named(call)
    if name in NAMES | CALLS:
        yield name
    if name == "torch.load" and options.get("weights_only") is not True:
        yield "torch.load without weights_only"
    if name == "yaml.load":
        loader = call.args[1] if len(call.args) > 1 else options.get("Loader")
        if not isinstance(loader, ast.expr) or dotted(loader) not in SAFE_LOADERS:
            yield "yaml.load"
    yield from (f"{key}={value}" for key, value in options.items() if (key, value) in DANGEROUS and value is not None)


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        if isinstance(node, ast.Call):
            yield from dangers_of_call(node)


def test_nothing_here_runs_what_it_reads():
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 200
    found = {str(file.relative_to(ROOT)): [*dangers(file.read_text())] for file in files}
    assert {file: what for file, what in found.items() if what} == {}
    assert issubclass(_UniqueKeyLoader, yaml.SafeLoader)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import marshal as m",
        "import shelve.x",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "httpx.get(url, verify=False)",
    ],
)
def test_what_runs_data_is_found(source):
    assert [*dangers(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import pathlib",
        "model.eval()",
        "re.compile(text)",
        "torch.load(path, weights_only=True)",
        "yaml.load(text, yaml.SafeLoader)",
        "subprocess.run([program, line])",
        "httpx.get(url, verify=context)",
    ],
)
def test_what_is_harmless_is_not(source):
    assert [*dangers(source)] == []
