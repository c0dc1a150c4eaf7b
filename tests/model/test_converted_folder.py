"""Folders whose tokenizer is a `tokenizer.model` or a `tekken.json`: the token ids that SentencePiece and
mistral-common gave for the same files (see `tokenizer_files`), and what other files of a folder say."""

import base64
import json
import re

import pytest
from rich.console import Console

from engine.model.folders.converted import check_tokenizer, prepare_folder
from engine.model.folders.prepare import prepare_model
from engine.process.model_source import find_prepared, prepared_folder
from gateway.core.errors import ApiError
from gateway.serve.prepare import described_folder
from gateway.text.tokenizer import Tokenizer
from tests.model.tokenizer_files import (
    BPE,
    BYTES,
    CONTROL,
    IDS,
    KEEPS_SPACES,
    LETTERS,
    MARKS,
    MERGED,
    MODELS,
    NORMAL,
    TEKKEN_SPECIAL,
    TEXTS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tekken,
    write_model,
)

EXPECTED = json.loads(IDS.read_text())
QUIET = Console(quiet=True)


def written(folder, name="llama", **files):
    """Write a model folder with one of the tokenizers, or one of these pieces and settings, and further JSON files."""
    folder.mkdir(parents=True)
    if name == "tekken":
        (folder / "tekken.json").write_text(json.dumps(tekken()))
    else:
        write_model(folder / "tokenizer.model", *(MODELS[name] if isinstance(name, str) else name))
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
    ("pieces", "text"),
    [
        (("\u2581the",), "the"),
        (("\u2581", "he"), "he"),
        (("he", "\u2581the"), "he the"),
        (("\u2581\u2581", "a"), " a"),
        (("<s>", "\u2581the"), "the"),
        (("a", "\u2581", "\u2581", "he"), "a  he"),
    ],
)
def test_an_answer_loses_the_space_that_sentencepiece_drops(tmp_path, pieces, text):
    """The texts are those of SentencePiece 0.2.3, where a model puts no space before a text but drops those that are
    too many."""
    tokenizer = loaded(tmp_path, (MODELS["drops"][0], BPE, {"add_dummy_prefix": False}))
    ids = [tokenizer.token_id(piece) for piece in pieces]
    assert tokenizer.decode(ids) == text
    stream = tokenizer.detokenizer()
    assert "".join(stream.push([token_id]) for token_id in ids) + stream.flush() == text


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
    assert found == {"bos": "[BOS]", "eos": "<s>", "pad": None, "unk": "<unk>"}


OLD = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
EMPTY = dict.fromkeys(OLD, "")


@pytest.mark.parametrize(
    ("files", "bos"),
    [
        ({"tokenizer_config": EMPTY, "special_tokens_map": OLD}, "<s>"),
        ({"tokenizer_config": EMPTY}, "<s>"),
        ({"tokenizer_config": dict.fromkeys(OLD), "special_tokens_map": EMPTY}, "<s>"),
        ({"tokenizer_config": {"bos_token": "</s>"}, "special_tokens_map": OLD}, "<s>"),
        ({"tokenizer_config": {"bos_token": "</s>", "added_tokens_decoder": {}}, "special_tokens_map": OLD}, "</s>"),
    ],
)
def test_the_map_of_special_tokens_counts_where_no_added_tokens_are_decoded_as_in_transformers(tmp_path, files, bos):
    tokenizer = loaded(tmp_path, **files)
    assert tokenizer._encode("the", True) == (tokenizer.token_id(bos), tokenizer.token_id("\u2581the"))


def test_older_added_tokens_count_only_where_no_added_tokens_are_decoded(tmp_path):
    files = {"tokenizer_config": {"added_tokens_decoder": {}}, "added_tokens": {"<x>": 450}}
    assert loaded(tmp_path, **files).token_id("<x>") is None


OTHER_MARKS = [("<unk>", UNKNOWN), ("<bos>", CONTROL), ("<eos>", CONTROL)]
OTHER_NAMES = BPE | {"byte_fallback": True, "bos_piece": "<bos>", "eos_piece": "<eos>"}


def test_a_symbol_is_no_control_token_whatever_its_text(tmp_path):
    model = ([*OTHER_MARKS, ("</s>", USER_DEFINED), *BYTES, *MERGED, *LETTERS], OTHER_NAMES, KEEPS_SPACES)
    tokenizer = loaded(tmp_path, model)
    ids = tokenizer._encode("a</s>the", False)
    assert tuple(map(tokenizer._backend.id_to_token, ids)) == ("\u2581a", "</s>", "t", "he")
    assert tokenizer.decode(ids) == "a</s>the"


