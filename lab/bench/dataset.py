"""Reads files of prompts: conversations, OpenAI's batches, prompts with lengths of answers, or recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.traffic.traces import BYTES_PER_TOKEN, read_trace
from lab.traffic.traces import FORMATS as TRACES

OWN_TEXTS = "texts"
"""Name of the data set that the project writes itself, from the run's seed."""
FORMATS = f"ShareGPT, lines with messages or prompt, or lengths from {TRACES}"
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
"""OpenAI role for each role name of ShareGPT. Role names that OpenAI's API has are kept."""
Message = Mapping[str, Any]


class Sample(NamedTuple):
    """A prompt of a data set."""

    messages: tuple[Message, ...]
    """The conversation up to the answer. Empty means that only lengths are known."""
    prompt_tokens: int
    """Tokens of the prompt, estimated from its bytes where there are messages."""
    output_tokens: int | None = None
    """Tokens of the answer. None means that the file does not say."""


def read_samples(path: Path) -> list[Sample]:
    """Return the prompts of a file, in its order. Raises OSError, or ValueError, which names the file, if it has no
    known format or no prompts."""
    # Formats: ShareGPT (`conversations`), lines with `messages` (the first answer gives its length), input files of
    # OpenAI's Batch API, lines with `prompt` and `output_tokens` (vLLM's custom data sets), and what `read_trace`
    # reads, for its lengths.
    with path.open(encoding="utf-8-sig") as file:
        head = file.readline().strip()
        if not head.startswith(("{", "[")) or (head.startswith("{") and _is_trace(head)):
            return [Sample((), row.prompt_tokens, row.output_tokens) for row in read_trace(path)]
        file.seek(0)
        try:
            samples = [_sample(row) for row in (json.load(file) if head.startswith("[") else _lines(file))]
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no data set: {_reason(error)}; known formats are {FORMATS}") from error
    valid_samples = [sample for sample in samples if sample is not None]
    if not valid_samples:
        raise ValueError(f"{path} holds no prompts")
    return valid_samples


def _is_trace(head: str) -> bool:
    """Return whether a file's first line is a row of a recorded trace: JSON with none of the fields that rows of
    prompts have."""
    try:
        row = json.loads(head)
    except ValueError:
        return False
    return not any(field in row for field in (*READERS, "id"))


def _lines(lines: Iterable[str]) -> Iterator[Any]:
    return (json.loads(line) for line in lines if line.strip())


def _reason(error: Exception) -> str:
    return f"a row has no {error}" if isinstance(error, KeyError) else str(error)


def _sample(row: Mapping[str, Any]) -> Sample | None:
    """Return the prompt of a row. None means that the row is a conversation without a message before its first
    answer."""
    for field, read in READERS.items():
        if field in row:
            return read(row)
    raise KeyError(" or ".join(READERS))


def _share_gpt(row: Mapping[str, Any]) -> Sample | None:
    turns = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in row["conversations"]]
    return _conversation(turns)


def _chat(row: Mapping[str, Any]) -> Sample | None:
    return _conversation(row["messages"])


def _batch_line(row: Mapping[str, Any]) -> Sample | None:
    body = row["body"]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if "messages" in body:
        return _measured(body["messages"], limit)
    return _measured(_user(body["prompt"]), limit)


def _custom(row: Mapping[str, Any]) -> Sample | None:
    return _measured(_user(row["prompt"]), row.get("output_tokens"))


READERS: Mapping[str, Callable[[Mapping[str, Any]], Sample | None]] = {
    "conversations": _share_gpt,
    "messages": _chat,
    "body": _batch_line,
    "prompt": _custom,
}
"""Function that reads a row of each format, by the field that only rows of this format have."""


def _conversation(turns: Sequence[Message]) -> Sample | None:
    """Return a sample with the messages before the first answer as its prompt, and the estimated length of that answer
    as its output length. None means that no message comes before it."""
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    prompt = turns[: answers[0]] if answers else turns
    return _measured(prompt, _tokens(turns[answers[0]]) if answers else None) if prompt else None


def _user(text: str) -> Sequence[Message]:
    if not isinstance(text, str):
        raise TypeError(f"a prompt must be a text, not {text!r:.40}")
    return ({"role": "user", "content": text},)


def _measured(messages: Sequence[Message], output_tokens: Any) -> Sample:
    output = None if output_tokens is None else max(1, int(output_tokens))
    return Sample(tuple(messages), sum(map(_tokens, messages)), output)


def _tokens(message: Message) -> int:
    return max(1, len(str(message["content"]).encode()) // BYTES_PER_TOKEN)


def plain_text(messages: Sequence[Message]) -> str:
    """Return the texts of a conversation as one, for servers that complete a text."""
    return "\n\n".join(str(message["content"]) for message in messages)
