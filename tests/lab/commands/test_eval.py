"""`loralane eval tasks`: which models are scored, and what is shown and written. tests/e2e has lm-eval itself."""

from __future__ import annotations

import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli.main import app
from lab.commands.eval import results_of
from lab.evaluation.models import EvalError, Model, chosen_models
from lab.evaluation.scores import score_table
from lab.evaluation.tasks.demo_capitals import CAPITALS

MODELS = [
    Model("base", "base", None, 512),
    Model("other", "other", None, 512),
    Model("pirate", "base", "base", 512),
    Model("corsair", "pirate", "base", 512),
    Model("poet", "other", "other", 512),
    Model("virtual", "base", None, 512),
]
CAPITAL = {"alias": "capitals", "sample_len": 9, "acc,none": 0.75, "acc_stderr,none": 0.125, "f1,strict": 1.0}


@pytest.mark.parametrize(
    ("adapters", "names"),
    [
        ("all", ["base", "pirate", "other", "poet"]),
        ("none", ["base", "other"]),
        ("pirate", ["base", "pirate"]),
        ("poet, corsair,poet", ["base", "corsair", "other", "poet"]),
    ],
)
def test_adapters_follow_their_base_model(adapters, names):
    assert [model.id for model in chosen_models(MODELS, adapters)] == names


@pytest.mark.parametrize("adapters", ["poet,bard", "base", "bard"])
def test_unknown_adapters_are_named(adapters):
    with pytest.raises(EvalError, match=r"no adapter '(bard|base)'; there are: pirate, corsair, poet"):
        chosen_models(MODELS, adapters)


class FakeHarness:
    settings = {"limit": 9}

    def __init__(self, results):
        self._results = results

    def results(self, model, moved):
        moved(0, 4)
        moved(4, 4)
        if model.id not in self._results:
            raise EvalError(f"{model.id}: it is gone")
        return self._results[model.id]


def test_one_table_has_the_metrics_of_all_models(tmp_path):
    results = {"base": {"capitals": CAPITAL}, "pirate": {"capitals": CAPITAL | {"acc_stderr,none": "N/A"}, "b": {}}}
    found = results_of([MODELS[0], MODELS[2]], FakeHarness(results), tmp_path / "scores.json")
    console = Console(width=200, record=True)
    console.print(score_table(found))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert rows == [
        ["model", "capitals", "acc", "capitals", "f1", "strict"],
        ["base", "0.7500", "±", "0.1250", "1.0000"],
        ["pirate", "0.7500", "1.0000"],
    ]
    assert json.loads((tmp_path / "scores.json").read_text()) == {"limit": 9, "models": results}


def test_results_before_a_failure_are_kept(tmp_path):
    harness = FakeHarness({"base": {"capitals": CAPITAL}})
    with pytest.raises(EvalError, match="pirate: it is gone"):
        results_of([MODELS[0], MODELS[2]], harness, tmp_path / "scores.json")
    assert list(json.loads((tmp_path / "scores.json").read_text())["models"]) == ["base"]


def test_without_lm_eval_the_command_says_how_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "lab.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = CliRunner().invoke(app, ["eval", "tasks"], env={"COLUMNS": "500"})
    assert done.exit_code == 1
    assert "pip install 'loralane[eval]'" in done.output


def test_the_task_that_comes_along_has_one_right_answer_a_question():
    assert all(len({*cities}) == 4 for cities in CAPITALS.values())
    assert len({cities[0] for cities in CAPITALS.values()}) == len(CAPITALS) == 24