def test_a_folder_can_say_that_a_control_token_is_none(tmp_path):
    added = {"2": {"content": "<eos>", "special": True}, "3": {"content": "<tool>", "special": False}}
    model = ([*OTHER_MARKS, ("<tool>", CONTROL), *BYTES, *MERGED, *LETTERS], OTHER_NAMES, KEEPS_SPACES)
    tokenizer = loaded(tmp_path, model, tokenizer_config={"added_tokens_decoder": added})
    assert tokenizer.decode(tokenizer._encode("the<tool><eos>", False)) == "the<tool>"


@pytest.mark.parametrize("named", [None, "", "</s>"])
def test_what_cannot_be_spelled_is_the_unknown_piece_whatever_the_folder_names(tmp_path, named):
    tokenizer = loaded(tmp_path, "drops", tokenizer_config={"unk_token": named})
    assert tokenizer._encode("a\U0001f600the", False) == tuple(map(tokenizer.token_id, ("\u2581a", "<unk>", "t", "he")))


def test_a_normal_piece_that_the_folder_adds_is_merged_all_the_same(tmp_path):
    the = MODELS["llama"][0].index(("\u2581the", NORMAL))
    added = {str(the): {"content": "\u2581the", "special": False}}
    tokenizer = loaded(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    assert tokenizer._encode("the the", False) == (the, the)


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
    (folder / "notes.txt").write_text("no file of the model")
    assert made == find_prepared(str(folder), data)
    (folder / "special_tokens_map.json").write_text("{}")
    assert find_prepared(str(folder), data) is None
    (folder / "tokenizer.json").write_text("{}")
    assert prepare_model(str(folder), data, QUIET) == folder


def test_the_folder_is_made_once_where_it_lies_in_the_models_own(tmp_path):
    folder = written(tmp_path / "model")
    assert prepare_model(str(folder), folder / "data", QUIET) == find_prepared(str(folder), folder / "data")


def test_the_folder_is_made_anew_when_the_middle_of_a_large_file_changes(tmp_path):
    folder = written(tmp_path / "model", "tekken")
    found = set()
    for byte in b"xy":
        (folder / "tekken.json").write_bytes(b" " * (9 << 19) + bytes([byte]) + b" " * (9 << 19))
        found.add(prepared_folder(folder, tmp_path))
    assert len(found) == 2


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
        ([*MARKS, ("\n", USER_DEFINED), ("a", NORMAL)], BPE, {}, "'</s>', which its pieces cannot spell"),
        ([*MARKS, ("a" * 2000, NORMAL)], BPE, {}, "more than 1024 characters"),
    ],
)
def test_a_sentencepiece_model_that_is_not_followed_is_refused_by_name(tmp_path, pieces, trainer, normalizer, said):
    write_model(tmp_path / "tokenizer.model", pieces, trainer, normalizer)
    assert said in refusal(tmp_path)


RUNS = ["x" * count for count in range(1, 1025)]


def test_merges_that_would_take_gigabytes_are_refused(tmp_path):
    write_model(tmp_path / "tokenizer.model", [*MARKS, *((text, NORMAL) for text in RUNS)])
    assert "more than 67,108,864 characters" in refusal(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    words = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in RUNS[1:])]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    file = changed(default_vocab_size=len(words) + TEKKEN_SPECIAL) | {"vocab": vocab}
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    assert "more than 67,108,864 characters" in refusal(tmp_path)


@pytest.mark.parametrize("scores", [[float("nan")] * 3, [float("inf")] * 3])
def test_scores_that_are_no_numbers_are_refused(tmp_path, scores):
    write_model(tmp_path / "tokenizer.model", MARKS, scores=scores)
    assert "no numbers" in refusal(tmp_path)


def with_equal(*texts):
    """Return pieces, of which these have one score, with their scores."""
    pieces = [*MARKS, *((text, NORMAL) for text in (*texts, "a", "b", "c", "\u2581"))]
    return pieces, [-1.0 if text in texts else -float(rank + 2) for rank, (text, _) in enumerate(pieces)]


@pytest.mark.parametrize(
    "texts", [("bc", "ab"), ("aa", "aaa"), tuple("b" * count for count in range(2, 40)), ("aa", "aaaa", "aab")]
)
def test_pieces_of_equal_score_are_refused_where_the_leftmost_in_a_text_would_count(tmp_path, texts):
    pieces, scores = with_equal(*texts)
    write_model(tmp_path / "tokenizer.model", pieces, scores=scores)
    assert "with one score" in refusal(tmp_path)


def test_runs_of_spaces_may_have_one_score_as_those_of_llama(tmp_path):
    lengths = (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11, 15)
    pieces, scores = with_equal(*("\u2581" * length for length in lengths))
    folder = written(tmp_path / "model")
    write_model(folder / "tokenizer.model", pieces, scores=scores)
    tokenizer = Tokenizer.load(prepare_model(str(folder), tmp_path / "data", QUIET))
    ids = tokenizer._encode(" " * 38 + "a", False)  # 39 with the one that is put before it
    assert [len(tokenizer._backend.id_to_token(token_id)) for token_id in ids] == [16, 16, 7, 1]


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
