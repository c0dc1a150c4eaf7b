"""Recorded traffic: reads a trace in any known format, and scales and cuts it."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from engine.sim.trace_formats import FORMATS, Trace, find_reader


def read_trace(path: Path) -> Trace:
    """Read a trace in any of the known formats, and return it sorted by time, with the first arrival at 0. Raises
    OSError, and ValueError, which names the file, if it is in none of these formats, malformed or without requests.

    The formats are Azure LLM inference (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), the arena trace of the VTC
    artifact (CSV: req_time_s, client, prompt_len, output_len), BurstGPT (CSV: Timestamp, Model, Request tokens,
    Response tokens), what ServeGen saves (CSV: request_id, timestamp, input_tokens, output_tokens), Mooncake (JSON
    lines: timestamp in ms, input_length, output_length, hash_ids), input files of OpenAI's Batch API, and the request
    log of a gateway."""
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
