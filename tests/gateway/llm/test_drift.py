"""How far each form of weights may move the log-probabilities of a small random model, for the base and an adapter.

Over 3,134 tokens of SmolLM2-135M, in which weights are no random numbers, the means are 0.023 (auto), 0.051 (int8) and
0.044 (int4, of weights that come from a file of 4 bits). With a checkpoint of W8A8 the mean is 0.056, and 0.122 if
compressed-tensors computes it (`make bench-drift`).
"""

import math

import torch

from engine.model.memory.allocation import pick_dtype
from lab.evaluation.drift import EXACT, bundled_text, measure

MOST = {"auto": 0.1, "int8": 0.1, "int4": 0.75}
"""Bounds of the mean |delta logprob|."""
AUTO_IS_EXACT = pick_dtype("auto", torch.device("cpu")) == torch.float32
"""True where the processor does not multiply in bf16, and `auto` means fp32."""


def test_no_form_drifts_more_than_its_table_says(tiny_chat, tiny_adapter):
    pieces = [bundled_text()[:200], bundled_text()[200:400]]
    found = list(measure(str(tiny_chat), list(MOST), {"own": str(tiny_adapter[0])}, pieces))
    expected = [(form, name) for form in (EXACT, *MOST) for name in ("", "own")]
    assert [(one.form, one.adapter) for one in found] == expected
    exact = {one.adapter: one for one in found[:2]}
    assert exact[""].mean == exact["own"].worst == 0
    for one in found[2:]:
        assert one.tokens == exact[one.adapter].tokens > 200
        if one.form == "auto" and AUTO_IS_EXACT:
            assert one.worst == 0
            continue
        assert 0 < one.mean < MOST[one.form], one
        assert one.mean <= one.p99 <= one.worst
        assert not math.isclose(one.perplexity, exact[one.adapter].perplexity, rel_tol=1e-9)
