"""The examples that import `loralane` run, with a tiny model, one of its adapters and a gateway with fakes."""

import re
from pathlib import Path

import pytest
from served import served

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FENCED = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    example
    for document in (ROOT / "README.md", ROOT / "docs" / "python.md")
    for example in FENCED.findall(document.read_text())
    if "from loralane import" in example
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["README", "LLM", "AsyncLLM", "Client"])
def test_an_example_runs(example, tiny_chat, tiny_adapter, tmp_path, capsys):
    with served(tmp_path) as gateway:
        places = {
            "embedded": str(tiny_chat),
            "/path/to/pirate": str(tiny_adapter[0]),
            "http://127.0.0.1:8000": gateway.url,
            "sk-demo-admin": "sk-admin",
        }
        for named, real in places.items():
            example = example.replace(named, real)
        exec(compile(example, "example", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out
