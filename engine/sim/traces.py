"""Reads recorded traffic in three public trace formats, which are recognized by the beginning of the file."""

from __future__ import annotations

import csv
import json
import math
import operator
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from engine.core.types import Lane

BLOCK_TOKENS = 512
"""Number of tokens that a hash id in a Mooncake trace stands for."""


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


Trace = list[Arrival]
"""Requests in order of arrival; the first arrival of a recorded trace is at 0."""


def read_trace(path: Path) -> Trace:
    """Read a trace in any of the known formats, and return it sorted by time, with the first arrival at 0. Raises
    OSError, and ValueError, which names the file, if it is in none of these formats, malformed or without requests. The
    formats are Azure LLM inference (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake (JSON lines: timestamp in
    ms, input_length, output_length, hash_ids), and the arena trace of the VTC artifact (CSV: req_time_s, client,
    prompt_len, output_len)."""
    with path.open(newline="") as file:
        head = file.readline()
        file.seek(0)
        read = next((reader for start, reader in READERS.items() if head.startswith(start)), None)
        if read is None:
            raise ValueError(f"{path} is no trace: it begins with {head[:40]!r}, not with one of {', '.join(READERS)}")
        try:
            arrivals = sorted(read(file), key=lambda arrival: arrival.time)
        except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
            raise ValueError(f"{path} is no trace in the format it begins with: {error!r}") from error
    if not arrivals:
        raise ValueError(f"{path} holds no requests")
    if not all(math.isfinite(arrival.time) for arrival in arrivals):
        raise ValueError(f"{path} has a time that is not finite")
    return [arrival._replace(time=arrival.time - arrivals[0].time) for arrival in arrivals]


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Return the trace with `factor` times as many arrivals per second: all arrival times are divided by `factor`."""
    return [arrival._replace(time=arrival.time / factor) for arrival in trace]


def cut(trace: Trace, seconds: float) -> Trace:
    """Return the requests of a trace that arrive before `seconds` seconds."""
    return [arrival for arrival in trace if arrival.time < seconds]


def _azure(file: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # The time has seven decimals, but Python parses at most six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
        yield Arrival(time, _count(int(row["ContextTokens"])), _count(int(row["GeneratedTokens"])))


def _arena(file: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        prompt, output = _count(int(row["prompt_len"])), _count(int(row["output_len"]))
        yield Arrival(float(row["req_time_s"]), prompt, output, f"client-{int(row['client']):02}")


def _mooncake(file: Iterable[str]) -> Iterator[Arrival]:
    names: dict[int, int] = {}
    for line in file:
        row = json.loads(line)
        sizes = row["timestamp"] / 1000, _count(row["input_length"]), _count(row["output_length"])
        yield Arrival(*sizes, blocks=tuple(names.setdefault(name, len(names)) for name in row["hash_ids"]))


def _count(tokens: int) -> int:
    """Return a number of tokens, at least 1, because recorders write 0 for sizes that they did not see. Raises
    TypeError if it is not an integer."""
    return max(1, operator.index(tokens))


READERS = {"TIMESTAMP,": _azure, "req_time_s,": _arena, "{": _mooncake}
"""Beginning of a file in each format -> its reader."""
