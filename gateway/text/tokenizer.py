"""Converts text to token ids and back. The engine handles only ids, so all text processing happens in the gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from tokenizers.decoders import DecodeStream

from engine.process.model_source import CHATS_BEGIN_WITH_BOS
from gateway.core.errors import context_length_exceeded, invalid_request, unsupported_parameter
from gateway.core.in_thread import in_thread
from gateway.core.json_bounds import has_more_values
from gateway.text.chat_template import (
    DEFAULT_OPTIONS,
    Message,
    TemplateOptions,
    ToolSchema,
    read_template,
    render,
    with_thinking,
)
from gateway.text.compiled_template import ChatTemplate
from gateway.text.encode_cache import EncodeCache
from gateway.text.reasoning.harmony import CHANNEL
from gateway.text.stored_tokenizer import follow_file

T = TypeVar("T")

THREAD_CHARACTERS = 20_000
"""Maximum characters encoded on the event loop; longer texts are encoded in a thread, so as not to block the loop."""

THREAD_IDS = 20_000
"""Maximum number of token ids decoded on the event loop by `decode_apart` and `pieces`; more are decoded in a
thread. Each takes a microsecond."""

TENANT_THREADS = 2
"""Maximum number of threads in which long texts of one tenant are encoded at the same time. Limits of requests apply
only once the tokens are known, and 8 MiB take seconds, so that one tenant could keep all threads from the others."""

RENDERED_VALUES = 1000
"""Maximum number of members of the messages and tools of a chat that is rendered on the event loop, counted with its
texts (`has_more_values`); a chat with more is rendered in a thread. Templates take some microseconds for each."""

MOST_TOKENS = 250_000
"""Maximum number of tokens of a text that is encoded for no model's context. The eight million tokens that 8 MiB may
have took 3 s and 3 GB, and to free them held Python's lock for 0.3 s."""

COUNTED_CHARACTERS = 128 * 1024
"""Characters of a long text that are encoded at a time to find out whether it has too many tokens."""
CHARACTERS_PER_TOKEN = 8
"""A chat with more characters for each token of the context is most likely too long for it, which is found out before
it is looked up in the cache."""
CUT_TOKENS = 16
"""Maximum number of tokens that a cut through a text adds."""

