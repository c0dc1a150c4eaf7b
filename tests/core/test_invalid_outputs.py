"""Requests whose output is no number: what they leave behind."""

from dataclasses import replace

import pytest

from engine.core.messages.requests import ErrorCode, Lane, Refusal
from engine.core.watch.check import violations
from tests.core.virtual import SteppedEngine

INVALID = Refusal(ErrorCode.MODEL_OUTPUT_INVALID, "not a number")


def failing(stepped, name):
    """From now on, what the model computes for this request is no number."""
    collect = stepped.executor.collect

    def failed():
        result = collect()
        failed = tuple((name, INVALID) for one in result.sampled if one.request_id == name)
        return replace(result, sampled=tuple(s for s in result.sampled if s.request_id != name), failed=failed)

    stepped.executor.collect = failed


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("lane", [Lane.INTERACTIVE, Lane.BATCH])
def test_its_pages_are_not_found_by_later_requests(overlaps, lane):
    """Otherwise one accident would spoil a tenant's system prompt for as long as requests ask for it."""
    stepped = SteppedEngine(overlaps=overlaps, host_pages=20)
    prompt = range(5, 69)
    stepped.submit("good", prompt, 3, lane)
    stepped.finish()
    failing(stepped, "bad")
    stepped.submit("bad", prompt, 3, lane)
    stepped.finish()
    assert stepped.reason("bad") == "model_output_invalid"
    before = stepped.state.counters.cached_tokens
    stepped.submit("later", prompt, 3, lane)
    stepped.finish()
    assert stepped.reason("later") == "length" and stepped.state.counters.cached_tokens == before
    assert violations(stepped.state) == []
