"""The cost of steps by data sheets against throughputs that TensorRT-LLM publishes.

Source: docs/source/performance/perf-overview.md of TensorRT-LLM 0.17, "Throughput Measurements": output tokens a second
of requests that all arrive at once, by lengths of prompts and answers. It reserves pages for whole answers
(GUARANTEED_NO_EVICT), runs up to 2,048 requests and computes up to 8,192 tokens a step.
"""

import statistics

import pytest

from engine.core.config import CoreConfig
from engine.sim.accelerators import ACCELERATORS, FORMS, device_of
from engine.sim.capacity import Demand, serve
from engine.sim.shapes import SHAPES

LENGTHS = (
    (128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (2048, 128), (2048, 2048), (5000, 500),
    (20000, 2000),
)  # fmt: skip
PUBLISHED = {
    ("llama-3.1-8b", "h100", 1, "fp8"): (28837, 21109, 13594, 16501, 15245, 3557, 9488, 3559, 1401),
    ("llama-3.1-8b", "h200", 1, "fp8"): (29526, 25399, 17371, 21021, 17538, 3794, 11969, 3988, 1804),
    ("llama-3.1-8b", "a100", 1, "bf16"): (6627, 5256, 3454, 4277, 3787, 800, 2424, 825, 330),
    ("llama-3.1-70b", "h100", 2, "fp8"): (6645, 6170, 3897, 4973, 4391, 773, 2898, 920, 443),
    ("llama-3.1-70b", "h100", 4, "fp8"): (11128, 11512, 7439, 9837, 7431, 1303, 5480, 1603, 920),
    ("llama-3.1-70b", "a100", 4, "bf16"): (2733, 2811, 1976, 2276, 1922, 325, 1394, 393, 212),
    ("llama-3.1-70b", "a100", 8, "bf16"): (4718, 5242, 3725, 4445, 3320, 542, 2554, 696, 413),
}


def predicted(model, accelerator, ranks, form, prompt, output):
    sizes = {"max_seqs": 2048, "token_budget": 8192}
    device = device_of(SHAPES[model], FORMS[form], ACCELERATORS[accelerator], ranks, **sizes)
    demand = Demand(prompt, output, prompt + output / 2, reserved=prompt + output)
    return serve(device, CoreConfig(**device.engine), demand, 1e9).rate * output


RATIOS = {
    (*deployment, *lengths): predicted(*deployment, *lengths) / value
    for deployment, values in PUBLISHED.items()
    for lengths, value in zip(LENGTHS, values, strict=True)
}


def test_almost_all_are_within_a_quarter():
    assert sum(0.75 <= ratio <= 1.25 for ratio in RATIOS.values()) >= 60
    assert statistics.median(RATIOS.values()) == pytest.approx(1.0, abs=0.1)
    assert min(RATIOS.values()) > 0.7 and max(RATIOS.values()) < 1.4


@pytest.mark.parametrize("deployment", PUBLISHED, ids=str)
def test_prompts_and_answers_of_a_thousand_tokens_are_within_a_seventh(deployment):
    assert RATIOS[*deployment, 1000, 1000] == pytest.approx(1.0, abs=1 / 7)
