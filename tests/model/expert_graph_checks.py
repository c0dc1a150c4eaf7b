"""Steps of a model with experts that are replayed, against the same steps launched one by one, as graph_checks.py does
it for a model without. The folder of the model is the second argument of the script; `CHUNK_RUNG` must be 20."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from graph_checks import CPU, LOGPROBS, SAMPLED, Pair, Setup
from torch import Tensor

from engine.model.decode.assembly import build_decoder
from engine.model.decode.decoder import Decoder
from engine.model.spec.config import read_spec
from engine.model.weights.reader import open_weights
from lora_kernels.gpu.grouped_linear import DeviceExperts
from lora_kernels.gpu.triton_lora_tuning import LoraTuning

LONG, SHORT, PLAIN = 0, 1, 2
"""Numbers of what is recorded for steps with prompts: with long segments of adapters, without, and without adapters."""
OF_4 = 3
"""Number of the first record of decode-only steps."""


def device_experts(
    weights: Iterable[Sequence[Tensor]],
    count: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    biases: Tensor | None = None,
) -> DeviceExperts:
    """`make_grouped` as if on a GPU."""
    return DeviceExperts((torch.cat(list(pieces)) for pieces in weights), count, out_dtype, biases)


@cache
def decoder() -> Decoder:
    folder = Path(sys.argv[2])
    spec = read_spec(folder)
    with patch("engine.model.decode.assembly.make_grouped", device_experts):
        return build_decoder(spec, open_weights(folder, spec), torch.float32, CPU)


def adapters_of_experts() -> None:
    """Adapters have long segments, then short ones beside padding rows; a replay of the base model follows."""
    assert not decoder().waits_for_routing
    lora = LoraTuning(most_programs=4, long_from=16)
    pair = Pair(Setup(decoder, 20, lora, warms_up=True, against_torch=False))
    pair.both(lambda stepped: stepped.load("x", 3, range(20, 50)))
    pair.both(lambda stepped: stepped.load("y", 5, range(50, 80)))
    pair.admit("a", range(10, 13))
    pair.admit("b", range(20, 36), "x", SAMPLED)
    assert pair.step("ab") == LONG, "16 rows have the same adapter"
    pair.admit("c", (9, 8), "y", LOGPROBS)
    assert pair.step("abc") == SHORT
    assert pair.step("abc") == OF_4
    assert pair.step("a") == OF_4 + 5


EXPERT_CHECKS = {adapters_of_experts.__name__: adapters_of_experts}
