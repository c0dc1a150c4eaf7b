"""Stands in for packages that a peer's tests import and that need not be installed to ask a server."""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import urllib.request

URL = os.environ["PEERS_URL"]
BASE = os.environ["PEERS_BASE"]
ADAPTER = os.environ["PEERS_ADAPTER"]
ENDPOINT = "/peers/names"


class Missing:
    """Anything that a stub has: it can be called, has every attribute, and is a decorator that changes nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Missing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing()

    def __or__(self, other):
        return Missing()

    __ror__ = __getitem__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class Stub(types.ModuleType):
    """A module that has every attribute."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a `Stub` for a package, and for every module in it, that is not installed."""

    def __init__(self, *packages):
        self._packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def stub(*packages):
    sys.meta_path.insert(0, Finder(*packages))


def module(name, **attributes):
    """Put a module with these attributes, and any other, in place of one of the suite's."""
    made = Stub(name)
    made.__dict__.update(attributes)
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, made)


def use_names(names):
    """Tell the proxy which models the tests call by which names."""
    request = urllib.request.Request(URL + ENDPOINT, json.dumps(names).encode(), method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def tokenizer(*args, **kwargs):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["PEERS_TOKENIZER"])
