"""The step-time model on disk, between two engine processes."""

import json

from structlog.testing import capture_logs

from engine.core.messages.features import StepFeatures
from engine.core.predict.step_time import SCALES, StepTimeModel
from engine.serve import step_store as store_module
from engine.serve.step_store import FRESH_SECONDS, QUIET_STEPS, StepStore, step_store


def new_model():
    return StepTimeModel(0.99, (32, 128), 1.05, 1.5)


def test_a_restart_knows_what_was_learned_and_says_why_if_it_does_not(tmp_path):
    store, model = step_store(str(tmp_path), 2, "cpu", "float32", "hash"), new_model()
    assert not store.load(new_model()), "nothing was saved"
    for tokens in range(1, 30):
        model.observe(StepFeatures(decode_tokens=tokens), 0.01 + 0.001 * tokens)
    store.save(model.to_json())
    again = new_model()
    assert store.load(again) and again.prices == model.prices
    [file] = (tmp_path / "step_time").iterdir()
    saved = json.loads(file.read_text())
    for spoiled, reason in (
        ({**saved, "prices": saved["prices"][:-1]}, f"it has {len(SCALES) + 1} terms and knots at [32, 128], not"),
        ({**saved, "knots": [8]}, "knots at [8], not"),
        ({"prices": []}, "knots"),
    ):
        file.write_text(json.dumps(spoiled))
        with capture_logs() as logged:
            assert not store.load(new_model())
        assert logged[0]["event"] == "step_time_dropped" and reason in logged[0]["error"]


def test_only_recent_steps_of_an_otherwise_idle_machine_are_fit_for_advice(tmp_path, monkeypatch):
    busy, now = [False], [1e9]
    monkeypatch.setattr(store_module.time, "time", lambda: now[0])
    store, model = StepStore(tmp_path, "one", lambda: busy[0]), new_model()

    def saved(steps: int) -> StepStore:
        for _ in range(steps):
            model.observe(StepFeatures(decode_tokens=4.0), 0.01)
        store.save(model.to_json())
        again = StepStore(tmp_path, "one", lambda: False)
        assert again.load(new_model())
        return again

    assert not saved(QUIET_STEPS - 1).is_fit_for_advice, "too few"
    assert saved(1).is_fit_for_advice
    busy[0] = True
    assert not saved(1).is_fit_for_advice, "measured beside other work"
    busy[0] = False
    assert not saved(QUIET_STEPS - 1).is_fit_for_advice, "what was measured then is not forgotten yet"
    again = saved(1)
    assert again.is_fit_for_advice
    now[0] += FRESH_SECONDS
    assert not again.is_fit_for_advice, "stale"
    file = next((tmp_path / "step_time").iterdir())
    old = json.loads(file.read_text())
    del old["quiet_steps"], old["saved_at"]
    file.write_text(json.dumps(old))
    assert again.load(new_model()) and not again.is_fit_for_advice, "an older release does not say"
