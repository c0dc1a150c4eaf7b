"""Recorded traffic: reads a trace in any known format, which its first line shows, and scales and cuts it."""

from __future__ import annotations

import csv
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.messages.requests import Lane

BLOCK_TOKENS = 512
"""Number of tokens that a hash id in a Mooncake trace stands for."""
BYTES_PER_TOKEN = 4
"""Estimated bytes of text in a token, for files that have texts instead of numbers of tokens."""
DEFAULT_ANSWER = 256
"""Estimated tokens of an answer, for requests in batch files that set no limit."""
MOST_TOKENS = 1 << 31
"""Number of tokens below which every prompt and answer must be. A trace with a longer one is refused."""


class Arrival(NamedTuple):
    """One request of a trace, with its sizes in tokens but without its text."""

    time: float
    """Arrival time in seconds from the beginning of the trace."""
    prompt_tokens: int
    output_tokens: int
    tenant: str = "trace"
    lane: Lane = Lane.INTERACTIVE
    adapter: int = -1
    """Index of the adapter; -1 is the base model."""
    blocks: tuple[int, ...] = ()
    """Ids, from 0 on, of the prompt's leading blocks of 512 tokens. Blocks with equal ids hold equal tokens."""
    cached_tokens: int = 0
    """Tokens of the prompt that the recorded server took from its prefix cache, where the trace says so."""


Trace = list[Arrival]
"""Requests in order of arrival; the first arrival of a recorded trace is at 0."""
Reader = Callable[[Iterable[str]], Iterator[Arrival]]
"""Reads the lines of a file. Raises KeyError, TypeError, ValueError, OverflowError, RecursionError or csv.Error if one
is malformed."""


def find_reader(head: str) -> Reader | None:
    """Return the function that reads traces of the format that a file's first line shows. None means that the format is
    not known."""
    if head.startswith("{"):
        row = json.loads(head)
        return next((reader for field, reader in JSON_READERS.items() if field in row), None)
    columns = {name.strip() for name in head.split(",")}
    return next((reader for column, reader in CSV_READERS.items() if column in columns), None)


