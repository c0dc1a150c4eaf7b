"""The shims between other servers' public tests and loralane, with small suites in the form of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import served

from tests.peers.classes import CLASSES, UNKNOWN, class_of
from tests.peers.running import report, run
from tests.peers.suites import SUITES

VLLM = """
import openai, pytest, requests
from tests.utils import RemoteOpenAIServer, large_gpu_mark
from vllm.platforms import current_platform
from ...utils import RemoteOpenAIServer as Same

@pytest.fixture(scope="module")
def server():
    assert not current_platform.is_cuda() and Same is RemoteOpenAIServer
    with RemoteOpenAIServer("Big/Model", ["--max-model-len", "9", "--lora-modules", "mine=x"]) as server:
        yield server

@large_gpu_mark
def test_its_name(server):
    assert server.get_client().models.list().data[0].id == "Big/Model"

@pytest.mark.parametrize("name", ["Big/Model", "mine"])
async def test_a_stream(server, name):
    chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async for chunk in await server.get_async_client().chat.completions.create(**chat):
        assert chunk.model == name

def test_no_name(server, prompt):
    answer = requests.post(server.url_for("v1", "completions"), json={"prompt": prompt})
    assert answer.json()["model"] == "Big/Model"

def test_an_unknown_name(server):
    with pytest.raises(openai.NotFoundError):
        server.get_client().completions.create(model="Other/Model", prompt="hi")

def test_a_field(server):
    assert requests.get(server.url_for("version")).json()["commit"]

def test_without_server():
    raise AssertionError("asks no server")
"""
FIXTURE = """
import pytest

@pytest.fixture
def prompt():
    return "hi"
"""
SGLANG = """
import requests
from sglang.srt.utils import kill_process_tree
from sglang.test.test_utils import (
    DEFAULT_SMALL_MODEL_NAME_FOR_TEST, DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH, DEFAULT_URL_FOR_TEST, CustomTestCase,
    popen_launch_server,
)

class TestMini(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.base_url = DEFAULT_URL_FOR_TEST
        cls.process = popen_launch_server("any/model", cls.base_url, timeout=DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH)

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def test_completion(self):
        body = {"model": "another", "prompt": "hi"}
        answer = requests.post(self.base_url + "/v1/completions", json=body, headers={"authorization": "Bearer EMPTY"})
        assert answer.status_code == 200 and answer.json()["model"] == "any/model"

    def test_route(self):
        assert requests.post(self.base_url + "/flush_cache").status_code == 200

class TestInside(CustomTestCase):
    def test_function(self):
        raise AssertionError("asks no server")
"""
LLAMA_UTILS = """
import os, requests, wget

class Server:
    def start(self):
        assert os.environ["DEBUG_EXTERNAL"]
    def post(self, path, **body):
        return requests.post(f"http://127.0.0.1:{os.environ['PORT']}{path}", json=body)
"""
LLAMA = """
from utils import *

def test_completion():
    server = Server()
    server.start()
    assert server.post("/v1/chat/completions", model="any", messages=[{"role": "user", "content": "hi"}]).ok

def test_image():
    assert Server().post("/v1/completions", prompt="hi").json()["choices"][0]["text"] == "an image"
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served(tmp_path_factory.mktemp("gateway")) as found:
        yield found.url


def outcomes(url, name, path, files):
    """Run a suite of these files, and return what became of each test, by its name."""
    for file, text in files.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(text)
        for folder in (path / file).relative_to(path).parents:
            (path / folder / "__init__.py").touch() if name == "vllm" and folder != Path() else None
    results = run(SUITES[name], path, url, key="sk-acme")
    assert f"{len(results)} run, " in report(results)
    return {
        result.test.rpartition("::")[2]: result.class_of_failure.name if result.class_of_failure else result.outcome
        for result in results
    }


@pytest.mark.slow
def test_tests_of_vllm_ask_the_gateway(url, tmp_path):
    files = {"tests/entrypoints/openai/test_mini.py": VLLM, "tests/entrypoints/conftest.py": FIXTURE}
    assert outcomes(url, "vllm", tmp_path, files) == {
        "test_its_name": "passed",
        "test_a_stream[Big/Model]": "passed",
        "test_a_stream[mine]": "passed",
        "test_no_name": "passed",
        "test_an_unknown_name": "passed",
        "test_a_field": "field",
    }


@pytest.mark.slow
def test_tests_of_sglang_ask_the_gateway(url, tmp_path):
    files = {"test/srt/openai_server/test_mini.py": SGLANG}
    assert outcomes(url, "sglang", tmp_path, files) == {"test_completion": "passed", "test_route": "route"}


@pytest.mark.slow
def test_tests_of_llama_cpp_ask_the_gateway(url, tmp_path):
    folder = "tools/server/tests"
    files = {f"{folder}/utils.py": LLAMA_UTILS, f"{folder}/unit/test_mini.py": LLAMA}
    assert outcomes(url, "llama.cpp", tmp_path, files) == {"test_completion": "passed", "test_image": "not text"}


def test_a_folder_without_the_suite_is_named(url, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has none of unit/"):
        run(SUITES["llama.cpp"], tmp_path, url, key="sk-acme")


FAILURES = {
    "slow": ("test_a.py::test", "httpx.ReadTimeout"),
    "stream": ("test_a.py::test", "AssertionError: Expected non empty content delta!"),
    "not installed": ("test_a.py", "ModuleNotFoundError: No module named 'mteb'"),
    "inside": ("test_a.py::test", "TypeError: object Missing can't be used in 'await' expression"),
    "not text": ("unit/test_vision_api.py::test", "assert 400 == 200"),
    "files": ("test_a.py::test", "fixture 'qwen3_lora_files' not found"),
    "other model": ("test_thinking_token_budget.py::test", "assert 3 == 4"),
    "other start": ("unit/test_slot_save.py::test", "assert 404 == 200"),
    "refused": ("test_a.py::test", "BadRequestError: Error code: 400 - min_tokens is not supported"),
    "route": ("test_a.py::test", "requests.exceptions.HTTPError: 404 Client Error: Not Found"),
    "error": ("test_a.py::test", "Failed: DID NOT RAISE <class 'openai.BadRequestError'>"),
    "field": ("test_a.py::test", "KeyError: 'timings'"),
    "model's words": ("test_a.py::test", "AssertionError: assert ' Paris' == ' Hello'"),
    UNKNOWN.name: ("test_a.py::test", "RuntimeError: who knows"),
}


SPECIAL = [
    ("stream", "openai/test_chat.py::test_chat_streaming[zephyr]", "assert None"),
    ("other start", "test_a.py::test_return_tokens_as_token_ids[True]", "ValueError: invalid literal for int()"),
    ("model's words", "unit/test_tool_call.py::test_weather[NORMAL]", "AssertionError: Expected 1 tool call in {}"),
]


@pytest.mark.parametrize(("name", "test", "text"), SPECIAL)
def test_failures_of_single_tests_have_classes(name, test, text):
    assert class_of(test, text).name == name


@pytest.mark.parametrize("name", FAILURES)
def test_failures_have_classes(name):
    assert class_of(*FAILURES[name]).name == name


def test_every_class_has_a_case():
    assert {one.name for one in CLASSES} | {UNKNOWN.name} == set(FAILURES)
