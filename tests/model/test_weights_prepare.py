"""What a user may call a model, and what folder comes of it."""

import signal
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from rich.console import Console

from engine.model.folders.prepare import prepare_model
from engine.process.model_source import ModelNotFound, find_prepared, prepared_folder
from tests.model.tiny_gguf import header

QUIET = Console(quiet=True)


def test_a_hugging_face_folder_is_used_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert prepare_model(str(tmp_path), tmp_path / "data", QUIET) == tmp_path
    assert not (tmp_path / "data").exists()


def test_a_prepared_gguf_file_is_found_again(tmp_path, monkeypatch):
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(header([(1, 2)]))
    converted = []

    def convert(file, out, on_progress):
        on_progress("working", 0.5)
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
        converted.append(out)

    pytest.importorskip("engine.model.folders.gguf")
    monkeypatch.setattr("engine.model.folders.gguf.prepare_gguf", convert)
    first = prepare_model(str(gguf), tmp_path / "data", QUIET)
    assert first.parent == tmp_path / "data" / "models"
    assert first.name.startswith("tiny-")
    assert prepare_model(str(tmp_path), tmp_path / "data", QUIET) == first
    gguf.write_bytes(header([(2, 2)]))
    second = prepare_model(str(gguf), tmp_path / "data", QUIET)
    assert converted == [first, second]
    assert first != second


def test_what_is_ready_is_found_without_a_preparation(tmp_path):
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(header([(1, 2)]))
    data = tmp_path / "data"
    assert find_prepared(str(gguf), data) is None
    folder = prepared_folder(gguf, data)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_prepared(str(gguf), data) == find_prepared(str(tmp_path), data) == folder
    assert find_prepared(str(folder), data) == folder
    assert find_prepared("owner/name", data) is None
    with pytest.raises(ModelNotFound, match="not a GGUF one"):
        find_prepared(__file__, data)


def test_a_preparation_ends_with_standard_input_and_leaves_nothing(tmp_path):
    program = f"""if True:
        import sys, time
        from pathlib import Path
        from engine.model.folders import gguf, prepare
        def fail(*_):
            print("converting", flush=True)
            time.sleep(60)
        gguf._write = fail
        sys.argv = ["prepare", "embedded", "--data-dir", {str(tmp_path)!r}, "--until-stdin-closes"]
        sys.exit(prepare.main())
    """
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"converting\n"
        assert len(list((tmp_path / "models").iterdir())) == 1
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in errors
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFound, match="not a model folder"):
        prepare_model(str(tmp_path), tmp_path, QUIET)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        prepare_model(str(tmp_path), tmp_path, QUIET)


def test_an_unreachable_hub_id_is_refused_with_the_reason(tmp_path, monkeypatch):
    def unreachable(model, allow_patterns, ignore_patterns):
        assert any(fnmatch("consolidated-00001.safetensors", pattern) for pattern in ignore_patterns)
        assert any(fnmatch("original/model.safetensors", pattern) for pattern in ignore_patterns)
        assert not any("bin" in pattern or "pt" in pattern for pattern in allow_patterns)
        raise OSError("no route to the hub\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match=r"no route to the hub$"):
        prepare_model("owner/name", tmp_path, QUIET)


def test_the_program_prints_the_folder_last_and_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from engine.model.folders.prepare import main; status = main(); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run([*command, str(tmp_path), "--data-dir", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(tmp_path.resolve()))
    failed = subprocess.run([*command, "no/such/model", "--data-dir", str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "no/such/model" in failed.stderr


def test_a_disk_that_takes_no_more_is_told_in_a_line(tmp_path):
    """A limit on the size of files stands in for a full disk: libraries meet it in the same way."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    code += "from engine.model.folders.prepare import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "embedded", "--data-dir", str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "error: [Errno 27] File too large" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert list((tmp_path / "models").iterdir()) == []
