"""Batches on a real engine: from a terminal, and by a gRPC client that found everything through reflection."""

import asyncio
import base64
import json
import os
import subprocess
import sys

import pytest

from tests.e2e.reflected import ReflectedClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICE = "loralane.v1.Batches"
QUESTION = "What is the capital of France?"
KEY = "sk-demo-acme"


def lines(models):
    """Return a question for each model, and one line that is longer than every model's context."""
    for model in models:
        yield {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    yield {"model": models[0], "messages": [{"role": "user", "content": "x " * 20_000}]}


@pytest.fixture
def requests(models, tmp_path):
    file = tmp_path / "requests.jsonl"
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(lines(models))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answers(text):
    """custom_id -> what was said."""
    rows = [json.loads(row) for row in text.splitlines()]
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}


async def test_a_batch_from_a_terminal(server, models, requests):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "gateway", "batch", *arguments, "--url", f"http://127.0.0.1:{server.http_port}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "LORALANE_API_KEY": KEY},
        )

    output = requests.with_name("answers.jsonl")
    done = await asyncio.to_thread(run, "submit", str(requests), "--output", str(output))
    assert done.returncode == 0, done.stderr
    [batch_id] = done.stdout.split()
    said = answers(output.read_text())
    assert sorted(said) == [str(number) for number in range(len(models))]
    assert "Paris" in said["0"]
    [failed] = output.with_suffix(".errors.jsonl").read_text().splitlines()
    assert json.loads(failed)["response"]["body"]["error"]["code"] == "context_length_exceeded"
    [listed] = [
        one for one in json.loads((await asyncio.to_thread(run, "list", "--json")).stdout) if one["id"] == batch_id
    ]
    assert listed["request_counts"] == {"total": len(models) + 1, "completed": len(models), "failed": 1}
    assert listed["eta_seconds"] is None, "it has ended"


async def test_the_same_over_grpc(server, models, requests):
    def walk():
        client = ReflectedClient(f"127.0.0.1:{server.grpc_port}", KEY)
        assert SERVICE in client.services()

        def call(method, request):
            return list(client.call(SERVICE, method, request))

        data = [base64.b64encode(piece).decode() for piece in pieces(requests.read_bytes())]
        [file] = call("CreateFile", [{"header": {"filename": "in.jsonl"}}, *({"data": piece} for piece in data)])
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "metadata": {"run": "7"}}
        [batch] = call("CreateBatch", wanted)
        seen = call("WatchBatch", {"batch_id": batch["id"], "interval_seconds": 0.1})
        chunks = call("ReadFile", {"file_id": seen[-1]["output_file_id"]})
        client.close()
        return seen, b"".join(base64.b64decode(chunk["data"]) for chunk in chunks).decode()

    seen, text = await asyncio.to_thread(walk)
    assert seen[-1]["status"] == "completed"
    assert len({json.dumps(told, sort_keys=True) for told in seen}) == len(seen), "only news are told"
    assert "Paris" in answers(text)["0"]


def pieces(content):
    return [content[start : start + 10_000] for start in range(0, len(content), 10_000)]
