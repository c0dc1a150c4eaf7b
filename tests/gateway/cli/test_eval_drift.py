"""`loralane eval drift`: what it measures, what it refuses, and how far each form of weights may drift."""

import json
import math

import pytest
from typer.testing import CliRunner

from engine.demo import DEMO_ADAPTERS
from gateway.cli import eval_drift
from gateway.cli.eval_drift import EXACT, Drift, bundled_text, drift_table, measure, split
from gateway.cli.main import app

MOST = {"auto": 0.05, "int8": 0.09, "int4": 0.09}
"""Bounds of the mean |delta logprob| of SmolLM2-135M. Over the whole bundled text it is 0.023, 0.051 and 0.044, and
0.028, 0.057 and 0.050 with an adapter. The weights come from a file of 4 bits, which int4 finds again."""


def run(*arguments):
    return CliRunner().invoke(app, ["eval", "drift", *arguments], env={"COLUMNS": "400"})


def test_no_form_drifts_more_than_its_table_says(smollm2):
    pieces = split(bundled_text())[:1]
    found = list(measure(str(smollm2), list(MOST), {"pirate": str(DEMO_ADAPTERS["pirate"])}, pieces))
    assert [(one.form, one.adapter) for one in found] == [
        (form, name) for form in (EXACT, *MOST) for name in ("", "pirate")
    ]
    exact = {one.adapter: one for one in found[:2]}
    for one in found[2:]:
        assert one.tokens == exact[one.adapter].tokens > 200
        assert 0 < one.mean < MOST[one.form], one
        assert one.mean <= one.p99 <= one.worst < 1
        assert math.isclose(one.perplexity, exact[one.adapter].perplexity, rel_tol=0.05)


def test_figures_are_shown_and_written(tmp_path, monkeypatch):
    scores = {EXACT: [-1.0, -2.0], "int4": [-1.5, -1.75]}
    monkeypatch.setattr(eval_drift, "_score", lambda model, form, adapters, pieces: {"": scores[form]})
    done = run("some/model", "--forms", "int4", "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done.output
    exact, int4 = json.loads((tmp_path / "found.json").read_text())
    assert (exact["form"], exact["mean"], exact["perplexity"]) == (EXACT, 0.0, pytest.approx(math.exp(1.5)))
    assert (int4["mean"], int4["worst"], int4["tokens"]) == (0.375, 0.5, 2)
    assert "0.3750" in done.output
    assert drift_table([Drift(EXACT, "", 2, 0, 0, 0, 1)]).row_count == 1


def test_wrong_arguments_are_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "empty.txt").touch()
    for arguments, reason in (
        (["--forms", "int3"], "'int3' is none of auto, int8, int4"),
        (["--adapter", "nameless"], "must be NAME=FOLDER"),
        (["--text", str(tmp_path / "empty.txt")], "empty.txt is empty"),
        (["--text", str(tmp_path / "absent.txt")], "absent.txt"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 1, refused.output
        assert reason in " ".join(refused.output.split())


def test_texts_are_cut_into_pieces():
    assert split("") == split("a") == []
    assert [len(piece) for piece in split("ab" * 1300)] == [1200, 1200, 200]
