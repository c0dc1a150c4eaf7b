"""An engine process without a model that dies of some requests' sixth token, told by their seeds."""

import os
import time

from engine.executor.fake import FakeExecutor
from engine.serve import build, server

CRASH, HANG = 666, 667
"""Seeds of requests that end the process, or make a step that never ends."""
FATAL_TOKENS = 5
"""Tokens that such a request has before."""
STEP_SECONDS = 0.005
sample = FakeExecutor._sample


def sample_or_die(executor, chunk):
    sequence = executor.sequences[chunk.request_id]
    produced = len(sequence.tokens) - sequence.admission.num_prompt
    if produced >= FATAL_TOKENS and sequence.admission.params.seed == CRASH:
        os.abort()
    if produced >= FATAL_TOKENS and sequence.admission.params.seed == HANG:
        time.sleep(1000)
    return sample(executor, chunk)


def slowly(collect):
    def collected(executor):
        time.sleep(STEP_SECONDS)
        return collect(executor)

    return collected


def main():
    """Serve. Nothing is patched before: tests import this module for its seeds."""
    build.CPU_PATIENCE_S = 1.0
    FakeExecutor._sample = sample_or_die
    FakeExecutor.collect = slowly(FakeExecutor.collect)
    server.main()


if __name__ == "__main__":
    main()
