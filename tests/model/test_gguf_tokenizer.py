"""GGUF files' tokenizers: the token ids of llama.cpp, which read the same files (b11549, by xllamacpp), and named chat
templates. With LORALANE_GGUF_VOCABULARIES, a folder such as llama.cpp's `models`, its own tests run too."""

import json
import os
from pathlib import Path

import pytest

from engine.model.folders.gguf import write_gguf_tokenizer
from engine.model.tokenizers.builder import build_tokenizer
from engine.model.tokenizers.gguf import read_vocabulary
from engine.model.tokenizers.pretokenizers import PRE_TOKENIZERS
from gateway.core.errors import ApiError
from gateway.text.tokenizer import Tokenizer
from tests.model import gguf_vocabularies
from tests.model.gguf_vocabularies import (
    BEGIN,
    GEMMA_TEXT,
    MARKS,
    PIECE_TEXT,
    SPECIALS,
    STRIPPED,
    WORDS,
    write_byte_pairs,
    write_gemma,
    write_pieces,
)

EXPECTED = json.loads(Path(__file__).with_name("gguf_token_ids.json").read_text())
VOCABULARIES = Path(os.environ.get("LORALANE_GGUF_VOCABULARIES", "/none"))
SEPARATOR = "\n__ggml_vocab_test__\n"
GROUPS = [(name, group["ids"]) for group in EXPECTED["byte_pairs"] for name in group["names"]]
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOOLS = "{{ bos_token }}{{ tools | default([], true) | length }} tools" + PLAIN
CHAT = [{"role": "user", "content": "you"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def ids(path, texts, *, special=True):
    tokenizer = build_tokenizer(read_vocabulary(path))
    tokenizer.encode_special_tokens = not special
    return [tokenizer.encode(text).ids for text in texts]


def loaded(folder, file):
    write_gguf_tokenizer(file, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return Tokenizer.load(folder)


@pytest.mark.parametrize(("pre", "expected"), GROUPS, ids=[name or "none" for name, _ in GROUPS])
def test_a_pre_tokenizer_cuts_as_llama_cpp_does(tmp_path, pre, expected):
    path = write_byte_pairs(tmp_path / "tiny.gguf", pre)
    assert [*ids(path, (WORDS, MARKS, SPECIALS)), *ids(path, (SPECIALS,), special=False)] == expected


def test_every_pre_tokenizer_has_been_compared():
    assert {name for name, _ in GROUPS if name} == set(PRE_TOKENIZERS) - {"gemma4"}


@pytest.mark.parametrize("case", EXPECTED["flags"], ids=lambda case: case["pre"])
def test_the_file_says_whether_bos_and_eos_are_added(tmp_path, case):
    path = write_byte_pairs(tmp_path / "tiny.gguf", case["pre"], **case["values"])
    assert ids(path, (SPECIALS,)) == case["ids"]


@pytest.mark.parametrize("case", EXPECTED["pieces"], ids=lambda case: str(case["values"]))
def test_pieces_are_merged_by_their_scores(tmp_path, case):
    path = write_pieces(tmp_path / "tiny.gguf", **case["values"])
    assert [*ids(path, (PIECE_TEXT, "", "hello")), *ids(path, (PIECE_TEXT,), special=False)] == case["ids"]


def test_phi_3_has_no_white_space_behind_special_tokens(tmp_path):
    path = write_pieces(tmp_path / "tiny.gguf", name="Phi-3-mini")
    assert ids(path, (STRIPPED,)) == EXPECTED["phi"]
    assert ids(write_pieces(path), (STRIPPED,)) != EXPECTED["phi"]


def test_a_vocabulary_of_gemma_4_is_text_with_merges(tmp_path):
    path, plain = write_gemma(tmp_path / "tiny.gguf"), "<bos>a</s> b"
    assert [*ids(path, (GEMMA_TEXT, plain)), *ids(path, (plain,), special=False)] == EXPECTED["gemma"]


@pytest.mark.parametrize("write", [write_byte_pairs, write_pieces, write_gemma])
def test_a_folder_gives_the_ids_of_the_file_and_its_text_again(tmp_path, write):
    text = GEMMA_TEXT if write is write_gemma else "you don't return x\n3.14 \u00e9t\u00e9 "
    file = write(tmp_path / "tiny.gguf")
    tokenizer = loaded(tmp_path, file)
    [expected] = ids(file, (text,))
    assert list(tokenizer._encode(text, True)) == expected
    assert tokenizer.decode(expected) == text


def test_control_tokens_are_special_and_tokens_of_users_are_text(tmp_path):
    tokenizer = loaded(tmp_path, write_byte_pairs(tmp_path / "tiny.gguf"))
    names = ("<|begin|>", "<|im_end|>", "<|tool|>", "\n\n\n\n", "<|begin|>x")
    assert [tokenizer.is_special(tokenizer.token_id(name)) for name in names] == [True, True, True, False, False]
    assert tokenizer.decode([BEGIN, 2, 3, 4]) == "\n\n\n\n<|begin|>x"


def test_a_template_for_tools_is_used_for_requests_with_tools(tmp_path):
    values = {"chat_template": PLAIN, "chat_template.tool_use": TOOLS, "chat_templates": ["tool_use"]}
    tokenizer = loaded(tmp_path, write_byte_pairs(tmp_path / "tiny.gguf", "qwen2", **values))
    assert tokenizer.render_chat(CHAT) == "you"
    assert tokenizer.render_chat(CHAT, [TOOL]) == "<|begin|>1 toolsyou"


def test_a_template_for_tools_that_is_alone_serves_all_requests(tmp_path):
    tokenizer = loaded(tmp_path, write_byte_pairs(tmp_path / "tiny.gguf", "qwen2", **{"chat_template.tool_use": TOOLS}))
    assert tokenizer.render_chat(CHAT) == "<|begin|>0 toolsyou"
    assert tokenizer.render_chat(CHAT, [TOOL]) == "<|begin|>1 toolsyou"


def test_a_template_that_knows_no_tools_is_not_used_for_them(tmp_path):
    tokenizer = loaded(tmp_path, write_byte_pairs(tmp_path / "tiny.gguf", "qwen2", chat_template=PLAIN))
    with pytest.raises(ApiError, match="knows no tools"):
        tokenizer.render_chat(CHAT, [TOOL])


@pytest.mark.parametrize("template", [PLAIN, "{{ bos_token }}" + PLAIN])
def test_a_chat_begins_with_one_bos_where_the_file_adds_it(tmp_path, template):
    tokenizer = loaded(tmp_path, write_byte_pairs(tmp_path / "tiny.gguf", "llama-bpe", chat_template=template))
    assert tokenizer.render_chat(CHAT) == "<|begin|>you"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pre": "klingon"}, "tiny.gguf has tokenizer.ggml.pre = 'klingon', which is not known"),
        ({"mood": "good"}, "tiny.gguf has the metadata tokenizer.ggml.mood = good, which is not supported"),
        ({"suppress_tokens": [1]}, "tiny.gguf has the metadata tokenizer.ggml.suppress_tokens, which is not supported"),
        ({"bos_token_id": 5000}, "tiny.gguf has tokenizer.ggml.bos_token_id = 5000, and"),
        ({"add_eos_token": True}, "tiny.gguf adds EOS to prompts, and has no tokenizer.ggml.eos_token_id"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, values, said):
    with pytest.raises(ValueError) as refused:
        write_gguf_tokenizer(write_byte_pairs(tmp_path / "tiny.gguf", **values), tmp_path)
    assert said in str(refused.value)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("model", "tokens", "more", "said"),
    [
        ("bert", ["a"], {}, "tokenizer.ggml.model = 'bert'"),
        ("gpt2", ["a", "b", "a"], {"merges": ["a b"]}, "the token 'a' twice"),
        ("gpt2", ["a", "b"], {}, "no tokenizer.ggml.merges"),
        ("gpt2", ["a", "b"], {"merges": ["a b"]}, "the merge 'a b' of tokens that are not in its vocabulary"),
        ("llama", ["a", "b"], {"scores": [0.0]}, "1 values in tokenizer.ggml.scores, and 2 tokens"),
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path, model, tokens, more, said):
    path = gguf_vocabularies.write(tmp_path / "tiny.gguf", model, tokens, [1] * len(tokens), **more)
    with pytest.raises(ValueError, match=r"^tiny\.gguf has ") as refused:
        write_gguf_tokenizer(path, tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "cases",
    [path for path in sorted(VOCABULARIES.glob("*.gguf.inp")) if "bert" not in path.name],
    ids=lambda path: path.name,
)
def test_the_cases_of_llama_cpp_give_its_ids(cases):
    vocabulary = read_vocabulary(cases.with_suffix(""))
    tokenizer = build_tokenizer(vocabulary)
    tokenizer.encode_special_tokens = True
    texts = cases.read_bytes().decode().split(SEPARATOR)
    expected = [[int(one) for one in line.split()] for line in cases.with_suffix(".out").read_text().split("\n")]
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert found == expected[: len(texts)]
