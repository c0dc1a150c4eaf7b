"""Folders whose tokenizer is a `tokenizer.model` or a `tekken.json`: the token ids that SentencePiece and
mistral-common gave for the same files (see `tokenizer_files`), and what other files of a folder say."""

import json
import re

import pytest
from rich.console import Console

from engine.model.folders.converted import check_tokenizer, prepare_folder
from engine.model.folders.prepare import prepare_model
from engine.process.model_source import find_prepared
from gateway.core.errors import ApiError
from gateway.serve.prepare import described_folder
from gateway.text.tokenizer import Tokenizer
from tests.model.tokenizer_files import (
    BPE,
    IDS,
    LETTERS,
    MARKS,
    MODELS,
    NORMAL,
    TEXTS,
    UNUSED,
    tekken,
    write_model,
)

EXPECTED = json.loads(IDS.read_text())
QUIET = Console(quiet=True)


def written(folder, name="llama", **files):
    """Write a model folder with one of the tokenizers, and the contents of further JSON files."""
    folder.mkdir(parents=True)
    if name == "tekken":
        (folder / "tekken.json").write_text(json.dumps(tekken()))
    else:
        write_model(folder / "tokenizer.model", *MODELS[name])
    for file, content in {"config": {"model_type": "llama"}, **files}.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def prepared(tmp_path, name="llama", **files):
    return prepare_model(str(written(tmp_path / "model", name, **files)), tmp_path / "data", QUIET)


