"""What all benchmarks have in common: options, tables, documents, exit status, and measuring in turn."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.runner import JSON, PeerError, Ratio, Run, at_least, benchmark, in_turn, option, table_of

ROOT = Path(__file__).parents[2]


@dataclass
class Row:
    name: str
    rate: float


def measure(run: Run) -> None:
    if run.options.fail:
        raise PeerError("no peer here")
    rows = [Row(name, run.options.rate) for name in run.track(run.options.names)]
    run.show(table_of("Rates", rows, "| tokens/s", "{0.name} | {0.rate:.1f}"), rows)


bench = benchmark(
    option("--names", ["a", "b"], "of rows"),
    option("--rate", 1.5, "of all"),
    option("--count", 3, type=at_least(1)),
    option("--fail", False, "end with an error"),
    option("--limit", float, "has no default"),
    JSON,
)(measure)


def test_options_have_the_types_of_their_defaults():
    given = bench.parser().parse_args(["--names", "x", "y", "z", "--rate", "2", "--limit", "7"])
    assert (given.names, given.rate, given.count, given.fail, given.limit) == (["x", "y", "z"], 2.0, 3, False, 7.0)
    assert bench.parser().parse_args([]).limit is None
    assert "of all (default: 1.5)" in bench.parser().format_help()


def test_tables_are_printed_and_documents_written(tmp_path, capsys):
    bench.main(["--json", str(tmp_path / "out.json"), "--names", "one", "two"])
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["one", "1.5"] in lines
    assert json.loads((tmp_path / "out.json").read_text()) == [
        {"name": "one", "rate": 1.5},
        {"name": "two", "rate": 1.5},
    ]


@pytest.mark.parametrize(("words", "status"), [(["--fail"], 1), (["--count", "0"], 2), (["--unknown"], 2)])
def test_errors_decide_the_exit_status(words, status, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(words)
    assert end.value.code == status
    assert capsys.readouterr().err


def test_each_round_begins_with_another_name():
    assert [in_turn("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_ratios_are_those_of_pairs():
    assert Ratio.of([2, 3, 4], [1, 3, 5]) == Ratio(1, 0.8, 2)


def test_make_names_benchmarks_that_can_be_run():
    named = re.findall(r"python -m benchmarks\.([\w.]+)", (ROOT / "Makefile").read_text())
    assert len(named) > 20
    for name in named:
        text = (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").read_text()
        assert "__main__" in text, name
        assert name.startswith("gpu.") or "bench.main()" in text, name
