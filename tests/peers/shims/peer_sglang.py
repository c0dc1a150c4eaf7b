"""SGLang's tests of its server (`test/srt`), which start one with `popen_launch_server` for a class."""

import unittest
from types import SimpleNamespace

import peer_stubs
from peer_stubs import BASE, URL


class Constants(peer_stubs.Stub):
    """The module of SGLang's helpers: its constants are names of models and numbers, which only their names tell
    apart."""

    def __getattr__(self, name):
        if name.startswith("DEFAULT") and "TIMEOUT" not in name:
            return URL if "URL" in name else BASE
        return 600 if name.startswith("DEFAULT") else super().__getattr__(name)


def launch(model, base_url, *args, **options):
    peer_stubs.use_names({model: BASE} if model != BASE else {})
    return SimpleNamespace(pid=0, poll=lambda: None, terminate=lambda: None, wait=lambda *_: 0)


def install():
    peer_stubs.stub("sglang")
    for name in ("sglang.srt.utils", "sglang.srt.utils.hf_transformers_utils", "sglang.srt.hf_transformers_utils"):
        __import__(name)
        peer_stubs.module(name, kill_process_tree=lambda *_: None, get_tokenizer=peer_stubs.tokenizer)
    __import__("sglang.test.test_utils")
    peer_stubs.module("sglang.test.test_utils")
    helpers = __import__("sys").modules["sglang.test.test_utils"]
    helpers.__class__ = Constants
    helpers.__dict__.update(popen_launch_server=launch, CustomTestCase=unittest.TestCase)


def asks_server(item):
    """Return whether the test's class has a server: others test SGLang's own functions."""
    return hasattr(getattr(item, "cls", None), "base_url") or "setUpClass" in vars(getattr(item, "cls", None) or object)
