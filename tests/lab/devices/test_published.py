"""The cost of steps by data sheets against throughputs that TensorRT-LLM publishes.

Source: docs/source/performance/perf-overview.md of TensorRT-LLM 0.17, "Throughput Measurements": output tokens a second
of requests that all arrive at once, by lengths of prompts and answers. It reserves pages for whole answers
(GUARANTEED_NO_EVICT), runs up to 2,048 requests and computes up to 8,192 tokens a step.

FP16 of A100 is bf16 here. `EXPERT_REACHED` was chosen with Mixtral 8x7B; 8x22B was predicted with it afterwards.
"""

import statistics

import pytest

from engine.core.config import CoreConfig
from lab.devices.accelerators import ACCELERATORS, FORMS, device_of
from lab.devices.capacity import Demand, serve
from lab.devices.shapes import SHAPES

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
MIXTRAL = {
    ("mixtral-8x7b", "h200", 1, "fp8"): (17158, 15095, 9535, 12105, 10371, 2010, 6940, 2309, 1152),
    ("mixtral-8x7b", "h100", 1, "fp8"): (15962, 8290, 4785, 6801, 6869, 1893, 3983, 1765, 674),
    ("mixtral-8x7b", "h200", 2, "fp8"): (27825, 29584, 21565, 23411, 19151, 3383, 14007, 4224, 2299),
    ("mixtral-8x7b", "h100", 2, "fp8"): (27451, 22830, 14237, 17036, 15771, 3334, 10686, 3646, 1757),
    ("mixtral-8x7b", "h200", 4, "fp8"): (42552, 52292, 39514, 43819, 33581, 5468, 24981, 7085, 4237),
    ("mixtral-8x7b", "h100", 4, "fp8"): (41068, 41165, 27912, 34489, 27785, 5235, 19432, 6402, 3304),
    ("mixtral-8x7b", "h100", 8, "fp8"): (50850, 61608, 48280, 52584, 40632, 6988, 30983, 9210, 5602),
    ("mixtral-8x7b", "a100", 2, "bf16"): (5541, 4170, 2608, 3446, 3155, 649, 2057, 724, 338),
    ("mixtral-8x7b", "a100", 4, "bf16"): (10324, 10912, 7667, 8456, 7123, 1238, 5223, 1501, 830),
    ("mixtral-8x7b", "a100", 8, "bf16"): (17044, 20278, 15283, 17184, 12851, 2166, 9810, 2761, 1593),
    ("mixtral-8x22b", "h200", 8, "fp8"): (22949, 32416, 25753, 27430, 19712, 2900, 15799, 4032, 2816),
    ("mixtral-8x22b", "h100", 8, "fp8"): (21876, 25150, 18387, 21422, 16573, 2795, 12245, 3645, 2228),
    ("mixtral-8x22b", "a100", 8, "bf16"): (6382, 6686, 4789, 5648, 4549, 762, 3522, 959, 575),
}


def predicted(model, accelerator, ranks, form, prompt, output):
    sizes = {"max_seqs": 2048, "token_budget": 8192}
    device = device_of(SHAPES[model], FORMS[form], ACCELERATORS[accelerator], ranks, **sizes)
    demand = Demand(prompt, output, prompt + output / 2, reserved=prompt + output)
    return serve(device, CoreConfig(**device.engine), demand, 1e9).rate * output


def ratios(published):
    """Return predicted / published throughputs, in a row for each deployment."""
    pairs = {one: zip(LENGTHS, values, strict=True) for one, values in published.items()}
    return {one: [predicted(*one, *lengths) / value for lengths, value in row] for one, row in pairs.items()}


DENSE, EXPERTS = ratios(PUBLISHED), ratios(MIXTRAL)


@pytest.mark.parametrize(
    ("found", "least"),
    [
        (DENSE, 60),
        ({one: row for one, row in EXPERTS.items() if one[0] == "mixtral-8x7b"}, 86),
        ({one: row for one, row in EXPERTS.items() if one[0] == "mixtral-8x22b"}, 23),
    ],
    ids=["llama", "mixtral-8x7b", "mixtral-8x22b"],
)
def test_almost_all_are_within_a_quarter(found, least):
    every = [ratio for row in found.values() for ratio in row]
    assert sum(0.75 <= ratio <= 1.25 for ratio in every) >= least
    assert statistics.median(every) == pytest.approx(1.0, abs=0.1)
    assert min(every) > 0.7 and max(every) < 1.4


@pytest.mark.parametrize("deployment", PUBLISHED, ids=str)
def test_prompts_and_answers_of_a_thousand_tokens_are_within_a_seventh(deployment):
    assert DENSE[deployment][LENGTHS.index((1000, 1000))] == pytest.approx(1.0, abs=1 / 7)
