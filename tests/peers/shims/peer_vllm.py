"""vLLM's tests of its server (`tests/entrypoints`), which start one with `RemoteOpenAIServer`."""

import base64
import sys

import peer_stubs
from peer_stubs import ADAPTER, BASE, URL


class Server:
    """In place of `RemoteOpenAIServer`: the running demo, in which the model of the test stands for the base."""

    DUMMY_API_KEY = "EMPTY"

    def __init__(self, model, args=(), **options):
        words = [str(word) for word in args]
        served = following(words, "--served-model-name") or [model]
        adapters = [word.partition("=")[0] for word in following(words, "--lora-modules") if "=" in word]
        peer_stubs.use_names(dict.fromkeys(served, BASE) | dict.fromkeys(adapters, ADAPTER))
        self.url_root = URL
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port, self.uds, self.show_hidden_metrics = int(port), None, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def url_for(self, *parts):
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options):
        return self._of_openai("OpenAI", options)

    def get_async_client(self, **options):
        return self._of_openai("AsyncOpenAI", options)

    def get_client_anthropic(self, **options):
        return self._of_anthropic("Anthropic", options)

    def get_async_client_anthropic(self, **options):
        return self._of_anthropic("AsyncAnthropic", options)

    def _of_openai(self, name, options):
        import openai

        shared = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120}
        return getattr(openai, name)(**shared | options)

    def _of_anthropic(self, name, options):
        import anthropic

        shared = {"base_url": self.url_root, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120}
        return getattr(anthropic, name)(**shared | options)


def following(words, option):
    """Return the values that follow an option on a command line."""
    if option not in words:
        return []
    rest = words[words.index(option) + 1 :]
    return rest[: next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))]


def install():
    peer_stubs.stub("vllm", "tblib")
    sys.modules["pybase64"] = base64  # which has the same functions, and is slower
    __import__("vllm.tokenizers")
    peer_stubs.module("vllm.tokenizers", get_tokenizer=peer_stubs.tokenizer)
    __import__("tests")
    peer_stubs.module("tests.utils", RemoteOpenAIServer=Server, ROCM_EXTRA_ARGS=[], VLLM_PATH=None)


def asks_server(item):
    return any("server" in name or "client" in name for name in getattr(item, "fixturenames", ()))
