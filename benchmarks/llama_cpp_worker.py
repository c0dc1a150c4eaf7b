"""Times llama.cpp in a process of its own, whose Python has llama-cpp-python and none of this project's packages.

Reads a line of JSON from standard input for each measurement, and answers with one: `{"streams": 8, "prompt": 64,
"tokens": 32, "seed": 1}` with the seconds of the median `llama_decode` in which all sequences get a token, and without
streams, those of a prompt. The library itself is called, without its server, which decodes one request at a time.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence

import llama_cpp as lib

MOST_TOKENS = 512
"""Tokens of a batch; llama.cpp computes as many at a time by default."""


class Context:
    """A model with a context of `streams` sequences of `length` tokens, computed by `threads` threads."""

    def __init__(self, path: str, streams: int, length: int, threads: int) -> None:
        lib.llama_backend_init()
        self._log = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._log, None)
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * length, streams
        params.n_batch = params.n_ubatch = MOST_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context or streams > MOST_TOKENS:
            raise ValueError(f"llama.cpp has no context for {streams} sequences")
        self._batch = lib.llama_batch_init(MOST_TOKENS, 0, 1)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def compute(self, rows: Sequence[tuple[int, int, int, bool]]) -> float:
        """Compute rows of (token, position, sequence, whether its logits are wanted); return the seconds."""
        self._batch.n_tokens = len(rows)
        for index, (token, position, sequence, sampled) in enumerate(rows):
            self._batch.token[index], self._batch.pos[index] = token, position
            self._batch.n_seq_id[index], self._batch.seq_id[index][0] = 1, sequence
            self._batch.logits[index] = sampled
        began = time.perf_counter()
        if lib.llama_decode(self._context, self._batch):
            raise ValueError("llama_decode failed")
        lib.llama_synchronize(self._context)
        return time.perf_counter() - began


def measure(context: Context, order: dict[str, int]) -> float:
    rng, prompt = random.Random(order["seed"]), order["prompt"]
    context.clear()
    streams = range(max(order["streams"], 1))
    for sequence in streams:
        rows = [(rng.randrange(context.vocab), place, sequence, place == prompt - 1) for place in range(prompt)]
        took = context.compute(rows)
    if not order["streams"]:
        return took
    steps = [
        context.compute([(rng.randrange(context.vocab), prompt + step, sequence, True) for sequence in streams])
        for step in range(order["tokens"])
    ]
    return statistics.median(steps[4:])


def main() -> None:
    path, streams, length, threads = sys.argv[1], *map(int, sys.argv[2:5])
    context = Context(path, streams, length, threads)
    print(json.dumps({"version": lib.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(context, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
