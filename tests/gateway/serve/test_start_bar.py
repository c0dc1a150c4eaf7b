"""The progress bar of a server's start, and what a converter and an engine report for it."""

import asyncio
import io
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from rich.console import Console

from engine.process.pulse import Loading, read_loading, write_loading
from gateway.serve.prepare import _follow
from gateway.serve.start_bar import StartBar, StartStage


def shown(*reports):
    """Return what is on a terminal after each report: the share in percent and the description."""
    out = io.StringIO()
    with closing(StartBar(Console(file=out, force_terminal=True, force_interactive=True, width=100))) as bar:
        seen = []
        for report in reports:
            bar.report(*report)
            [task] = bar._bar.tasks
            seen.append((round(task.percentage), task.description))
    assert out.getvalue()
    return seen


def test_stages_follow_each_other_and_the_bar_never_goes_back():
    assert shown(
        (StartStage.PREPARING, "converting", 0.5),
        (StartStage.STARTING, "starting the engine"),
        (StartStage.PREPARING, "late", 0.0),
        (StartStage.LOADING, "loading weights: 30 of 30", 1.0),
        (StartStage.ADAPTERS, "loading adapters: 4 of 4", 1.0),
    ) == [
        (23, "converting"),
        (45, "starting the engine"),
        (45, "late"),
        (91, "loading weights: 30 of 30"),
        (100, "loading adapters: 4 of 4"),
    ]


def test_without_a_terminal_nothing_is_shown():
    out = io.StringIO()
    with closing(StartBar(Console(file=out))) as bar:
        bar.report(StartStage.STARTING, "starting the engine")
    assert out.getvalue() == ""


def test_an_engines_start_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "loading"
    assert read_loading(file) is None
    write_loading(file, Loading("loading weights", 3, 30))
    assert read_loading(file) == ("loading weights", 3, 30)
    for garbage in ('["loading w', "5", "[1, 2]", '["x", null, 3]', "null"):
        file.write_text(garbage)
        assert read_loading(file) is None


class Reports(StartBar):
    def __init__(self):
        super().__init__(Console(quiet=True))
        self.seen = []

    def report(self, stage, what, share=0.0):
        self.seen.append((stage, what, share))


CONVERTER = """
print('["reading the tokenizer", 0.0]', flush=True)
print('[a line of a library]', flush=True)
print('["writing safetensors", 0.95]', flush=True)
print('{"folder": "/data/models/tiny"}')
print()
"""


async def followed(program):
    bar = Reports()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    return await _follow(process, bar), bar.seen


async def test_a_converters_progress_is_shown_and_its_folder_is_known():
    outcome, seen = await followed(CONVERTER)
    assert (outcome.folder, outcome.error) == (Path("/data/models/tiny"), "")
    assert seen == [
        (StartStage.PREPARING, "reading the tokenizer", 0.0),
        (StartStage.PREPARING, "writing safetensors", 0.95),
    ]


async def test_a_converters_error_is_known():
    outcome, _ = await followed("""print('{"error": "the disk is full"}'); raise SystemExit(1)""")
    assert (outcome.folder, outcome.error) == (None, "the disk is full")


async def test_a_converter_that_dies_names_no_folder():
    outcome, seen = await followed("raise SystemExit(1)")
    assert (outcome.folder, outcome.error, seen) == (None, "", [])


def test_standard_output_is_the_same_while_the_bar_is_shown():
    before = sys.stdout, sys.stderr
    with closing(StartBar(Console(file=io.StringIO(), force_terminal=True, force_interactive=True))) as bar:
        bar.report(StartStage.STARTING, "starting the engine")
        assert (sys.stdout, sys.stderr) == before


class Supervisor:
    loading = Loading("compiling kernels", 7, 7)


async def test_the_engines_own_report_is_followed_until_the_bar_is_closed():
    with closing(StartBar(Console(file=io.StringIO(), force_terminal=True, force_interactive=True))) as bar:
        following = asyncio.create_task(bar.follow(Supervisor()))
        [task] = bar._bar.tasks
        while task.description != "compiling kernels: 7 of 7":
            await asyncio.sleep(0.01)
        assert round(task.percentage) == 67
        Supervisor.loading = None
        bar.close()
        await asyncio.wait_for(following, 10)