def _azure(lines: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        # The time has seven decimals, but Python parses at most six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
        yield Arrival(time, _count(int(row["ContextTokens"])), _count(int(row["GeneratedTokens"])))


def _arena(lines: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        prompt, output = _count(int(row["prompt_len"])), _count(int(row["output_len"]))
        yield Arrival(float(row["req_time_s"]), prompt, output, f"client-{int(row['client']):02}")


def _burst_gpt(lines: Iterable[str]) -> Iterator[Arrival]:
    """Read a trace that BurstGPT has released. Requests without an answer failed, and are left out."""
    for row in csv.DictReader(lines):
        if answered := int(row["Response tokens"]):
            yield Arrival(float(row["Timestamp"]), _count(int(row["Request tokens"])), _count(answered), row["Model"])


def _serve_gen(lines: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        prompt, output = (_count(round(float(row[name]))) for name in ("input_tokens", "output_tokens"))
        yield Arrival(float(row["timestamp"]), prompt, output)


def _mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    number = _numbers()
    for row in _objects(lines):
        sizes = row["timestamp"] / 1000, _count(row["input_length"]), _count(row["output_length"])
        yield Arrival(*sizes, blocks=tuple(map(number, row.get("hash_ids", ()))))


def _request_log(lines: Iterable[str]) -> Iterator[Arrival]:
    """Read the log of a gateway as a trace. Only lines of requests that generated tokens and ended without an error
    become arrivals."""
    number = _numbers()
    for row in _objects(line for line in lines if line.startswith("{")):
        if row.get("event") != "request" or row["error"] or not row["completion_tokens"]:
            continue
        ended = datetime.fromisoformat(row["timestamp"]).timestamp()
        prompt = _count(row["prompt_tokens"])
        yield Arrival(
            time=ended - (row["duration_ms"] or 0.0) / 1000,
            prompt_tokens=prompt,
            output_tokens=_count(row["completion_tokens"]),
            tenant=str(row["tenant"] or "trace"),
            lane=Lane.BATCH if row["lane"] == "batch" else Lane.INTERACTIVE,
            adapter=number(row["adapter"]) if row["adapter"] else -1,
            cached_tokens=min(prompt, max(0, operator.index(row["cached_tokens"]))),
        )


def _openai_batch(lines: Iterable[str]) -> Iterator[Arrival]:
    """Read an input file of OpenAI's Batch API as a trace. All requests arrive at once, the tokens of their texts are
    estimated, and each model that they name counts as an adapter."""
    number = _numbers()
    for row in _objects(lines):
        body = row["body"]
        if not isinstance(body, dict):
            raise TypeError("a body is no object")
        text = json.dumps(body.get("messages") or body.get("prompt") or body.get("input") or "", ensure_ascii=False)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
        output = _count(limit or DEFAULT_ANSWER)
        prompt = _count(len(text.encode()) // BYTES_PER_TOKEN)
        yield Arrival(0.0, prompt, output, "batch", Lane.BATCH, number(body["model"]))


def _objects(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"{line[:40]!r} is no object")
            yield row


def _numbers() -> Callable[[Any], int]:
    """Return a function that numbers names from 0 on, in the order in which it is first given them."""
    known: dict[Any, int] = {}
    return lambda name: known.setdefault(name, len(known))


def _count(tokens: int) -> int:
    """Return a number of tokens, at least 1, because recorders write 0 for sizes that they did not see. Raises
    TypeError if it is not an integer, and ValueError if it is not below `MOST_TOKENS`."""
    if operator.index(tokens) >= MOST_TOKENS:
        raise ValueError(f"a length must be below {MOST_TOKENS:,} tokens")
    return max(1, operator.index(tokens))


CSV_READERS: Mapping[str, Reader] = {
    "TIMESTAMP": _azure,
    "req_time_s": _arena,
    "Request tokens": _burst_gpt,
    "input_tokens": _serve_gen,
}
"""Column that only tables of this format have -> its reader."""
JSON_READERS: Mapping[str, Reader] = {"input_length": _mooncake, "custom_id": _openai_batch, "event": _request_log}
"""Field that only lines of this format have -> its reader."""
FORMATS = "Azure, Mooncake, VTC arena, BurstGPT, ServeGen, OpenAI's batches, or a gateway's log"
"""The formats, for help and errors."""


def read_trace(path: Path) -> Trace:
    """Read a trace in any known format, and return it sorted by time, with the first arrival at 0. Raises OSError, and
    ValueError, which names the file, if it is malformed or empty."""
    # Formats: Azure LLM inference (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), the VTC artifact's arena trace
    # (CSV: req_time_s, client, prompt_len, output_len), BurstGPT (CSV: Timestamp, Model, Request tokens, Response
    # tokens), ServeGen (CSV: request_id, timestamp, input_tokens, output_tokens), Mooncake (JSON lines: timestamp in
    # ms, input_length, output_length, hash_ids), input files of OpenAI's Batch API, and a gateway's request log.
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            read = find_reader(head)
            if read is None:
                raise ValueError(f"it begins with {head[:40]!r}; known formats are {FORMATS}")
            file.seek(0)
            arrivals = sorted(read(file), key=lambda arrival: arrival.time)
    except KeyError as error:
        raise ValueError(f"{path} is no trace: a row has no {error}") from error
    except (TypeError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} is no trace: {error}") from error
    if not arrivals:
        raise ValueError(f"{path} holds no requests")
    trace = [arrival._replace(time=arrival.time - arrivals[0].time) for arrival in arrivals]
    if not all(math.isfinite(arrival.time) for arrival in trace):
        raise ValueError(f"{path} has times that are not finite")
    return trace


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Return the trace with `factor` times as many arrivals per second: all arrival times are divided by `factor`."""
    return [arrival._replace(time=arrival.time / factor) for arrival in trace]


def cut(trace: Trace, seconds: float) -> Trace:
    """Return the requests of a trace that arrive before `seconds` seconds."""
    return [arrival for arrival in trace if arrival.time < seconds]
