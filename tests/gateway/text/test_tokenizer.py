import asyncio
import random
import re
import threading
from itertools import pairwise

import pytest
from fakes import EOS, SPECIAL, TEMPLATE, byte_tokenizer, ids_of, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from gateway.core.errors import ApiError
from gateway.core.in_thread import in_thread
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopMatcher, StopStrings
from gateway.text.tenant_threads import TENANT_THREADS
from gateway.text.tokenizer import (
    COUNTED_CHARACTERS,
    RENDERED_VALUES,
    THREAD_CHARACTERS,
    THREAD_IDS,
)

TEXT = "héllo 🦙 wörld 日本語 👩‍🚀!"


def pushed(detokenizer, ids):
    return [detokenizer.push([token_id]) for token_id in ids]


@pytest.mark.parametrize("text", ["", "plain", TEXT])
async def test_text_survives_the_round_trip(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(await tokenizer.encode(text)) == text


async def test_long_text_is_encoded_like_short_text():
    text = TEXT * (THREAD_CHARACTERS // len(TEXT) + 1)
    assert await tiny_tokenizer().encode(text) == ids_of(text)


async def test_a_text_that_is_too_long_is_not_encoded_as_a_whole(monkeypatch):
    """Eight million tokens would take gigabytes, and as many objects as are freed at once."""
    tokenizer, encoded = tiny_tokenizer(), []
    backend = tokenizer._backend

    class Spy:
        def __getattr__(self, name):
            return getattr(backend, name)

        def encode_batch_fast(self, texts, **options):
            encoded.extend(texts)
            return backend.encode_batch_fast(texts, **options)

    monkeypatch.setattr(tokenizer, "_backend", Spy())
    text = "ab " * 1_000_000
    with pytest.raises(ApiError, match="maximum context length is 5000 tokens") as refused:
        await tokenizer.encode(text, most=5000)
    assert (refused.value.code, list(map(len, encoded))) == ("context_length_exceeded", [COUNTED_CHARACTERS])
    encoded.clear()
    with pytest.raises(ApiError) as refused:
        await tokenizer.encode_chat("acme", [{"role": "user", "content": text}], most=5000)
    assert (refused.value.param, list(map(len, encoded))) == ("messages", [COUNTED_CHARACTERS])
    few = text[: 2 * COUNTED_CHARACTERS]
    assert len(await tokenizer.encode(few, most=len(few))) == len(few)


async def test_a_chat_of_many_values_is_rendered_in_a_thread(monkeypatch):
    tokenizer, threads = tiny_tokenizer(), []
    render = tokenizer.render_chat
    monkeypatch.setattr(tokenizer, "render_chat", lambda *chat: threads.append(threading.get_ident()) or render(*chat))
    message = {"role": "user", "content": "hi"}
    for count in (2, RENDERED_VALUES // 2):
        ids = await tokenizer.encode_chat("acme", [message] * count)
        assert ids == ids_of(render([message] * count))
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_many_ids_become_text_in_a_thread(monkeypatch):
    ids_of_piece = tiny_tokenizer().token_id
    tokenizer, ids, threads = tiny_tokenizer(), (*ids_of(TEXT), EOS), []
    many = ids * (THREAD_IDS // len(ids) + 1)
    spy = lambda work, *args, **more: threads.append(work) or in_thread(work, *args, **more)  # noqa: E731
    monkeypatch.setattr("gateway.text.tokenizer.in_thread", spy)
    for some in (ids, many):
        for skip_special in (True, False):
            assert await tokenizer.decode_apart(some, skip_special=skip_special) == tokenizer.decode(
                some, skip_special=skip_special
            )
        assert [ids_of_piece(piece) for piece in await tokenizer.pieces(some)] == [*some], "nothing is lost"
    assert len(threads) == 3


async def test_chat_is_rendered_up_to_the_answer():
    ids = await tiny_tokenizer().encode_chat("acme", [{"role": "user", "content": "hi"}])
    assert tiny_tokenizer().decode(ids, skip_special=False) == "<|user|>hi<|end|><|assistant|>"


async def test_template_refusals_are_the_callers_to_fix():
    with pytest.raises(ApiError, match="an assistant cannot begin") as caught:
        await tiny_tokenizer().encode_chat("acme", [{"role": "assistant", "content": "hi"}])
    assert (caught.value.http_status, caught.value.param) == (400, "messages")


def test_detokenizer_never_splits_a_character():
    pieces = pushed(tiny_tokenizer().detokenizer(), ids_of(TEXT))
    assert "".join(pieces) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len(pieces) > len([piece for piece in pieces if piece])


def test_detokenizer_skips_special_tokens():
    detokenizer = tiny_tokenizer().detokenizer()
    assert detokenizer.push([*ids_of("a"), EOS, *ids_of("b")]) + detokenizer.flush() == "ab"


def test_an_unfinished_character_is_flushed_as_what_decoding_makes_of_it():
    ids = ids_of("ok🦙")[:-1]
    detokenizer = tiny_tokenizer().detokenizer()
    assert "".join(pushed(detokenizer, ids)) == "ok"
    assert detokenizer.flush() == tiny_tokenizer().decode(ids)[2:]
    assert detokenizer.flush() == ""


@given(ids=st.lists(st.integers(0, 259), max_size=24), cuts=st.sets(st.integers(1, 23)))
def test_tokens_make_the_same_text_together_as_one_by_one(ids, cuts):
    """Whatever bytes they are: parts of characters, and such as are in none."""
    alone, together = tiny_tokenizer().detokenizer(), tiny_tokenizer().detokenizer()
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    text = "".join(together.push(ids[start:end]) for start, end in pairwise(places)) + together.flush()
    assert text == "".join(pushed(alone, ids)) + alone.flush()


@pytest.mark.parametrize("cut", range(12))
def test_a_continued_prompt_is_not_repeated_and_its_last_character_is_finished(cut):
    text = "日本 🦙!"
    ids = ids_of(text)
    complete = len(text.encode()[:cut].decode(errors="ignore"))
    detokenizer = tiny_tokenizer().detokenizer(ids[:cut])
    assert "".join(pushed(detokenizer, ids[cut:])) == text[complete:]


def sentencepiece_like() -> Backend:
    """Byte fallback, and a decoder that strips the first space, as Llama 2's does."""
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581hello",
        "\u2581world",
        "a",
        "日",
        ".",
    ]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def test_a_word_keeps_its_space_after_a_prompt_only():
    backend = sentencepiece_like()
    hello, world = backend.token_to_id("\u2581hello"), backend.token_to_id("\u2581world")
    assert Detokenizer(backend).push([world]) == "world"
    assert Detokenizer(backend, [hello]).push([world]) == " world"


def test_any_bytes_in_any_order_can_be_detokenised():
    """Such decoders turn text already emitted into U+FFFD when a later byte spoils its run."""
    backend = sentencepiece_like()
    for seed in range(300):
        rng = random.Random(seed)
        ids = [rng.choice([rng.randrange(1, 257), rng.randrange(257, 263)]) for _ in range(16)]
        detokenizer = Detokenizer(backend, ids[:4])
        text = detokenizer.push(ids[4:]) + detokenizer.flush()
        letters = [backend.id_to_token(i).replace("\u2581", "") for i in ids[4:] if i > 256]
        assert re.sub("[^a-z日.]", "", text).count("hello") >= letters.count("hello")


async def test_long_texts_of_one_tenant_leave_threads_to_others(monkeypatch):
    tokenizer, text, running, go_on = byte_tokenizer(TEMPLATE), "x" * (THREAD_CHARACTERS + 1), [], threading.Event()

    def encode(given, special):
        running.append(given)
        go_on.wait(30)
        return ()

    monkeypatch.setattr(tokenizer, "_encode", encode)
    first = [asyncio.create_task(tokenizer.encode(text, tenant="a")) for _ in range(4)]
    while len(running) < TENANT_THREADS:
        await asyncio.sleep(0.001)
    first.pop(0).cancel()  # its thread goes on
    other = asyncio.create_task(tokenizer.encode("y" * len(text), tenant="b"))
    while not running[-1].startswith("y"):
        await asyncio.sleep(0.001)
    assert len(running) == TENANT_THREADS + 1
    go_on.set()
    assert await asyncio.gather(other, *first) == [()] * 4
    assert len(running) == 5


def test_token_bytes_are_exact():
    tokenizer = tiny_tokenizer()
    assert b"".join(map(tokenizer.token_bytes, ids_of(TEXT))) == TEXT.encode()
    assert tokenizer.token_bytes(EOS) == SPECIAL[0].encode()
    assert tokenizer.token_bytes(10_000) == b""


def matched(stops, pieces):
    """Text shown, and whether it was stopped."""
    matcher, shown = StopMatcher(StopStrings(stops)), ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        ([], ["abc"], "abc", False),
        (["END"], ["one E", "ND two"], "one ", True),
        (["END"], ["one E", "NE", "ND two"], "one EN", True),
        (["END"], ["one EN"], "one EN", False),
        (["aab"], ["aaab"], "a", True),
        (["abcd", "bc"], ["abcd"], "a", True),
        (["b", "ab"], ["xab"], "x", True),
        (["\n\n", "User:"], ["hi\n", "User", ": x"], "hi\n", True),
    ],
)
def test_stop_strings(stops, pieces, shown, stopped):
    assert matched(stops, pieces) == (shown, stopped)


def test_only_a_possible_stop_string_is_held_back():
    matcher = StopMatcher(StopStrings(["</s>"]))
    assert matcher.push("a <") == ("a ", False)
    assert matcher.push("b") == ("<b", False)
    assert matcher.push("</s") == ("", False)
    assert matcher.flush() == "</s"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_stopping_agrees_with_a_search_in_the_whole_text(stops, pieces):
    text = "".join(pieces)
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = (text, False)
    if ends:
        end, minus_length = min(ends)
        expected = (text[: end + minus_length], True)
    assert matched(stops, pieces) == expected
