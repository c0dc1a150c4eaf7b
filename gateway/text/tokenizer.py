"""Converts text to token ids and back. The engine handles only ids, so all text processing happens in the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

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
from gateway.text.detokenizer import Detokenizer
from gateway.text.encode_cache import EncodeCache, written_marks
from gateway.text.reasoning.harmony import CHANNEL
from gateway.text.stored_tokenizer import follow_file
from gateway.text.tenant_threads import TenantThreads
from gateway.text.token_bytes import byte_level_bytes, piece_bytes

THREAD_CHARACTERS = 20_000
"""Maximum characters encoded on the event loop; longer texts are encoded in a thread, so as not to block the loop."""

THREAD_IDS = 20_000
"""Maximum number of token ids decoded on the event loop by `decode_apart` and `pieces`; more are decoded in a
thread. Each takes a microsecond."""

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
        self._pieces = EncodeCache(self._backend, written_marks(hf_tokenizer, special.values()))
        self._threads = TenantThreads()
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
            await self._threads.run(tenant, partial(self._compile, source))
        realm = f"{tenant}\0{cache_salt}" if cache_salt else tenant
        render = partial(self.render_chat, messages, tools, options)
        is_long = has_more_values((messages, tools), RENDERED_VALUES)
        text = await self._threads.run(tenant, render) if is_long else render()
        if len(text) > CHARACTERS_PER_TOKEN * most:
            await self._threads.run(tenant, partial(self._check_length, (text,), most, "messages"))
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
        return byte_level_bytes(piece) if self._byte_level else piece_bytes(piece)

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

        return await self._threads.run(tenant, encode)

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

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special)  # fast: without offsets
        return tuple(encoding.ids)


def _is_about_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message