def loaded(tmp_path, name="llama", **files):
    return Tokenizer.load(prepared(tmp_path, name, **files))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_ids_of_texts_are_those_of_the_formats_own_library(tmp_path, name):
    tokenizer = loaded(tmp_path, name)
    backend = tokenizer._backend
    backend.encode_special_tokens = True
    found = {text: backend.encode(text, add_special_tokens=False).ids for text in TEXTS}
    assert found == dict(zip(TEXTS, EXPECTED[name], strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma", "symbols", "tekken"])
def test_ids_give_their_text_again(tmp_path, name):
    tokenizer = loaded(tmp_path, name)
    found = [tokenizer.decode(ids, skip_special=False).replace("\u2581", " ") for ids in EXPECTED[name]]
    assert found == [text.replace("\u2581", " ") for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "bos", "eos"), [("llama", "<s>", "</s>"), ("gemma", "<bos>", "<eos>"), ("tekken", "<s>", "</s>")]
)
def test_special_tokens_are_found_in_texts_and_bos_is_put_before_them(tmp_path, name, bos, eos):
    tokenizer = loaded(tmp_path, name)
    start, end = tokenizer.token_id(bos), tokenizer.token_id(eos)
    the = tokenizer._encode("the", False)
    assert tokenizer._encode(f"the{eos}the", True) == (start, *the, end, *the)
    assert [tokenizer.is_special(token_id) for token_id in (start, end, *the[:1])] == [True, True, False]


def test_other_files_of_the_folder_name_special_tokens(tmp_path):
    names = {"bos_token": {"content": "[BOS]"}, "pad_token": "<none>", "additional_special_tokens": ["</div>"]}
    files = {"config": {"eos_token_id": [1, 2]}, "special_tokens_map": names, "added_tokens": {"[BOS]": 450}}
    folder = prepared(tmp_path, "symbols", **files, tokenizer_config={"add_eos_token": True, "unk_token": None})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer._encode("", True) == (450, 1)
    assert tokenizer.token_id("[EMPTY_449]") == 449
    assert tokenizer.is_special(tokenizer.token_id("</div>"))
    written = json.loads((folder / "tokenizer_config.json").read_text())
    found = {key: written.get(f"{key}_token") for key in ("bos", "eos", "pad", "unk")}
    assert found == {"bos": "[BOS]", "eos": "<s>", "pad": None, "unk": None}


def test_added_tokens_have_the_flags_that_the_folder_gives_them(tmp_path):
    added = {
        2: {"content": "</s>", "special": True},
        300: {"content": "<tool>", "special": False},
        450: {"content": "<|end|>", "special": True, "rstrip": True},
    }
    tokenizer = loaded(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    the = tokenizer.token_id("\u2581the")
    assert tokenizer._encode("the<|end|>  the<tool>the", False) == (the, 450, the, 300, the)
    assert tokenizer.decode((the, 450, 300)) == "the<tool>"


def test_a_space_is_put_before_the_whole_text_alone_where_the_folder_says_so(tmp_path):
    tokenizer = loaded(tmp_path, tokenizer_config={"legacy": False})
    assert [tokenizer._encode(text, False) for text in TEXTS if "</s>" not in text] == [
        tuple(ids) for text, ids in zip(TEXTS, EXPECTED["llama"], strict=True) if "</s>" not in text
    ]
    pieces = ("\u2581the", "</s>", "t", "he")
    assert tokenizer._encode("the</s>the", False) == tuple(map(tokenizer.token_id, pieces))


def test_chats_need_the_folders_template(tmp_path):
    chat = [{"role": "user", "content": "the"}]
    with pytest.raises(ApiError, match="chat template"):
        loaded(tmp_path / "none").render_chat(chat)
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert loaded(tmp_path / "one", tokenizer_config={"chat_template": template}).render_chat(chat) == "<s>the"
    folder = written(tmp_path / "file")
    (folder / "chat_template.jinja").write_text(template)
    assert Tokenizer.load(prepare_model(str(folder), tmp_path, QUIET)).render_chat(chat) == "<s>the"


def test_the_folder_is_made_once_and_anew_when_a_file_changes(tmp_path):
    folder, data = written(tmp_path / "model"), tmp_path / "data"
    (folder / "model.safetensors").write_bytes(b"weights")
    assert find_prepared(str(folder), data) is None
    assert described_folder(str(folder), data) == folder
    made = prepare_model(str(folder), data, QUIET)
    assert made == find_prepared(str(folder), data) == described_folder(str(folder), data)
    assert made == prepare_model(str(folder), data, QUIET)
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert not (made / "tokenizer.model").exists()
    (folder / "special_tokens_map.json").write_text("{}")
    assert find_prepared(str(folder), data) is None
    (folder / "tokenizer.json").write_text("{}")
    assert prepare_model(str(folder), data, QUIET) == folder


@pytest.mark.parametrize(
    ("pieces", "trainer", "normalizer", "said"),
    [
        (MARKS, {"model_type": 1}, {}, "is a model of unigrams"),
        (MARKS, {}, {}, "is a model of unigrams"),
        (MARKS, BPE, {"precompiled_charsmap": "x"}, "precompiled_charsmap"),
        (MARKS, BPE, {"escape_whitespaces": False}, "writes spaces otherwise"),
        (MARKS, BPE | {"treat_whitespace_as_suffix": True}, {}, "writes spaces otherwise"),
        ([], BPE, {}, "has no pieces"),
        ([*MARKS, ("a", NORMAL), ("a", NORMAL)], BPE, {}, "or one twice"),
        ([("a", NORMAL)], BPE, {}, "not one unknown piece"),
        ([*MARKS, (b"\xe6", NORMAL)], BPE, {}, "a piece that is not UTF-8"),
        ([*MARKS, *LETTERS, ("et", UNUSED)], BPE, {}, "the unused piece 'et'"),
        ([*MARKS, ("a" * 2000, NORMAL)], BPE, {}, "more than 1024 characters"),
    ],
)
def test_a_sentencepiece_model_that_is_not_followed_is_refused_by_name(tmp_path, pieces, trainer, normalizer, said):
    write_model(tmp_path / "tokenizer.model", pieces, trainer, normalizer)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize("scores", [[float("nan")] * 3, [float("inf")] * 3])
def test_scores_that_are_no_numbers_are_refused(tmp_path, scores):
    write_model(tmp_path / "tokenizer.model", MARKS, scores=scores)
    assert "no numbers" in refusal(tmp_path)


def changed(**config):
    file = tekken()
    return file | {"config": file["config"] | config}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"IQ== 0\nIg== 1\n"),
        ("tokenizer.model", b"\x0a\x03\x0a\x01\xff"),
        ("tekken.json", b"[" * 100_000),
        ("tekken.json", json.dumps(tekken(vocab=[])).encode()),
        ("tekken.json", json.dumps(tekken(special_tokens=[{"rank": 1, "token_str": "<s>"}])).encode()),
        ("tekken.json", json.dumps(changed(default_num_special_tokens=-1)).encode()),
        ("tekken.json", json.dumps(changed(default_num_special_tokens=2**60)).encode()),
        ("tekken.json", json.dumps(changed(default_vocab_size=100)).encode()),
        ("tekken.json", json.dumps(changed(pattern="(")).encode()),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    said = refusal(tmp_path)
    assert name in said or "tokenizer.json" in said
    assert "fetch" in said


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"3": 1}}, "tokenizer_config.json cannot be read"),
        ("tokenizer_config", {"eos_token": "<|end|>"}, "names the token '<|end|>' (eos_token)"),
        ("added_tokens", {"x": 2**40}, "between 0 and 1,048,576"),
        ("added_tokens", {"x": -1}, "between 0 and 1,048,576"),
        ("added_tokens", {"</s>": 700}, "its vocabulary has with another id"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path, file, content, said):
    folder = written(tmp_path / "model", **{file: content})
    assert said in refusal(folder)


def refusal(folder):
    """Return the one line of the error with which a folder is refused; nothing is left of what was made of it."""
    out = folder / "out"
    with pytest.raises(ValueError) as refused:
        prepare_folder(folder, out, lambda *_: None)
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        check_tokenizer(folder)
    assert not [path for path in folder.iterdir() if path.is_dir()]
    [line] = str(refused.value).splitlines()
    assert str(folder) in line
    return line
