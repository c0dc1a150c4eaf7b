"""Renders the choices of OpenAI's chats and completions, whole or as the deltas of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from gateway.openai.logprobs import ChatLogprobsRenderer, CompletionLogprobsRenderer, prompt_logprobs
from gateway.openai.tools import ChunkContent, ToolCalls, text_content
from gateway.requests.types import GenerationChunk
from gateway.text.tokenizer import Tokenizer

Json = dict[str, Any]


class Style(Protocol):
    """Renders the items of `choices` in one endpoint's responses, as JSON objects. An instance serves one request."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """Return the choice to stream before any text of the answer with the number `index`. None means that there is
        none."""

    def delta(self, chunk: GenerationChunk) -> Json:
        """Return the choice to stream for a chunk. Each answer's chunks must be passed once and in order."""

    def complete(self, chunk: GenerationChunk) -> Json:
        """Return the choice of a complete response, from one joined chunk that holds the whole answer."""

    @property
    def shared(self) -> Json:
        """Return the fields that a complete response, and the first chunk of a stream, have beside `choices`."""

    def beside(self, chunk: GenerationChunk) -> Json:
        """Return the further fields that a complete response has beside `choices`, from the joined chunk of the first
        answer."""


class Additions(NamedTuple):
    """What vLLM's API tells of each answer beyond OpenAI's, as far as a request asks for it."""

    token_ids: bool = False
    """Choices have their token ids, and responses those of the prompts."""
    prompt_ids: Sequence[tuple[int, ...]] = ()
    """The token ids of the prompt of each answer."""
    stop_ids: Collection[int] = ()
    """The token ids that end an answer because the request asks for it."""
    names_ids: bool = False
    """Tokens of log probabilities are named by their ids."""

    def of(self, chunk: GenerationChunk) -> Json:
        """Return the fields that a chunk's choice has in addition. The last chunk's has `stop_reason`: the stop string
        or stop token of the request that ended the answer, None if something else did."""
        added: Json = {"token_ids": chunk.token_ids} if self.token_ids else {}
        if chunk.finish_reason is None:
            return added
        last = chunk.token_ids[-1] if chunk.token_ids and chunk.finish_reason == "stop" else None
        return {"stop_reason": chunk.stop_string or (last if last in self.stop_ids else None)} | added


NO_ADDITIONS = Additions()


