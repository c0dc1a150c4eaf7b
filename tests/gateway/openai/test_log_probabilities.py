"""Log probabilities of long answers: rendered in a thread and encoded in pieces, to the same bytes as short ones."""

import json
import random
import threading
from typing import Any

import pytest
from fakes import tiny_tokenizer

from engine.core.messages.requests import Lane, TokenLogprobs
from gateway.openai.logprobs import LOWEST_LOGPROB
from gateway.openai.render import TURN_MEMBERS, Envelope, encode_json, encoded
from gateway.openai.styles import Additions, ChatStyle, CompletionStyle
from gateway.requests.prompt_scores import ENTRIES_AT_ONCE
from gateway.requests.types import Admitted, GenerationChunk, Speech, TokenUsage

TOKENIZER = tiny_tokenizer()
NUM_TOKENS = 260
WIDTH = 20
ADMITTED = Admitted("id", "request", 1, "tiny", Lane.BATCH, "fp", ((5,),), {}, Speech(TOKENIZER, None))


def answers(num_answers: int, num_tokens: int, width: int = WIDTH) -> list[GenerationChunk]:
    random_ = random.Random(7)

    def scored() -> TokenLogprobs:
        numbers = (random_.choice([-0.5, -1e-7, -0.0, float("-inf"), -random_.random() * 30]) for _ in range(width + 1))
        return TokenLogprobs(next(numbers), tuple((random_.randrange(NUM_TOKENS), number) for number in numbers))

    def answer(index: int) -> GenerationChunk:
        ids = tuple(random_.randrange(NUM_TOKENS) for _ in range(num_tokens))
        text, scores = "x" * num_tokens, tuple(scored() for _ in range(num_tokens))
        return GenerationChunk(index, text, ids, scores, finish_reason="length", usage=TokenUsage(1, num_tokens, 0))

    return [answer(index) for index in range(num_answers)]


def entry(token_id: int, logprob: float) -> dict[str, Any]:
    raw = TOKENIZER.token_bytes(token_id)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "".join(f"\\x{byte:02x}" for byte in raw)
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


def content(chunk: GenerationChunk) -> list[dict[str, Any]]:
    pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
    return [
        {**entry(token_id, one.logprob), "top_logprobs": [entry(other, number) for other, number in one.top]}
        for token_id, one in pairs
    ]


@pytest.mark.parametrize(("num_answers", "num_tokens", "width"), [(1, 3, 0), (1, 3, 20), (3, 700, 2), (1, 1200, 20)])
async def test_chats_have_the_bytes_that_python_objects_would_have(num_answers, num_tokens, width):
    chunks = answers(num_answers, num_tokens, width)
    style = ChatStyle(TOKENIZER, Additions(token_ids=True, prompt_ids=[(1, 2)]))
    body = await Envelope(style, ADMITTED, num_answers=num_answers).complete(chunks)
    pieces = await encoded(body)
    assert len(pieces) > num_tokens // TURN_MEMBERS * num_answers
    for choice, chunk in zip(body["choices"], chunks, strict=True):
        assert [encode_json(one) for one in choice["logprobs"]["content"]] == list(map(encode_json, content(chunk)))
        choice["logprobs"]["content"] = content(chunk)
    assert b"".join(pieces) == encode_json(body)


@pytest.mark.parametrize("num_tokens", [3, 1200])
async def test_completions_have_the_bytes_that_python_objects_would_have(num_tokens):
    chunks = answers(2, num_tokens)
    body = await Envelope(CompletionStyle(TOKENIZER, logprobs=WIDTH), ADMITTED, num_answers=2).complete(chunks)
    text = b"".join(await encoded(body))
    assert text == encode_json(body)
    for choice, chunk in zip(json.loads(text)["choices"], chunks, strict=True):
        top, labels = choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"]
        for number, scored in enumerate(chunk.logprobs):
            assert top[number][labels[number]] == max(scored.logprob, LOWEST_LOGPROB)


async def test_many_are_rendered_in_a_thread(monkeypatch):
    threads = set()
    token_bytes = TOKENIZER.token_bytes

    def noted(token_id: int) -> bytes:
        threads.add(threading.get_ident())
        return token_bytes(token_id)

    monkeypatch.setattr(TOKENIZER, "token_bytes", noted)
    for num_tokens, is_apart in ((4, False), (ENTRIES_AT_ONCE // WIDTH + 1, True)):
        threads.clear()
        await Envelope(ChatStyle(TOKENIZER), ADMITTED, num_answers=1).complete(answers(1, num_tokens))
        assert (threads != {threading.get_ident()}) is is_apart


@pytest.mark.parametrize("style", [ChatStyle, CompletionStyle])
async def test_tokens_are_named_by_their_ids_where_that_is_asked_for(style):
    [chunk] = answers(1, 4)
    wide = {"logprobs": WIDTH} if style is CompletionStyle else {}
    body = await Envelope(style(TOKENIZER, Additions(names_ids=True), **wide), ADMITTED, num_answers=1).complete(
        [chunk]
    )
    shown = json.loads(b"".join(await encoded(body)))["choices"][0]["logprobs"]
    tokens = shown["tokens"] if style is CompletionStyle else [one["token"] for one in shown["content"]]
    assert tokens == [f"token_id:{token_id}" for token_id in chunk.token_ids]
    top = (
        shown["top_logprobs"][0]
        if style is CompletionStyle
        else [one["token"] for one in shown["content"][0]["top_logprobs"]]
    )
    assert {f"token_id:{token_id}" for token_id, _ in chunk.logprobs[0].top} <= {*top}
