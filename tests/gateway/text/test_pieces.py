"""Chats are encoded piece by piece: to what they are encoded to as a whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from gateway.text.encode_cache import ENTRY_BYTES, LARGEST, MAX_PIECES, EncodeCache
from gateway.text.tokenizer import Tokenizer as TokenizerOfChats
from tests.examples import examples
from tests.gateway.fakes import tiny_tokenizer

WORDS = [
    "what",
    "is",
    "it",
    "<",
    "|>",
    "]",
    "[im",
    "\u2581",
    "é",
    "日本",
    "\N{GRINNING FACE}",
    " ",
    "  ",
    "\n",
    "x",
    "end",
]
SPECIALS = [
    AddedToken("[im]", special=True, normalized=False),
    AddedToken("[im]x[", special=True, normalized=False),  # overlaps what may follow it
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("<left>", special=True, normalized=False, lstrip=True),
    AddedToken("<right>", special=True, normalized=False, rstrip=True),
    AddedToken("<word>", special=True, normalized=False, single_word=True),
    AddedToken("yo", special=True, normalized=False),
    AddedToken(" <t>", special=True, normalized=False),
    AddedToken("{a}", special=True, normalized=False),
    AddedToken("({a})", special=True, normalized=False),  # holds another
    AddedToken("<plain>", special=False, normalized=False),
    AddedToken("]x]", special=False, normalized=False),
    AddedToken("<seen>", special=True, normalized=True),
]
texts = st.lists(st.sampled_from([*WORDS, *(token.content for token in SPECIALS)]), max_size=24).map("".join)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(WORDS * 5, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def metaspace() -> Tokenizer:
    """Writes a space before the very first word, as Llama 3's forerunners do."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", *WORDS, *(f"\u2581{word}" for word in WORDS)])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def prepending() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, metaspace, prepending])
def backend(request) -> Tokenizer:
    tokenizer = request.param()
    tokenizer.add_tokens(SPECIALS)
    return tokenizer


def pieces_of(backend: Tokenizer, **options) -> EncodeCache:
    return EncodeCache(backend, [token.content for token in SPECIALS], **options)


def encoded(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


@given(text=texts)
@example(text="<word>yo")
@example(text="({a})[im]x[")
@settings(max_examples=examples(200), deadline=None)
def test_ids_of_a_text_are_those_of_its_pieces(backend, text):
    cut = pieces_of(backend).cut(text)
    assert "".join(cut) == text
    assert [token_id for piece in cut for token_id in encoded(backend, piece)] == encoded(backend, text)


def test_it_is_cut_before_special_tokens_alone(backend):
    cut = pieces_of(backend).cut("hi<|end|>[im]what <left>is<plain>it<right> \n<s>")
    assert cut == ["hi", "<|end|>[im]what <left>is<plain>it", "<right> \n", "<s>"]
    assert pieces_of(backend).cut("") == []
    assert pieces_of(Tokenizer(BPE())).cut("nothing is added to it") == ["nothing is added to it"]


def test_a_text_of_too_many_pieces_is_one(backend):
    text = "<|end|>" * (MAX_PIECES - 1)
    assert len(pieces_of(backend).cut(text)) == MAX_PIECES - 1
    assert pieces_of(backend).cut(text + "<s>") == [text + "<s>"]


def test_what_was_used_last_is_remembered_and_no_more_than_there_is_room_for(backend):
    room = 10 * (ENTRY_BYTES + 60)
    pieces = pieces_of(backend, max_bytes=room)
    names = "abcdefghij"
    for name in names:
        assert list(pieces.remember("acme", name, [1])) == [1]
    assert list(pieces.remember("acme", "a", [1])) == [1], "twice is once"
    assert pieces.ids("acme", "a") is not None
    pieces.remember("acme", "k", [2])
    assert [name for name in names + "k" if pieces.ids("acme", name)] == list("acdefghijk")
    assert pieces.ids("umbrella", "a") is None, "and by no other tenant"
    book = "x" * int(LARGEST * room)
    assert list(pieces.remember("acme", book, [3])) == [3]
    assert pieces.ids("acme", book) is None and pieces.ids("acme", "a") is not None
    assert pieces._bytes <= room


async def test_where_special_tokens_are_but_text_nothing_is_cut():
    plain = tiny_tokenizer()
    plain._template.backend_tokenizer.encode_special_tokens = True
    tokenizer, messages = TokenizerOfChats(plain._template), [{"role": "user", "content": "hi"}]
    assert tokenizer._pieces.cut(tokenizer.render_chat(messages)) == [tokenizer.render_chat(messages)]
    assert tiny_tokenizer()._pieces.cut(tokenizer.render_chat(messages))[1:]


async def test_a_turn_encodes_what_is_new_in_it(monkeypatch):
    tokenizer, new = tiny_tokenizer(), []
    encode = tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode", lambda text, special: new.append(text) or encode(text, special))
    turns = [{"role": "user", "content": "hi"}]
    first = await tokenizer.encode_chat("acme", turns)
    turns += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "what is it?"}]
    new.clear()
    second = await tokenizer.encode_chat("acme", turns)
    assert second == encode(tokenizer.render_chat(turns), False)
    assert new and "hi" not in "".join(new)
    new.clear()
    assert await tokenizer.encode_chat("umbrella", turns[:1]) == first and new, "each tenant's are its own"
