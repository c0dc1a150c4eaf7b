"""What operators are told of the chat template and the added tokens in an adapter's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import tiny_tokenizer
from transformers import AutoTokenizer

from gateway.adapters import own_text
from gateway.adapters.own_text import comparison_with


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_tokenizer()._template.save_pretrained(str(folder))
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    """Saves the base's tokenizer, changed, as trainers do, in an adapter's folder."""

    def save(change=lambda tokenizer: None, folder: Path = tmp_path) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(str(base))
        change(tokenizer)
        tokenizer.save_pretrained(str(folder))
        return folder

    return save


def test_the_base_models_own_tokenizer_is_nothing_to_tell(base, adapter, tmp_path):
    assert comparison_with(base, None)(adapter(), "") == ()
    assert comparison_with(base, None)(tmp_path / "absent", "") == ()


def test_another_chat_template_is_told(base, adapter, tmp_path):
    def change(tokenizer):
        tokenizer.chat_template = "{{ messages[0].content }}"

    folder = adapter(change)
    [told] = comparison_with(base, None)(folder, "")
    assert "another chat template" in told and "chat_template" in told and "completions" in told and "auto" in told
    assert comparison_with(base, None)(folder, "{{ messages[0].content }}") == (), "its chats are rendered with it"
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}\n")
    assert comparison_with(base, tmp_path / "given.jinja")(folder, "") == ()
    template = folder / "chat_template.jinja"  # transformers 4 has it in the other file
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template.read_text()}))
    template.unlink()
    assert comparison_with(base, None)(folder, "") == (told,)


def test_added_tokens_that_the_base_lacks_are_told(base, adapter):
    [told] = comparison_with(base, None)(adapter(lambda tokenizer: tokenizer.add_tokens(["<tool>", "a"])), "")
    assert "adds 1 tokens" in told and "'<tool>'" in told and "'a'" not in told


def test_of_an_adapters_tokenizer_only_the_added_tokens_are_decoded(base, adapter, monkeypatch):
    """Decoding a vocabulary holds the interpreter's lock, and the base's is decoded once."""
    decoded, decode = [], own_text._decoded
    monkeypatch.setattr(own_text, "_decoded", lambda file, *kind: decoded.append(file) or decode(file, *kind))
    folder = adapter(lambda tokenizer: tokenizer.add_tokens(["<tool>"]))
    compare = comparison_with(base, None)
    assert compare(folder, "") == compare(folder, "") != ()
    assert [file.parent for file in decoded if file.name == "tokenizer.json"] == [base]
    assert sum(file.parent == base for file in decoded) == 3


@pytest.mark.parametrize("indent", [None, 2])
def test_added_tokens_stand_in_tokenizer_json_alone(indent, base, adapter):
    folder = adapter(lambda tokenizer: tokenizer.add_tokens(["<tööl>"]))
    (folder / "tokenizer_config.json").unlink()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=indent))
    [told] = comparison_with(base, None)(folder, "")
    assert "'<tööl>'" in told


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[1]",
        b'{"added_tokens": [{"content": 1}]}',
        b'{"added_tokens": [',
        b'{"chat_template": [7]}',
        b"[" * 100_000,
    ],
)
def test_damaged_files_count_as_absent(content, base, tmp_path):
    for name in ("tokenizer_config.json", "tokenizer.json", "added_tokens.json"):
        (tmp_path / name).write_bytes(content)
    assert comparison_with(base, None)(tmp_path, "") == ()
