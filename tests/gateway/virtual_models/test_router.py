"""A learned router: features of texts, its file, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from gateway.virtual_models.features import MOST_CHARACTERS, NAMES, PromptFacts, text_features
from gateway.virtual_models.router import (
    MOST_BYTES,
    LearnedRouter,
    RouterFile,
    decode_router,
    encode_router,
    load_router,
)


def features_of(text, **facts):
    return dict(zip(NAMES, text_features(PromptFacts((text,), text, **facts)), strict=True))


def file_of(dimensions=0, **fields):
    count = len(NAMES) + dimensions
    plain = {"mean": [0.0] * count, "scale": [1.0] * count, "weights": [0.0] * count, "intercept": 0.0}
    source = {"embedder": "small", "dimensions": dimensions} if dimensions else {}
    return RouterFile(**{**source, "features": list(NAMES), "threshold": 0.5, **plain, **fields})


def test_features_count_what_they_say():
    found = features_of('Is 12 + 345 (about) "400"?\nYes or no', tools=3, schema=True)
    counts = {name: round(np.expm1(value)) for name, value in found.items() if name.startswith("log_")}
    assert counts == {
        "log_characters": 36, "log_question_characters": 36, "log_words": 9, "log_lines": 1, "log_turns": 1,
        "log_digits": 8, "log_longest_number": 3, "log_numbers": 3, "log_operators": 1, "log_brackets": 2,
        "log_quotes": 2, "log_tools": 3,
    }  # fmt: skip
    assert (found["questions"], found["tools"], found["schema"], found["code"]) == (1, 1, 1, 0)
    assert found["upper_share"] == pytest.approx(2 / 28) and found["mean_word"] == pytest.approx(28 / 9)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("hello", "latin"), ("привет", "greek_cyrillic"), ("שלום", "hebrew_arabic"), ("नमस्ते", "indic"),
        ("你好", "east_asian"), ("안녕", "east_asian"),
    ],
)  # fmt: skip
def test_a_text_has_the_share_of_its_script(text, script):
    assert features_of(text)[f"{script}_share"] == 1
    assert features_of(f"{text} {'x' * len(text)}")[f"{script}_share"] == (1 if script == "latin" else 0.5)


@pytest.mark.parametrize("text", ["", " ", "\ud800", "🙂", "7" * (2 * MOST_CHARACTERS), "a\x00b"])
def test_every_text_has_finite_features(text):
    assert np.isfinite(text_features(PromptFacts((text,), text))).all()


def test_a_router_gives_the_probability_of_its_weights_and_its_version_is_that_of_its_content(tmp_path):
    weights = [0.0] * len(NAMES) + [2.0, -1.0]
    content = encode_router(file_of(2, weights=weights, intercept=0.5))
    (tmp_path / "router.json").write_bytes(content)
    router = load_router(tmp_path / "router.json")
    text = text_features(PromptFacts(("x",), "x"))
    vector = np.array([0.6, 0.8], dtype=np.float32)
    assert router.probability(text, vector) == pytest.approx(1 / (1 + np.exp(-(2 * 0.6 - 0.8 + 0.5))))
    assert decode_router(content).version == router.version
    assert decode_router(encode_router(replace(router.file, intercept=0.6))).version != router.version
    for wrong in (None, vector[:1], np.array([np.nan, 0], dtype=np.float32)):
        with pytest.raises(ValueError, match="vector"):
            router.probability(text, wrong)


def test_a_prompt_unlike_the_trained_ones_is_no_certainty():
    weights = [1.0] + [0.0] * (len(NAMES) - 1)
    router = LearnedRouter(file_of(weights=weights, scale=[1e-9] * len(NAMES)), "")
    assert 0.5 < router.probability(text_features(PromptFacts(("x",), "x"))) < 0.99


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": ["other"]}, "other features"),
        ({"mean": [0.0]}, "mean has 1 elements"),
        ({"scale": [0.0] * len(NAMES)}, "scale positive"),
        ({"embedder": "small"}, "both be set"),
        ({"threshold": 1.5}, "threshold"),
        ({"format": 2}, "format"),
        ({"weights": ["x"]}, "weights"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, changes, message):
    document = msgspec.to_builtins(file_of()) | changes
    (tmp_path / "router.json").write_bytes(msgspec.json.encode(document))
    with pytest.raises(ValueError, match=message):
        load_router(tmp_path / "router.json")


def test_files_that_are_no_router_are_refused(tmp_path):
    path = tmp_path / "router.json"
    with pytest.raises(ValueError, match="No such file"):
        load_router(path)
    for content in (b"", b"[" * 100_000, b"\xff", b" " * (MOST_BYTES + 1), b'{"weights": [1e999]}'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"router\.json"):
            load_router(path)
