"""`loralane route train`: the router that it fits, its files, and what it refuses."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.virtual_models.features import NAMES, PromptFacts, text_features
from gateway.virtual_models.router import load_router
from lab.route_training import fit


@pytest.fixture(autouse=True)
def _needs_scikit_learn():
    """Skip without scikit-learn, which takes two seconds to import: here, only one test process does."""
    pytest.importorskip("sklearn")


def run(*arguments):
    return CliRunner().invoke(app, ["route", "train", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def requests(tmp_path):
    """Sums of which the small member gets those of short numbers right, and a tenth of the others."""
    rng, lines = random.Random(0), {}
    while len(lines) < 160:
        digits = rng.choice((1, 4))
        prompt = f"What is {rng.randrange(10 ** (digits - 1), 10**digits)} + {rng.randrange(10**5)}?"
        lines[prompt] = {"prompt": prompt, "small_suffices": digits == 1 or rng.random() < 0.1}
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    return path


def test_a_router_of_text_features(tmp_path, requests):
    out, plot, figures, labelled = (tmp_path / name for name in ("r.json", "r.png", "f.json", "l.jsonl"))
    words = ("--features", "text", "--out", out, "--plot", plot, "--json", figures, "--labelled", labelled)
    done = run(requests, *words)
    assert done.exit_code == 0, done.output
    document, router = json.loads(figures.read_text()), load_router(out)
    assert document["version"] == router.version and router.version in done.output.replace("\n", "")
    assert document["quality"]["auc"] > 0.85 and document["quality"]["brier"] < 0.15
    assert document["points"][-1]["quality"] - document["chosen"]["quality"] <= 0.02 + 1e-9
    assert document["chosen"]["cost"] < 0.8 and plot.stat().st_size > 10_000
    easy, hard = (f"What is {number} + 55555?" for number in (7, 7777))
    chances = [router.probability(text_features(PromptFacts((one,), one))) for one in (easy, hard)]
    assert chances[0] > router.threshold > chances[1] and router.file.embedder == ""
    again = tmp_path / "again.json"
    assert run(labelled, "--features", "text", "--out", again).exit_code == 0
    assert again.read_bytes() == out.read_bytes(), "the same data make the same router"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-loss", "0.1", "--cost", "0.5"), "either --max-loss or --cost"),
        (("--cost", "0.01"), "no threshold costs at most 0.01"),
        (("--plot", "router.exe"), "suffix"),
        (("--out", "missing/router.json"), "no folder"),
    ],
)
def test_what_is_refused(requests, words, message):
    done = run(requests, "--features", "text", *words)
    assert done.exit_code == 1 and message in done.output.replace("\n", " ")


def test_labels_of_one_kind_and_a_gateway_that_is_away_are_told(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n), "small_suffices": True}) + "\n" for n in range(50)))
    assert "does not suffice for 0 of the prompts" in run(path, "--features", "text").output.replace("\n", " ")
    assert "no gateway answers" in run(path, "--url", "http://127.0.0.1:9").output.replace("\n", " ")


def test_probabilities_from_vectors_are_calibrated_on_folds_that_were_held_out():
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(300, 4))
    vectors = latent @ rng.normal(size=(4, 40)) + 0.1 * rng.normal(size=(300, 40))
    suffices = rng.random(300) < 1 / (1 + np.exp(-3 * latent[:, 0]))
    rows = np.hstack((np.zeros((300, len(NAMES))), vectors))
    chances = fit.held_out(rows, suffices, len(NAMES), 0)
    measured = fit.quality(chances, suffices)
    assert measured.auc > 0.8 and measured.brier < 0.8 * measured.brier_constant and measured.ece < 0.1
    assert len(fit.reliability(chances, suffices)) == fit.BINS
