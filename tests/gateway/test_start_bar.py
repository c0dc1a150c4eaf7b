"""The progress bar of a server's start, and what a converter and an engine report for it."""

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from engine.pulse import Loading, read_loading, write_loading
from gateway.serve.prepare import _follow
from gateway.serve.start_bar import Stage, StartBar


def shown(*reports):
    """What is on a terminal after each report: the share in percent and the description."""
    out = io.StringIO()
    with StartBar(Console(file=out, force_terminal=True, width=100)) as bar:
        seen = []
        for report in reports:
            bar.report(*report)
            [task] = bar._bar.tasks
            seen.append((round(task.percentage), task.description))
    assert out.getvalue()
    return seen


def test_stages_follow_each_other_and_the_bar_never_goes_back():
    assert shown(
        (Stage.CONVERTING, "converting", 0.5),
        (Stage.STARTING, "starting the engine"),
        (Stage.CONVERTING, "late", 0.0),
        (Stage.LOADING, "loading weights: 30 of 30", 1.0),
        (Stage.ADAPTERS, "loading adapters: 4 of 4", 1.0),
    ) == [
        (31, "converting"),
        (62, "starting the engine"),
        (62, "late"),
        (94, "loading weights: 30 of 30"),
        (100, "loading adapters: 4 of 4"),
    ]


def test_without_a_terminal_nothing_is_shown():
    out = io.StringIO()
    with StartBar(Console(file=out)) as bar:
        bar.report(Stage.STARTING, "starting the engine")
    assert out.getvalue() == ""


def test_an_engines_start_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "loading"
    assert read_loading(file) is None
    write_loading(file, Loading("loading weights", 3, 30))
    assert read_loading(file) == ("loading weights", 3, 30)
    file.write_text('["loading w')
    assert read_loading(file) is None


class Reports(StartBar):
    def __init__(self):
        super().__init__(Console(quiet=True))
        self.seen = []

    def report(self, stage, what, share=0.0):
        self.seen.append((stage, what, share))


CONVERTER = """
print('["reading the tokenizer", 0.0]', flush=True)
print('["writing safetensors", 0.95]', flush=True)
print('/data/models/tiny')
"""


def test_what_a_converter_reports_is_shown_and_its_last_line_is_the_folder():
    bar, command = Reports(), [sys.executable, "-c", CONVERTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert _follow(process, bar) == Path("/data/models/tiny")
    assert bar.seen == [
        (Stage.CONVERTING, "reading the tokenizer", 0.0),
        (Stage.CONVERTING, "writing safetensors", 0.95),
    ]


def test_a_converter_that_fails_names_no_folder():
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert _follow(process, Reports()) is None
    assert process.returncode == 1
