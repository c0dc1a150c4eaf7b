"""`loralane eval drift`: what it shows and refuses; tests/gateway/llm/test_drift.py measures with it."""

import json
import math

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.core.errors import invalid_request
from lab.evaluation import drift
from lab.evaluation.drift import EXACT, Drift, drift_table, split


def run(*arguments):
    return CliRunner().invoke(app, ["eval", "drift", *arguments], env={"COLUMNS": "400"})


def test_figures_are_shown_and_written(tmp_path, monkeypatch):
    scores = {EXACT: [-1.0, -2.0], "int4": [-1.5, -1.75]}
    monkeypatch.setattr(drift, "score", lambda model, form, adapters, pieces: {"": scores[form]})
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


def test_an_adapter_that_cannot_be_served_is_an_error_without_a_traceback(monkeypatch):
    def score(*arguments):
        raise invalid_request("the adapter cannot be served: it has no adapter_config.json", "lora_path")

    monkeypatch.setattr(drift, "score", score)
    refused = run("some/model", "--adapter", "support=some/folder")
    assert (refused.exit_code, refused.output.count("no adapter_config.json")) == (1, 1)
    assert isinstance(refused.exception, SystemExit)


def test_texts_are_cut_into_pieces():
    assert split("") == split("a") == []
    assert [len(piece) for piece in split("ab" * 1300)] == [1200, 1200, 200]
