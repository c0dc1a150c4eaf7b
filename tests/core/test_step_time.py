"""The step-time model: what it learns, what it says about chunks, and what it makes of noise and of restarts."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.messages.features import StepFeatures
from engine.core.predict.chunk_sizes import chunk_that_fits
from engine.core.predict.step_time import StepTimeModel


def new_model():
    return StepTimeModel(forgetting=0.99, knots=(32, 128, 512), margin_floor=1.05, margin_ceiling=1.5)


def truth(f, speed=1.0):
    whole = (
        0.02
        + 0.0003 * f.decode_tokens
        + 0.0008 * max(0.0, f.tokens - 40)
        + 1e-6 * f.decode_context
        + 2e-7 * f.prefill_attention
    )
    beside = 0.0005 * f.adapters + 1e-6 * f.lora_rows + 2e-4 * f.pages_moved + 0.0004 * f.scored_tokens
    return speed * (whole + beside)


def some_steps(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        decodes, prefill = rng.randrange(40), rng.choice([0, 0, rng.randrange(2, 240)])
        adapters = rng.randrange(5)
        context, attention = decodes * rng.randrange(20, 900), prefill * rng.randrange(1, 800)
        if decodes + prefill:
            rows, pages, scored = rng.randrange(900), rng.randrange(4), rng.choice([0, 0, prefill])
            yield StepFeatures(prefill, decodes, context, attention, adapters, rows, pages, scored)


def taught(noise=0.03, count=2000, speed=1.0):
    model, rng = new_model(), random.Random(1)
    for features in some_steps(count):
        model.observe(features, truth(features, speed) * rng.lognormvariate(0, noise))
    return model


def taught_with_experts():
    model = StepTimeModel(0.99, (32, 128, 512), 1.05, 1.5, chosen=0.1)
    for features in some_steps(400):
        model.observe(features, truth(features) + 0.03 * (1 - 0.9**features.tokens))
    return model


MODEL, MODEL_OF_EXPERTS = taught(noise=0.0), taught_with_experts()


def test_it_learns_a_device_with_a_knee_to_within_five_percent():
    model = taught()
    errors = sorted(abs(model.predict(f) / truth(f) - 1) for f in some_steps(400, seed=9))
    assert errors[200] < 0.02
    assert errors[380] < 0.08
    assert model.median_error < 0.05


def test_it_learns_a_device_that_reads_the_experts_that_tokens_choose():
    """Their bytes grow with the tokens at first and then no more, which a convex function cannot follow."""
    plain, ours = (StepTimeModel(0.99, (8, 32, 128), 1.05, 1.5, chosen) for chosen in (1.0, 0.1))

    def seconds(tokens):
        return 0.002 + 0.02 * (1 - 0.9**tokens) + 0.0002 * tokens

    rng = random.Random(0)
    for tokens in [*range(1, 65)] * 8:
        for model in (plain, ours):
            model.observe(StepFeatures(decode_tokens=tokens), seconds(tokens) * rng.lognormvariate(0, 0.02))
    errors = [
        max(abs(model.predict(StepFeatures(decode_tokens=tokens)) / seconds(tokens) - 1) for tokens in range(1, 65))
        for model in (plain, ours)
    ]
    assert errors[1] < 0.03 < 0.2 < errors[0]
    assert ours.prices.experts == pytest.approx(0.02, rel=0.1)
    chunk, before = chunk_that_fits(ours, StepFeatures(decode_tokens=4), 0, 0, 0.03), StepFeatures(decode_tokens=4)
    assert chunk > 10 and ours.predict(before._replace(prefill_tokens=chunk)) <= 0.03
    restored = StepTimeModel(0.99, (8, 32, 128), 1.05, 1.5, 0.1)
    restored.load(json.loads(json.dumps(ours.to_json())))
    assert restored.predict(before) == ours.predict(before)


def test_it_says_nothing_before_it_knows():
    model = new_model()
    for features in list(some_steps(10))[:5]:
        assert model.predict(features) == 0.0
        model.observe(features, 0.1)
    assert not model.is_warm


def test_it_learns_from_steps_of_one_kind():
    model = new_model()
    for _ in range(100):
        model.observe(StepFeatures(decode_tokens=1, decode_context=50), 0.02)
    assert model.predict(StepFeatures(decode_tokens=1, decode_context=50)) == pytest.approx(0.02, rel=0.01)


def test_it_follows_a_device_that_slows_down():
    model = taught()
    for features in some_steps(6000, seed=3):
        model.observe(features, truth(features, speed=2.0))
    errors = sorted(abs(model.predict(f) / truth(f, 2.0) - 1) for f in some_steps(200, seed=5))
    assert errors[100] < 0.1


def test_a_stall_hardly_moves_it():
    model, features = taught(), StepFeatures(decode_tokens=8, decode_context=2000)
    before = model.predict(features)
    for _ in range(3):
        model.observe(features, 60.0)
    assert model.predict(features) < 1.3 * before


def test_the_margin_covers_nineteen_steps_in_twenty():
    model = taught(noise=0.15)
    rng = random.Random(4)
    late = sum(
        truth(f) * rng.lognormvariate(0, 0.15) > model.predict(f) * model.margin for f in some_steps(500, seed=2)
    )
    assert 1.05 < model.margin <= 1.5
    assert late < 0.12 * 500


@given(
    decodes=st.integers(0, 60),
    start=st.integers(0, 2000),
    rank=st.sampled_from([0, 8, 64]),
    cap=st.floats(0.001, 1.0),
    scores=st.booleans(),
    model=st.sampled_from([MODEL, MODEL_OF_EXPERTS]),
)
def test_a_chunk_that_fits_is_the_largest_that_does(decodes, start, rank, cap, scores, model):
    before = StepFeatures(decode_tokens=decodes, decode_context=300 * decodes)

    def seconds(tokens):
        chunk = before._replace(
            prefill_tokens=tokens,
            prefill_attention=tokens * start + tokens * tokens / 2,
            adapters=float(rank > 0),
            lora_rows=rank * tokens,
            scored_tokens=tokens * scores,
        )
        return model.predict(chunk)

    tokens = chunk_that_fits(model, before, start, rank, cap, scores=scores)
    assert tokens >= 0
    if tokens:
        assert seconds(tokens) <= cap * (1 + 1e-6)
    assert seconds(tokens + 2) > cap * (1 - 1e-6)


def test_a_range_it_has_not_seen_is_like_the_one_before_it():
    model = new_model()
    for features in some_steps(600):
        if features.tokens <= 32:
            model.observe(features, 0.02)
    assert model.predict(StepFeatures(prefill_tokens=400)) < 0.04, "so that it is tried"
    for _ in range(40):
        model.observe(StepFeatures(prefill_tokens=400), 0.3)
    assert model.predict(StepFeatures(prefill_tokens=400)) == pytest.approx(0.3, rel=0.1)
    assert model.predict(StepFeatures(decode_tokens=8)) == pytest.approx(0.02, rel=0.1)


def test_a_restart_is_warm():
    model, again = taught(), new_model()
    again.load(json.loads(json.dumps(model.to_json())))
    for features in some_steps(50, seed=7):
        assert again.predict(features) == pytest.approx(model.predict(features))
    assert again.num_steps == model.num_steps


@pytest.mark.parametrize("saved", [{}, {"prices": [1.0]}, {"prices": 3, "normal": 3, "right": 3, "knots": []}])
def test_a_file_of_something_else_is_refused(saved):
    with pytest.raises((ValueError, KeyError, TypeError)):
        new_model().load(saved)


def test_a_step_launched_kernel_by_kernel_takes_at_least_its_launching():
    """The device takes 6 ms for a small step and the host 14 ms to launch it; decodes are replayed."""

    def seconds(f):
        return max(0.006 + 0.00002 * max(0, f.tokens - 250), 0.014 if f.prefill_tokens else 0.0)

    model, rng = new_model(), random.Random(1)
    for _ in range(1500):
        features = StepFeatures(rng.choice([0, 0, rng.randrange(2, 200)]), rng.randrange(1, 100))
        launched = float(features.prefill_tokens > 0)
        model.observe(features._replace(launched=launched), seconds(features) * rng.lognormvariate(0, 0.02))
    for prefill, decodes in ((0, 60), (20, 30), (150, 60)):
        features = StepFeatures(prefill, decodes)
        assert model.is_launched(prefill, features.tokens) is (prefill > 0)
        features = features._replace(launched=float(prefill > 0))
        assert model.predict(features) == pytest.approx(seconds(features), rel=0.05)
    replayed = StepFeatures(decode_tokens=60)
    assert chunk_that_fits(model, replayed, 0, 0, 0.012) == 0, "with a prompt it would be launched"
    assert chunk_that_fits(model, replayed, 0, 0, 0.020) > 100


def test_more_time_never_makes_a_chunk_smaller():
    """Steps of up to 1,024 tokens are replayed. A larger one takes 6 ms more, for its launches."""
    model, rng = new_model(), random.Random(1)
    for _ in range(3000):
        features = StepFeatures(rng.randrange(2, 2000), rng.randrange(1, 60))
        launched = float(features.tokens > 1023)
        model.observe(features._replace(launched=launched), 0.005 + 0.000016 * features.tokens + 0.006 * launched)
    chunks = [chunk_that_fits(model, StepFeatures(decode_tokens=64), 0, 0, ms / 1000) for ms in range(5, 60)]
    assert chunks == sorted(chunks)
    assert 900 < chunks[19] <= 1023 - 64, "24 ms are too few for a launched step of that size"
    assert chunks[-1] > 1200


def test_terms_of_other_knots_are_refused():
    other = StepTimeModel(forgetting=0.99, knots=(64,), margin_floor=1.05, margin_ceiling=1.5)
    with pytest.raises(ValueError, match="knots"):
        new_model().load(other.to_json())
