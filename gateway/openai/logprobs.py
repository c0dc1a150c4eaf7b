"""Renders log probabilities in the formats of OpenAI's two endpoints, and those of prompts also in vLLM's.

Each token's are encoded at once, to a `Raw`: an answer of 12,000 tokens with 20 alternatives each has a quarter of a
million entries, which as Python's objects would take 0.9 s and 150 MB, and whose encoding would hold Python's lock for
0.1 s."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from engine.core.messages.requests import TokenLogprobs
from gateway.requests.prompt_scores import PromptScores
from gateway.requests.types import GenerationChunk
from gateway.text.tokenizer import Tokenizer

Json = dict[str, Any]

encode_json = msgspec.json.Encoder().encode

ID_NAME = "token_id:{}"
"""Name of a token for `return_tokens_as_token_ids`, as in vLLM's API."""
LOWEST_LOGPROB = -9999.0
"""Value that OpenAI sends for a probability of zero, because JSON cannot represent minus infinity."""


class ChatLogprobsRenderer:
    """Renders the log probabilities of a chat in OpenAI's format: one entry for each token of the text."""

    def __init__(self, tokenizer: Tokenizer, *, silent: bool = False, names_ids: bool = False) -> None:
        """Initialize the renderer. `silent` adds an entry for the stop token, which is not part of the text, so that
        the entries match the token ids. `names_ids` names tokens by their ids."""
        self._tokenizer = tokenizer
        self._names_ids = names_ids
        self._silent = silent
        self._texts: dict[int, tuple[bytes, bytes]] = {}
        """JSON of each token's entry so far before and after its log probability, by the token's id."""

    def render(self, chunk: GenerationChunk) -> Json | None:
        """Return `logprobs` for a chunk. None means that none were requested or that the chunk has no token to list."""
        count = len(chunk.logprobs) - (chunk.silent and not self._silent)
        if count <= 0:
            return None
        pairs = zip(chunk.token_ids[:count], chunk.logprobs[:count], strict=True)
        return {"content": [self._token(token_id, values) for token_id, values in pairs], "refusal": None}

    def _token(self, token_id: int, values: TokenLogprobs) -> Raw:
        numbers = encode_json([_finite(values.logprob), *(_finite(logprob) for _, logprob in values.top)])
        own, *top = numbers[1:-1].split(b",")
        entries = [self._entry(other, number) for (other, _), number in zip(values.top, top, strict=True)]
        return Raw(b'%b,"top_logprobs":[%b]}' % (self._entry(token_id, own)[:-1], b",".join(entries)))

    def _entry(self, token_id: int, number: bytes) -> bytes:
        if token_id not in self._texts:
            raw = self._tokenizer.token_bytes(token_id)
            text = ID_NAME.format(token_id) if self._names_ids else _text(raw)
            token, numbers = encode_json(text), encode_json(list(raw))
            self._texts[token_id] = b'{"token":%b,"logprob":' % token, b',"bytes":%b}' % numbers
        before, after = self._texts[token_id]
        return before + number + after


