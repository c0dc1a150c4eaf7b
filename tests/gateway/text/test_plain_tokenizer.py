"""Tokenizers that `tokenizer.json` says all about are read without transformers, and the same."""

import json
import shutil
import subprocess
import sys

import pytest
from fakes import tiny_tokenizer
from transformers import AutoTokenizer

from gateway.text.plain_tokenizer import read_plain
from gateway.text.tokenizer import Tokenizer

TEXTS = ("Hello, world", "日本語 🦙 <|im_start|>user\nhi<|im_end|>", " a  b\n\n\tc 12345", "<|end|><|user|>")
ALONE = """
import sys
from pathlib import Path
from gateway.serve.process import leave_torch_out
leave_torch_out()
from gateway.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path(sys.argv[1]))
print(tokenizer.render_chat([{"role": "user", "content": "hi"}]))
print(sorted({"transformers", "huggingface_hub"} & sys.modules.keys()))
"""


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer()._template.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def changed(folder, **settings):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("of_the_demo", [False, True])
def test_it_is_the_one_that_transformers_reads(folder, request, of_the_demo):
    folder = request.getfixturevalue("smollm2") if of_the_demo else folder
    ours, theirs = read_plain(folder), AutoTokenizer.from_pretrained(folder)
    for name in ("special_tokens_map", "all_special_tokens", "all_special_ids", "bos_token", "eos_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.chat_template == theirs.chat_template
    assert json.loads(ours.backend_tokenizer.to_str()) == json.loads(theirs.backend_tokenizer.to_str())
    for text in TEXTS:
        for special in (False, True):
            ids = ours.backend_tokenizer.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special), text


def test_transformers_is_not_imported(folder):
    done = subprocess.run([sys.executable, "-c", ALONE, folder], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["<|user|>hi<|end|><|assistant|>", "[]"]


def test_a_template_may_stand_in_the_settings(folder):
    (folder / "chat_template.jinja").unlink()
    assert read_plain(folder).chat_template is None
    changed(folder, chat_template="{{ messages[0].content }}")
    assert Tokenizer.load(folder).render_chat([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {}},
        {"image_token": "<|user|>"},
        {"eos_token": "a token that is not there"},
        {"extra_special_tokens": {"image": "<|user|>"}},
        {"chat_template": [{"name": "default", "template": "x"}]},
    ],
)
def test_what_could_change_the_tokens_is_left_to_transformers(folder, settings):
    (folder / "chat_template.jinja").unlink()
    assert read_plain(folder) is not None
    changed(folder, **settings)
    assert read_plain(folder) is None


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json", "additional_chat_templates"])
def test_files_that_are_not_read_here_are_left_to_transformers(folder, name):
    (folder / name).mkdir()
    assert read_plain(folder) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_a_tokenizer_is_left_to_transformers(folder, name):
    (folder / name).unlink()
    assert read_plain(folder) is None


def test_a_damaged_file_is_named(folder):
    (folder / "tokenizer.json").write_text('{"model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: "):
        Tokenizer.load(folder)


def test_special_tokens_may_be_objects(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    changed(other, eos_token={"__type": "AddedToken", "content": "<|end|>", "special": True})
    assert read_plain(other).special_tokens_map == read_plain(folder).special_tokens_map