class ChatStyle:
    """The `Style` of /v1/chat/completions: renders messages and deltas with tool calls and log probabilities."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        additions: Additions = NO_ADDITIONS,
        *,
        tools: ToolCalls | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        """Initialize the style.

        Args:
            tokenizer: renders the tokens of log probabilities.
            additions: what choices have beyond OpenAI's API.
            tools: reads tool calls from the answers. None means that no tools were offered and everything is text.
            prompt_logprobs: include log probabilities of the prompt beside the choices.
        """
        self._tokenizer = tokenizer
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = ChatLogprobsRenderer(tokenizer, silent=additions.token_ids, names_ids=additions.names_ids)
        self._additions = additions
        self._tools = tools

    @property
    def shared(self) -> Json:
        return {"prompt_token_ids": self._additions.prompt_ids[0]} if self._additions.token_ids else {}

    def opening(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, chunk: GenerationChunk) -> Json:
        told = self._told(chunk)
        content: Json = {"content": told.text} if told.text else {}
        if chunk.reasoning:
            content |= _reasoning(chunk)
        if told.calls:
            content["tool_calls"] = told.calls
        return self._choice(chunk, "delta", content, told)

    def complete(self, chunk: GenerationChunk) -> Json:
        told = self._told(chunk)
        message: Json = {"role": "assistant", "content": told.text, "refusal": None, **_reasoning(chunk)}
        if told.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in told.calls]
            message |= {"content": told.text or None, "tool_calls": calls}
        return self._choice(chunk, "message", message, told)

    def beside(self, chunk: GenerationChunk) -> Json:
        if not self._prompt_logprobs:
            return {}
        scores = chunk.prompt_scores
        return {"prompt_logprobs": prompt_logprobs(scores, scores.width, self._tokenizer)}

    def _told(self, chunk: GenerationChunk) -> ChunkContent:
        return self._tools.read(chunk) if self._tools else text_content(chunk)

    def _choice(self, chunk: GenerationChunk, name: str, content: Json, told: ChunkContent) -> Json:
        logprobs = self._logprobs.render(chunk)
        choice = {"index": chunk.answer, name: content, "logprobs": logprobs, "finish_reason": told.finish_reason}
        return choice | self._additions.of(chunk)


class CompletionStyle:
    """The `Style` of /v1/completions: renders texts with log probabilities, after the prompt if it is echoed."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        additions: Additions = NO_ADDITIONS,
        *,
        echo: Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """Initialize the style.

        Args:
            tokenizer: renders the tokens of log probabilities.
            additions: what choices have beyond OpenAI's API.
            echo: for each answer, the prompt that its text begins with; empty if prompts are not echoed.
            logprobs: number of alternatives to list for each token of an echoed prompt. None means that no log
                probabilities were requested.
            prompt_logprobs: number of alternatives to list for each token of the prompt in the choice's field of this
                name. None means that there is no such field.
        """
        self._tokenizer = tokenizer
        scored = () if logprobs is None else echo
        self._logprobs = CompletionLogprobsRenderer(tokenizer, scored, logprobs or 0, names_ids=additions.names_ids)
        self._additions = additions
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._unsent = dict(enumerate(scored))
        """The rest of each answer's prompt in a stream, which waits for its log probabilities."""

    @property
    def shared(self) -> Json:
        return {}

    def opening(self, index: int) -> Json | None:
        if not self._echo and not self._additions.token_ids:
            return None
        text = self._echo[index] if self._echo and not self._unsent else ""
        choice: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._additions.token_ids:
            choice |= {"prompt_token_ids": self._additions.prompt_ids[index], "token_ids": ()}
        return choice

    def delta(self, chunk: GenerationChunk) -> Json:
        choice = self._choice(chunk)
        return choice | {"text": self._echoed(chunk) + chunk.text} if self._unsent else choice

    def complete(self, chunk: GenerationChunk) -> Json:
        echo = self._echo[chunk.answer] if self._echo else ""
        choice = self._choice(chunk) | {"text": echo + chunk.text}
        if self._additions.token_ids:
            choice["prompt_token_ids"] = self._additions.prompt_ids[chunk.answer]
        if self._prompt_logprobs is not None:
            rendered = prompt_logprobs(chunk.prompt_scores, self._prompt_logprobs, self._tokenizer)
            choice["prompt_logprobs"] = rendered
        return choice

    def beside(self, chunk: GenerationChunk) -> Json:
        return {}

    def _choice(self, chunk: GenerationChunk) -> Json:
        logprobs = self._logprobs.render(chunk)
        choice = {"index": chunk.answer, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        return choice | self._additions.of(chunk)

    def _echoed(self, chunk: GenerationChunk) -> str:
        """Return the text of the prompt whose log probabilities a chunk has, or all that is left of it once the answer
        begins."""
        rest = self._unsent[chunk.answer]
        sent = len(self._echo[chunk.answer]) - len(rest)
        begins = chunk.token_ids or chunk.finish_reason
        end = len(rest) if begins else self._logprobs.length(chunk.answer) - sent
        self._unsent[chunk.answer] = rest[end:]
        return rest[:end]


def tells(choice: Json) -> bool:
    """Return whether a chunk with this choice would tell the client anything."""
    get = choice.get  # a generator expression over the names took 0.8 us of a token's 26
    return bool(get("delta") or get("text") or get("finish_reason") or get("logprobs") or get("token_ids"))


def ending(choice: Json) -> list[Json]:
    """Return the choices of the chunks that end an answer: the last text and, apart from it as in OpenAI's API, the
    finish reason."""
    told = {name: value for name, value in choice.items() if name != "stop_reason"} | {"finish_reason": None}
    if not tells(told):
        return [choice]
    emptied: Json = {"delta": {}} if "delta" in choice else {"text": ""}
    ids: Json = {"token_ids": ()} if "token_ids" in choice else {}
    return [told, choice | emptied | ids | {"logprobs": None}]


def _reasoning(chunk: GenerationChunk) -> Json:
    """Return the reasoning of a chunk under the names of DeepSeek's and of vLLM's API."""
    return {"reasoning_content": chunk.reasoning, "reasoning": chunk.reasoning} if chunk.reasoning else {}
