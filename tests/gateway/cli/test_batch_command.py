"""`loralane batch`, against a double of the HTTP API on a real port."""

from __future__ import annotations

import io
import json

import pytest
from batch_double import KEY, a_batch, batch_double
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli import batch_watch
from gateway.cli.batch import CODES_TEXT
from gateway.cli.batch_lines import MOST_TOLD, LinesError, check_input
from gateway.cli.batch_watch import batch_facts, batches_table, duration_text
from gateway.cli.main import app as cli

DONE = a_batch(
    status="completed",
    output_file_id="file-out",
    error_file_id="file-err",
    request_counts={"total": 3, "completed": 2, "failed": 1},
)
RUNNING = a_batch(status="in_progress", request_counts={"total": 3, "completed": 1}, eta_seconds=75.0)


@pytest.fixture
def double():
    with batch_double() as serving:
        yield serving


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(batch_watch, "RETRY_S", 0.01)


@pytest.fixture
def batch(double, monkeypatch, tmp_path):
    """Runs `loralane batch` in a folder of its own; the result has its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0, key=KEY):
        result = CliRunner().invoke(cli, ["batch", *arguments, "--url", double.url, "--key", key])
        assert result.exit_code == code, result.output
        return result

    return run


def line(custom_id="a", **changes):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "é"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def write(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return str(path)


def test_a_file_is_sent_as_it_is_and_a_job_made_of_it(batch, double, tmp_path):
    file = write(tmp_path / "requests.jsonl", [line("a"), line("b")])
    result = batch("submit", file, "--window", "2h", "--metadata", "run=7", "--metadata", "note=a=b")
    assert result.stdout == "batch_1\n"
    assert "2 lines" in result.stderr
    assert "loralane batch watch batch_1" in result.stderr and "loralane batch download batch_1" in result.stderr
    assert double.files["file-1"] == (tmp_path / "requests.jsonl").read_bytes()
    assert double.names == ["requests.jsonl"]
    assert double.created == [
        {
            "input_file_id": "file-1",
            "endpoint": "/v1/chat/completions",
            "completion_window": "2h",
            "metadata": {"run": "7", "note": "a=b"},
        }
    ]


def test_a_large_file_is_sent_in_pieces(batch, double, tmp_path):
    lines = [line(str(number), body={"model": "tiny", "prompt": "x" * 100_000}) for number in range(30)]
    batch("submit", write(tmp_path / "large.jsonl", lines))
    assert double.files["file-1"] == (tmp_path / "large.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("a"), line("a")], "line 2: custom_id 'a' is that of line 1"),
        ([line("a"), line("b", url="/v1/completions")], "line 2: url is '/v1/completions'"),
        ([line(body={"model": "tiny", "stream": True})], "line 1: body.stream"),
        ([line(method="GET")], "line 1: Invalid enum value 'GET'"),
        ([line(body={})], "missing required field `model`"),
        ([line(custom_id=7)], "$.custom_id"),
        ([["no", "object"]], "line 1: Expected `object`"),
        ([], "there is no line in it"),
    ],
)
def test_what_would_be_refused_is_not_sent(batch, double, tmp_path, lines, words):
    result = batch("submit", write(tmp_path / "bad.jsonl", lines), code=1)
    assert words in " ".join(result.stderr.split())
    assert not double.names


def test_the_first_bad_lines_are_told_by_their_numbers():
    lines = b"".join(b"\n{no json\n" for _ in range(50))
    with pytest.raises(LinesError) as caught:
        check_input(io.BytesIO(lines))
    told = str(caught.value).splitlines()
    assert len(told) == MOST_TOLD
    assert told[1].startswith("line 4: ")


def test_a_line_that_is_nested_too_deep_is_told_like_any_other():
    with pytest.raises(LinesError, match="line 1: "):
        check_input(io.BytesIO(b'{"x":' + b"[" * 50_000))


def test_what_the_gateway_takes_is_not_refused_here():
    """An editor's mark at the beginning, empty lines, Windows' line ends, no line end at all."""
    text = json.dumps(line()).encode()
    assert check_input(io.BytesIO(b"\xef\xbb\xbf" + text + b"\r\n\n" + text.replace(b'"a"', b'"b"'))).lines == 2


def test_a_line_without_an_end_is_not_read_into_memory():
    class Endless(io.RawIOBase):
        most = 0

        def readline(self, size=-1):
            self.most = max(self.most, size)
            return b"x" * 1000

    endless = Endless()
    with pytest.raises(LinesError):
        check_input(endless)
    assert 0 < endless.most <= 64 * 2**20


def test_a_job_is_followed_to_its_end_and_its_answers_are_saved(batch, double, tmp_path):
    double.files = {"file-out": b"answers\n" * 1000, "file-err": b"one error\n"}
    double.looks = [a_batch(), 503, RUNNING, DONE]
    result = batch("watch", "batch_1", "--interval", "0.1", "--output", "answers.jsonl", "--json")
    assert [json.loads(said)["status"] for said in result.stdout.splitlines()] == [
        "validating",
        "in_progress",
        "completed",
    ]
    assert "not now [at all]" in result.stderr, "a gateway that was away for a moment is mentioned"
    assert "3 of 3 lines, 1 of them failed" in result.stderr
    assert (tmp_path / "answers.jsonl").read_bytes() == double.files["file-out"]
    assert (tmp_path / "answers.errors.jsonl").read_bytes() == b"one error\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.errors.jsonl", "answers.jsonl"]


def test_submitting_and_waiting_in_one(batch, double, tmp_path):
    double.files["file-out"] = b"answers\n"
    double.looks = [DONE | {"error_file_id": None}]
    batch("submit", write(tmp_path / "requests.jsonl", [line()]), "-o", "answers.jsonl")
    assert (tmp_path / "answers.jsonl").read_bytes() == b"answers\n"


@pytest.mark.parametrize(
    ("look", "code"),
    [
        (DONE, 0),
        (a_batch(status="failed"), 1),
        (RUNNING, 3),
        (a_batch(status="cancelling"), 3),
        (a_batch(status="cancelled"), 4),
        (a_batch(status="expired"), 4),
    ],
)
def test_scripts_are_told_how_it_ended(batch, double, look, code):
    double.looks = [look]
    result = batch("watch", "batch_1", "--timeout", "0", code=code)
    assert ("loralane batch watch batch_1" in result.stderr) == (code == 3)
    assert str(code) in CODES_TEXT


def test_why_a_file_was_refused(batch, double):
    data = [{"code": "duplicate_custom_id", "message": "custom_id 'a' [b] is there twice", "param": None, "line": 17}]
    double.looks = [a_batch(status="failed", errors={"object": "list", "data": data})]
    for command in ("watch", "status"):
        result = batch(command, "batch_1", code=1 if command == "watch" else 0)
        assert "17" in result.output and "custom_id 'a' [b]" in result.output


def test_a_download_has_everything_or_nothing(batch, double, tmp_path):
    double.looks = [DONE]
    double.files = {"file-out": b"x" * 1000, "file-err": b"y"}
    (tmp_path / "answers.jsonl").write_text("what was there before")
    double.truncated = True
    result = batch("download", "batch_1", "--output", "answers.jsonl", code=1)
    assert "500 of 1,000 bytes" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]
    assert (tmp_path / "answers.jsonl").read_text() == "what was there before"
    double.truncated = False
    batch("download", "batch_1", "--output", "answers.jsonl", "--errors", "failed.jsonl")
    assert (tmp_path / "answers.jsonl").read_bytes() == b"x" * 1000
    assert (tmp_path / "failed.jsonl").read_bytes() == b"y"


def test_downloads_have_names_of_their_own(batch, double, tmp_path):
    double.looks = [DONE]
    double.files = {"file-out": b"x", "file-err": b"y"}
    batch("download", "batch_1")
    assert {path.name for path in tmp_path.iterdir()} == {"batch_1.output.jsonl", "batch_1.errors.jsonl"}


def test_there_may_be_nothing_to_download(batch, double):
    double.looks = [a_batch(status="failed")]
    assert "neither answers nor errors" in " ".join(batch("download", "batch_1", code=1).stderr.split())
    double.looks = [RUNNING]
    assert "loralane batch watch batch_1" in " ".join(batch("download", "batch_1", code=3).stderr.split())


def test_targets_are_looked_at_before_anything_is_sent(batch, double, tmp_path):
    file = write(tmp_path / "requests.jsonl", [line()])
    batch("submit", file, "--output", "no/such/folder/answers.jsonl", code=2)
    batch("submit", file, "--metadata", "nothing", code=2)
    batch("submit", "no/such/file.jsonl", code=2)
    assert not double.names


def test_list_status_and_cancel(batch, double):
    double.looks = [RUNNING, DONE]
    assert [one["status"] for one in json.loads(batch("list", "--json").stdout)] == ["in_progress", "completed"]
    listed = batch("list", "--limit", "1").stdout
    assert "1 min 15 s" in listed and "completed" not in listed
    assert json.loads(batch("status", "batch_1", "--json").stdout) == RUNNING
    assert "/v1/chat/completions" in batch("status", "batch_1").stdout
    assert "4 of 9" not in batch("cancel", "batch_1").stderr
    assert "5 of 9 lines, 1 of them failed" in batch("cancel", "batch_1").stderr
    assert json.loads(batch("cancel", "batch_1", "--json").stdout)["status"] == "cancelling"
    assert double.cancelled == ["batch_1"] * 3


def test_errors_say_what_to_do_next(batch, double, monkeypatch):
    assert "loralane batch list" in " ".join(batch("status", "batch_9", code=1).stderr.split())
    assert "LORALANE_API_KEY" in " ".join(batch("list", key="sk-wrong", code=1).stderr.split())
    result = CliRunner().invoke(cli, ["batch", "list", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "Start one with `loralane serve`" in " ".join(result.stderr.split())


def test_the_key_may_come_from_the_environment(double):
    double.looks = [DONE]
    result = CliRunner().invoke(cli, ["batch", "list", "--url", double.url], env={"LORALANE_API_KEY": KEY})
    assert result.exit_code == 0


def test_a_gateway_that_stays_away_ends_the_watch(batch, double, monkeypatch):
    monkeypatch.setattr(batch_watch, "PATIENCE_S", 0.0)
    double.looks = [503]
    batch("watch", "batch_1", code=1)


@pytest.mark.parametrize("command", ["submit", "status", "list", "watch", "cancel", "download"])
def test_help_has_examples(command):
    result = CliRunner().invoke(cli, ["batch", command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"loralane batch {command}" in result.output


def test_the_bar_on_a_terminal(double):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with batch_watch.BatchBar(console) as bar:
        bar.show(a_batch())
        bar.show(RUNNING)
        bar.note("[gone]")
    assert "1 of 3, 0 failed" in screen.getvalue() and "1 min 15 s left" in screen.getvalue()
    assert "[gone]" in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (7260, "2 h 1 min"), (180_000, "2 d 2 h")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_tables_show_whatever_a_batch_has():
    screen = io.StringIO()
    rich = {"model": "tiny", "usage": {"input_tokens": 12_345, "input_tokens_details": {"cached_tokens": 7}}}
    console = Console(file=screen, width=200)
    console.print(batches_table([a_batch(expires_at=None)]))
    console.print(batch_facts(RUNNING | rich | {"metadata": {"run": "[7]"}}))
    shown = screen.getvalue()
    assert "input tokens 12,345" in shown and "cached tokens 7" in shown and "run [7]" in shown