class CompletionLogprobsRenderer:
    """Renders the log probabilities of a completion in OpenAI's format: four parallel lists (tokens, their logprobs,
    the likeliest tokens, text offsets). An instance serves one response, because it counts each answer's characters."""

    def __init__(
        self, tokenizer: Tokenizer, echo: Sequence[str] = (), width: int = 0, *, names_ids: bool = False
    ) -> None:
        """Initialize the renderer.

        Args:
            echo: for each answer, the prompt that its text begins with, whose tokens are listed, too. Empty means that
                prompts are not echoed.
            width: number of likeliest tokens to list for each token of the prompt.
            names_ids: name tokens by their ids.
        """
        self._tokenizer = tokenizer
        self._names_ids = names_ids
        self._echo = echo
        self._width = width
        self._labels: dict[int, str] = {}
        self._places: dict[int, _Place] = {}
        """Length of each answer's text so far, by the answer's number."""

    def render(self, chunk: GenerationChunk) -> Json | None:
        """Return `logprobs` for a chunk; each answer's chunks must be rendered in order. None means that no log
        probabilities were requested or that the chunk has no tokens to list."""
        pairs = [*self._prompt(chunk), *zip(chunk.token_ids, chunk.logprobs, strict=False)]
        if not pairs:
            return None
        return {
            "tokens": [self._label(token_id) for token_id, _ in pairs],
            "token_logprobs": [values and _finite(values.logprob) for _, values in pairs],
            "top_logprobs": [values and self._top(token_id, values) for token_id, values in pairs],
            "text_offset": [self._offset(chunk.answer, token_id) for token_id, _ in pairs],
        }

    def length(self, index: int) -> int:
        """Return the length of an answer's text so far, in characters."""
        return self._places[index].length if index in self._places else 0

    def _prompt(self, chunk: GenerationChunk) -> Iterator[tuple[int, TokenLogprobs | None]]:
        """Yield the tokens of an echoed prompt with their log probabilities. The prompt's first token has none."""
        for token_id, scored in chunk.prompt_scores.pairs() if self._echo else ():
            yield token_id, scored and TokenLogprobs(scored.values.logprob, scored.values.top[: self._width])

    def _top(self, token_id: int, values: TokenLogprobs) -> Raw:
        """Return the log probabilities of the likeliest tokens and of the token itself, by label, as JSON."""
        pairs = (*values.top, (token_id, values.logprob))
        return Raw(encode_json({self._label(other): _finite(logprob) for other, logprob in pairs}))

    def _label(self, token_id: int) -> str:
        """Return a token's text or, if its bytes are not valid UTF-8, `bytes:` and the bytes spelled out. Labels are
        keys, so tokens that are not text by themselves need distinct labels."""
        if token_id not in self._labels:
            text = _text(self._tokenizer.token_bytes(token_id), "bytes:")
            self._labels[token_id] = ID_NAME.format(token_id) if self._names_ids else text
        return self._labels[token_id]

    def _offset(self, index: int, token_id: int) -> int:
        place = self._places.get(index)
        if place is None:
            place = self._places[index] = _Place(self._echo[index] if self._echo else "")
        return place.advance(self._tokenizer.token_bytes(token_id), is_special=self._tokenizer.is_special(token_id))


class _Place:
    """Length of an answer's text so far, in characters. A character that is still incomplete does not count."""

    def __init__(self, echo: str) -> None:
        """`echo` is the prompt that the text begins with. Unlike an answer, it shows the special tokens that its author
        has written, and not the space with which some tokenizers begin a text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._echo = echo
        self.length = 0

    def advance(self, raw: bytes, *, is_special: bool) -> int:
        """Append a token's bytes to the text and return the offset at which they begin, in characters."""
        begin = self.length
        if is_special:
            return self._append(raw if self._echo.startswith(raw.decode(), begin) else b"")
        if not begin and raw.startswith(b" ") and self._echo and not self._echo.startswith(" "):
            raw = raw[1:]
        return self._append(raw)

    def _append(self, raw: bytes) -> int:
        begin = self.length
        self.length += len(self._decoder.decode(raw))
        return begin


def prompt_logprobs(scores: PromptScores, width: int, tokenizer: Tokenizer) -> list[Raw | None]:
    """Return the log probabilities of a prompt in vLLM's format: for each token the JSON of an object that has, by
    token id, the token itself and the `width` likeliest ones; None for the first token."""
    texts: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        if token_id not in texts:
            texts[token_id] = tokenizer.token_text(token_id)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts[token_id]}

    found: list[Raw | None] = []
    for token_id, scored in scores.pairs():
        if scored is None:
            found.append(None)
            continue
        top = enumerate(scored.values.top[:width], 1)
        own = {str(token_id): entry(token_id, scored.values.logprob, scored.rank)}
        listed = {str(other): entry(other, logprob, rank) for rank, (other, logprob) in top} | own
        found.append(Raw(encode_json(listed)))
    return found


def _text(raw: bytes, prefix: str = "") -> str:
    """Decode UTF-8. Bytes that are not a valid text, such as part of a character, are spelled out after `prefix`:
    \\xf0\\x9f."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
