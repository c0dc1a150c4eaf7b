"""Steps with prompts that are replayed, against the same steps launched one by one, as graph_checks.py does it for
decode-only steps, but bit for bit: the base model's products are computed in fp64 here, so that a row's bits do not
depend on how many rows there are, as on a GPU they may. The smallest size of such steps must be 20 (`CHUNK_RUNG`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from graph_checks import CPU, FILTERED, LOGPROBS, SAMPLED, Pair, Setup
from torch import Tensor

from engine.model.decode.assembly import build_decoder
from engine.model.decode.decoder import Decoder
from engine.model.spec.config import read_spec
from engine.model.weights.reader import open_weights
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning

BUDGET, WINDOW = 40, 20
LONG, SHORT, PLAIN = 0, 1, 2
"""Numbers of what is recorded for a size: with long segments of adapters, without long ones, and without adapters."""
OF_40, OF_20, DECODES_OF_4 = 0, 3, 6
LORA = LoraTuning(most_programs=4, long_from=16)
PREFILL = PrefillTuning(block_m=16, block_n=16, fill=64, split_tokens=16, max_splits=4, programs=3)


def exact_linear(
    weights: Tensor | list[Tensor],
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Callable[[Tensor], Tensor]:
    weight = weights if isinstance(weights, Tensor) else torch.cat(weights)
    return lambda x: torch.nn.functional.linear(x.double(), weight.double(), bias).to(x.dtype)


def decoder(dtype: torch.dtype) -> Decoder:
    """The tiny model with a window in its first layer."""
    folder = Path(sys.argv[1])
    spec = replace(read_spec(folder), windows=(WINDOW, None))
    with patch("engine.model.decode.assembly.make_linear", exact_linear):
        return build_decoder(spec, open_weights(folder, spec), dtype, CPU)


@cache
def in_fp32() -> Decoder:
    return decoder(torch.float32)


@cache
def in_fp16() -> Decoder:
    return decoder(torch.float16)


EXACT = Setup(in_fp32, BUDGET, LORA, PREFILL, tolerance=0.0, against_torch=False)


def any_mix_of_chunks_and_decodes() -> None:
    """A prompt longer than a rung in several chunks, beside decodes and other prompts that come and go."""
    pair = Pair(EXACT)
    pair.both(lambda stepped: stepped.load("x", 3, range(20, 40)))
    pair.both(lambda stepped: stepped.load("y", 20, range(40, 80)))
    pair.admit("a", range(10, 60))
    pair.admit("b", (4, 5, 6), "x", SAMPLED)
    assert pair.step("ab", most={"a": 20}) == OF_40 + SHORT
    pair.admit("c", range(20, 29), "y", LOGPROBS)
    assert pair.step("abc", most={"a": 10}) == OF_20 + SHORT
    pair.admit("d", range(30, 48), "x", FILTERED)
    assert pair.step("bcd") == OF_20 + LONG, "19 rows have the same adapter"
    assert pair.step("ab", most={"a": 1}) == OF_20 + SHORT, "a row that is not sampled beside a decode"
    pair.preempt("d")
    pair.admit("e", range(50, 92))
    assert pair.step("ace", most={"e": 21}) is None, "more rows than any rung"
    assert pair.step("e", most={"e": 10}) == OF_20 + PLAIN, "nothing is sampled"
    assert pair.step("ace") == OF_20 + SHORT
    assert pair.step("ace") == DECODES_OF_4


def keys_and_values_in_eight_bits() -> None:
    """In fp16, as nothing but 16 bits has FP8 pages. Kernels also ran while they were recorded, and changed no page."""
    setup = replace(EXACT, make_decoder=in_fp16, token_budget=20, dtype=torch.float16, fp8_kv=True, warms_up=True)
    pair = Pair(setup)
    pair.both(lambda stepped: stepped.load("x", 3, range(20, 60)))
    pair.admit("a", range(10, 40))
    pair.admit("b", (4, 5, 6), "x")
    assert pair.step("ab", most={"a": 13}) == 0 + SHORT
    assert pair.step("ab") == 0 + SHORT


CHUNK_CHECKS = {check.__name__: check for check in (any_mix_of_chunks_and_decodes, keys_and_values_in_eight_bits)}