PRIME_TOKENS = 8
"""Number of last prompt tokens that a detokenizer reads, to know whether the answer continues a word or begins one."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer and chat template of a prepared model folder. Safe to share between tasks of one event loop."""

    def __init__(self, hf_tokenizer: Any) -> None:
        """`hf_tokenizer` is a fast tokenizer of the transformers library; its truncation and padding are turned off."""
        self._template = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special = frozenset(special)
        self._pieces = EncodeCache(self._backend, _marks(hf_tokenizer, special.values()))
        self._threads: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphore that bounds the encoding threads of each tenant. It exists only while the tenant uses any of
        them."""
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)
        self._in_channels = CHANNEL in self.template
        self._chat_start = hf_tokenizer.bos_token or "" if hf_tokenizer.init_kwargs.get(CHATS_BEGIN_WITH_BOS) else ""
        self._compiled: dict[str, ChatTemplate | str] = {}
        """The templates for chats without tools and for those with tools, by their sources. A text says why the
        template cannot be used, which each chat is told."""
        for source in filter(None, {self.template, self.tool_template}):
            self._compile(source)

    def _compile(self, source: str) -> ChatTemplate | str:
        made: ChatTemplate | str
        try:
            made = ChatTemplate(source)
        except ValueError as error:
            made = str(error)
        self._compiled[source] = made
        return made

    def with_template(self, template: str) -> Tokenizer:
        """Return a tokenizer that renders chats with another template, and shares everything else with this one. Its
        first chat has the template compiled, in a thread."""
        other = copy(self)
        other._template = copy(self._template)
        other._template.chat_template = template
        other._in_channels = CHANNEL in template
        other._compiled = {}
        return other

    @classmethod
    def load(cls, folder: Path, chat_template: Path | None = None) -> Tokenizer:
        """Load the tokenizer of a prepared model folder, with the file `chat_template` in place of the model's own if
        given. Raises OSError if a file is missing, ValueError if tokenizer or template cannot be used."""
        from transformers import AutoTokenizer  # Imported here: it takes a hundred megabytes of memory.

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, use_fast=True)
        follow_file(tokenizer, folder)
        if chat_template is not None:
            tokenizer.chat_template = read_template(chat_template)
            try:
                ChatTemplate(tokenizer.chat_template)
            except ValueError as error:
                raise ValueError(f"{chat_template}, {error}") from error
        return cls(tokenizer)

    async def encode(
        self, text: str, *, special: bool = True, tenant: str = "", most: int = MOST_TOKENS
    ) -> tuple[int, ...]:
        """Return the token ids of a tenant's text. `special` adds the special tokens that the model expects, such as
        BOS. A long text is encoded in a thread. Raises ApiError: CONTEXT_LENGTH_EXCEEDED, it is long and has more than
        `most` tokens."""
        [ids] = await self._encode_all((text,), special, tenant, most, "prompt")
        return ids

    @property
    def tool_template(self) -> str:
        """Chat template for requests with tools. Empty means that there is none or that it does not support tools."""
        try:
            template = self._template.get_chat_template(tools=[{}])
        except ValueError:
            return ""
        return str(template) if "tools" in template else ""

    @property
    def template(self) -> str:
        """Chat template for requests without tools. Empty means that there is none."""
        try:
            return str(self._template.get_chat_template())
        except ValueError:
            return ""

    async def encode_chat(
        self,
        tenant: str,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        cache_salt: str = "",
        most: int = MOST_TOKENS,
        *,
        special: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a chat, up to where the answer begins; pieces that the tenant sent before with the
        same salt are cached. `special` adds the special tokens of a text.

        Raises:
            ApiError: INVALID_REQUEST, the template fails; UNSUPPORTED_PARAMETER, it has no tools;
                CONTEXT_LENGTH_EXCEEDED, it has more than `most` tokens.
        """
        if (source := self._source(tools)) not in self._compiled and source:
            await self._in_thread(tenant, partial(self._compile, source))
        realm = f"{tenant}\0{cache_salt}" if cache_salt else tenant
        render = partial(self.render_chat, messages, tools, options)
        is_long = has_more_values((messages, tools), RENDERED_VALUES)
        text = await self._in_thread(tenant, render) if is_long else render()
        if len(text) > CHARACTERS_PER_TOKEN * most:
            await self._in_thread(tenant, partial(self._check_length, (text,), most, "messages"))
        if special:
            [ids] = await self._encode_all((text,), True, tenant, most, "messages")
            return ids
        pieces = self._pieces.cut(text)
        known = {piece: self._pieces.ids(realm, piece) for piece in pieces}
        new = [piece for piece, ids in known.items() if ids is None]
        for piece, ids in zip(new, await self._encode_all(new, False, tenant, most, "messages"), strict=True):
            known[piece] = self._pieces.remember(realm, piece, ids)
        return tuple(chain.from_iterable(known[piece] or () for piece in pieces))

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Return the text of a chat, rendered with the chat template. Raises ApiError: INVALID_REQUEST, there is none,
        it cannot be used or it refuses the messages; UNSUPPORTED_PARAMETER, it does not support tools, which the chat
        has."""
        self._check_tools(messages, tools)
        if not (source := self._source(tools)):
            raise invalid_request("this model has no chat template; send it texts, to /v1/completions", "messages")
        template = self._compiled.get(source) or self._compile(source)
        if isinstance(template, str):  # the base model's, or one that was loaded before such were refused
            raise invalid_request(f"the chat template of this model cannot be used: {template}", "model")
        chat = [with_thinking(message, with_calls=not self._in_channels) for message in messages]
        text = render(partial(template.render, self._template.special_tokens_map), chat, tools, options)
        return text if text.startswith(self._chat_start) else self._chat_start + text

    def _source(self, tools: Sequence[ToolSchema]) -> str:
        """Return the chat template that renders a chat with these tools; empty: there is none."""
        return self.tool_template if tools else self.template

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Raise ApiError (UNSUPPORTED_PARAMETER) if the chat has tools, tool calls or their results but the template
        does not support tools and would silently drop them."""
        param = "tools" if tools else "messages" if any(map(_is_about_tools, messages)) else ""
        if param and not self.tool_template:
            raise unsupported_parameter(param, "cannot be used: the chat template of this model knows no tools")

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        if len(token_ids) <= THREAD_IDS:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))
        # A batch of one: unlike `decode`, it does not hold Python's lock, for callers in a thread.
        [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special)
        return str(text)

    async def decode_apart(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, as `decode` does. Many of them are decoded in a thread, so that the event loop
        goes on."""
        decode = partial(self.decode, token_ids, skip_special=skip_special)
        return decode() if len(token_ids) <= THREAD_IDS else await in_thread(decode)

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it, which loses nothing: bytes that are no text by themselves are
        spelled out. An id beyond the vocabulary is empty. Many ids are looked up in a thread."""

        def found() -> list[str]:
            known = {token_id: str(self._backend.id_to_token(token_id) or "") for token_id in set(token_ids)}
            return [known[token_id] for token_id in token_ids]

        return found() if len(token_ids) <= THREAD_IDS else await in_thread(found)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, special tokens included. Incomplete UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that a token stands for, for a special token those of its name. An id beyond the
        vocabulary has no bytes."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special:
            return str(piece).encode()
        return _byte_level_bytes(piece) if self._byte_level else _piece_bytes(piece)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that the vocabulary lists as exactly this text. None means that there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def beyond(self, vocab_size: int) -> dict[str, int]:
        """Return the added and special tokens whose ids are not below `vocab_size`: text -> id. A tokenizer may know
        more tokens than the model has rows, for example a padding token that was added without resizing the model."""
        added = self._backend.get_added_tokens_decoder()
        return {str(token): token_id for token_id, token in added.items() if token_id >= vocab_size}

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a special token, which is not part of an answer's text."""
        return token_id in self._special

    def detokenizer(self, prompt_ids: Sequence[int] = (), marks: Sequence[str] = ()) -> Detokenizer:
        """Return a new detokenizer for one answer that continues the text of `prompt_ids`, empty in a chat. `marks` are
        texts of special tokens that are kept."""
        at_once = self._byte_level and not prompt_ids
        return Detokenizer(self._backend, prompt_ids, at_once=at_once, kept=self._silent(marks))

    def _silent(self, marks: Sequence[str]) -> dict[int, str]:
        """Return those of the `marks` that are special tokens, which decoding would skip: token id -> text."""
        ids = {token_id: mark for mark in marks if (token_id := self.token_id(mark)) is not None}
        return {token_id: mark for token_id, mark in ids.items() if not self.decode((token_id,))}

    async def _encode_all(
        self, texts: Sequence[str], special: bool, tenant: str, most: int, field: str
    ) -> list[tuple[int, ...]]:
        if sum(map(len, texts)) <= THREAD_CHARACTERS:
            return [self._encode(text, special) for text in texts]

        def encode() -> list[tuple[int, ...]]:
            self._check_length(texts, most, field)
            return [self._encode(text, special) for text in texts]

        return await self._in_thread(tenant, encode)

    def _check_length(self, texts: Sequence[str], most: int, field: str) -> None:
        """Raise ApiError (CONTEXT_LENGTH_EXCEEDED) if texts have more than `most` tokens together, before all of a long
        one is encoded."""
        count = 0
        for text in texts:
            for start in range(0, len(text), COUNTED_CHARACTERS) if len(text) > COUNTED_CHARACTERS else ():
                piece = text[start : start + COUNTED_CHARACTERS]
                [encoding] = self._backend.encode_batch_fast([piece], add_special_tokens=False)
                count += max(0, len(encoding) - CUT_TOKENS)
                if count > most:
                    raise context_length_exceeded(count, most, field)

    async def _in_thread(self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` in one of the tenant's threads, and return its result."""
        if (threads := self._threads.get(tenant)) is None:
            threads = self._threads[tenant] = asyncio.Semaphore(TENANT_THREADS)
        await threads.acquire()
        running = asyncio.ensure_future(in_thread(work))
        running.add_done_callback(lambda _: threads.release())  # not sooner: a thread goes on if the caller leaves
        try:
            return await asyncio.shield(running)
        finally:
            del running  # it has the exception, whose traceback has this frame: the cycle would keep the chat in memory

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)  # fast: without offsets
        return tuple(encoding.ids)


class Detokenizer:
    """Converts the token ids of one answer to text incrementally. It never emits part of a character, and it skips
    special tokens, apart from those that it keeps."""

    def __init__(
        self,
        backend: Any,
        prompt_ids: Sequence[int] = (),
        *,
        at_once: bool = False,
        kept: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Args:
        backend: a tokenizer of the `tokenizers` library.
        at_once: whether tokens pushed together may be decoded together, which holds for byte-level tokens if the
            prompt has left no character unfinished.
        kept: texts of special tokens that are kept, by their ids.
        """
        self._backend = backend
        self._at_once = at_once
        self._all_kept = self._kept = kept
        self._pending: list[int] = []
        self._stream = self._open(prompt_ids[-PRIME_TOKENS:])

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._kept or self._kept.keys().isdisjoint(token_ids):
            return self._step(list(token_ids)) if self._at_once else self._push(token_ids)
        runs = groupby(token_ids, key=self._kept.__contains__)
        return "".join(self._marks(ids) if kept else self._push(list(ids)) for kept, ids in runs)

    def keep(self, marks: Collection[str]) -> None:
        """From now on, include in the text only the special tokens whose texts are in `marks`, and skip the others."""
        self._kept = {token_id: mark for token_id, mark in self._all_kept.items() if mark in marks}

    def _marks(self, token_ids: Iterable[int]) -> str:
        """Return the text that was held back, followed by the texts of these kept special tokens. Decoding starts anew
        after them."""
        text = self.flush()
        self._stream = self._open(())
        return text + "".join(self._kept[token_id] for token_id in token_ids)

    def _push(self, token_ids: Sequence[int]) -> str:
        if self._at_once:
            return self._step(list(token_ids))
        return "".join(self._step([token_id]) for token_id in token_ids)

    def flush(self) -> str:
        """Return the text that is still held back, after the last token: an unfinished character becomes U+FFFD."""
        pending, self._pending = self._pending, []
        return self._decode(pending)

    def _step(self, token_ids: list[int]) -> str:
        self._pending += token_ids
        try:
            text = self._stream.step(self._backend, token_ids)
        except Exception as error:  # the library raises nothing more specific
            if "Invalid prefix" not in str(error):
                raise
            # If a byte makes a run of bytes invalid, byte-fallback decoders turn the whole run into U+FFFD, including
            # text that was emitted already. The emitted text stays as it is; a new stream continues after it.
            self._stream = self._open(token_ids)
            return self.flush()
        if text:
            self._pending.clear()
        return text or ""

    def _open(self, prime: Sequence[int]) -> DecodeStream:
        """Return a new decoding stream that continues after the tokens `prime`, and completes a character that they
        left unfinished. The text of these tokens is not emitted."""
        complete = len(prime)
        while complete and self._decode(prime[:complete]).endswith(REPLACEMENT):
            complete -= 1
        # A stream primed with an unfinished character would emit all of its prime along with the first token.
        stream = DecodeStream(ids=list(prime[:complete]), skip_special_tokens=True)
        for token_id in prime[complete:]:
            stream.step(self._backend, token_id)
        return stream

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


def _marks(hf_tokenizer: Any, special: Iterable[str]) -> list[str]:
    """Return those of the `special` tokens' texts that the chat template may write: BOS and EOS in any case, others if
    the template contains them. The list is empty if the tokenizer encodes special tokens as plain text."""
    if hf_tokenizer.backend_tokenizer.encode_special_tokens:
        return []
    named = {hf_tokenizer.bos_token, hf_tokenizer.eos_token}
    written = str(hf_tokenizer.chat_template)  # may be a mapping of several templates by name
    return [token for token in special if token in named or token in written]


def _is_about_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE (GPT-2): for each of its 256 printable characters, the byte that it
    represents."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_OTHERS = [chr(code) for code in range(128, 256) if chr(code) not in _BYTE_OF]
"""Characters of Latin-1 that represent no byte and are more than one byte in UTF-8."""
_LATIN_OF = str.maketrans({char: chr(byte) for char, byte in _BYTE_OF.items()} | dict.fromkeys(_OTHERS, "\u0100"))
"""Translates the alphabet to Latin-1, and `_OTHERS` to a character that Latin-1 lacks."""


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_LATIN_OF).encode("latin-1")
    except UnicodeEncodeError:  # of an added token, whose characters may stand for themselves
        return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in piece)


def _piece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece token: one byte if written as <0xAB>, else its text (U+2581 is a space)."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
