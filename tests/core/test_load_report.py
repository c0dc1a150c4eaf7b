"""What an engine tells routers of its load."""

import pytest

from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import Lane
from engine.core.watch.report import load_report
from tests.core.virtual import PREFILL, STEP, SteppedEngine


def test_a_prompt_token_costs_what_one_of_a_long_prompt_does_not_what_the_last_ones_did():
    """An engine that continues answers computes only the ends of prompts, each of which pays for a step."""
    engine = SteppedEngine()
    for tokens, decodes in [(8, 4), (256, 0), (100, 8), (0, 4)] * 8:
        features = StepFeatures(prefill_tokens=tokens, decode_tokens=decodes)
        engine.ledger.model.observe(features, STEP + PREFILL * tokens + 0.001 * decodes)
    for number in range(30):
        engine.submit(f"end-{number}", 6, 2)
        engine.step()
    engine.finish()
    assert engine.ledger.token_prices.of(1, 0) > 2 * (PREFILL + STEP / 256)
    assert load_report(engine.state).prompt_token_s == pytest.approx(PREFILL + STEP / 256, rel=0.1)


def test_before_steps_can_be_predicted_a_prompt_token_costs_what_it_did():
    engine = SteppedEngine()
    assert load_report(engine.state).prompt_token_s == 0.0
    engine.submit("first", 100, 2)
    engine.step(2)
    assert load_report(engine.state).prompt_token_s == engine.ledger.token_prices.of(1, 0) > 0


def test_the_share_of_prompts_is_known_soon_after_the_start():
    engine = SteppedEngine()
    for number in range(20):
        engine.submit(f"prompt-{number}", 256, 1)
    engine.run_until(lambda: engine.clock.now > 1.5)
    assert load_report(engine.state).prompt_share > 0.8


def test_what_waits_is_predicted_at_the_same_price():
    engine = SteppedEngine()
    engine.learn()
    for number in range(4):
        engine.submit(f"waiting-{number}", 250, 4)
    engine.step()
    report, state = load_report(engine.state), engine.state
    left = state.waiting.num_tokens[Lane.INTERACTIVE] + sum(
        seq.num_remaining for seq in state.running.values() if seq.num_remaining > 1
    )
    assert left > 500
    assert report.wait_s == pytest.approx(left * report.prompt_token_s)
