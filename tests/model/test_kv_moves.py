"""Requests whose prompt one engine computes and whose answer another one generates, with pages moved between them: the
tokens are those of one engine, whatever happens to the move."""

import pytest
from tiny_adapters import save_adapter
from tiny_engine import TinyEngine

from engine.core.messages.commands import Abort, FetchKv, Submit
from engine.core.messages.moves import FetchEnd
from engine.core.messages.requests import KvSource, Request, SamplingParams
from engine.core.watch.check import violations
from engine.kv.line import OwnEngine
from engine.kv.mover import KvMover

PROMPT = tuple(range(4, 42))
"""Nine full pages of 4 tokens and two tokens more."""
GREEDY = SamplingParams(12, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(12, temperature=0.9, seed=5, ignore_eos=True)


def moving(one, listen):
    """Return the mover of an engine, which gives pages at `listen`."""
    own = OwnEngine(one.runner.facts.kv_identity, one.runner.page_memory, one.engine.inbox.put, one.engine.clock)
    mover = KvMover(own, listen)
    one.engine.connect(mover)
    return mover


class Pair:
    """Two engines of one model: the first computes prompts and gives pages, the second generates."""

    def __init__(self, model, adapter, path):
        self.first, self.second = (TinyEngine(model, adapter, token_budget=8) for _ in range(2))
        self.path = path
        self.movers = [moving(self.first, f"unix:{path}"), moving(self.second, "")]
        self.count = 0

    @property
    def counters(self):
        return self.second.engine.state.counters

    def generate(self, params, model="base", prompt=PROMPT, seconds=20.0, during=lambda step: None, address=""):
        """Return the answer's tokens; `during` is called with "begin", with the number of each step of the
        first engine, and with "end"."""
        self.count += 1
        name = f"r{self.count}"
        asked = Request(name, prompt, params, self.first.adapters[model])
        source = KvSource(address or f"unix:{self.path}", seconds, computes=True)
        ahead = asked._replace(kv_source=source, arrival=self.second.engine.clock())
        during("begin")
        self.second.engine.inbox.put(FetchKv(ahead))
        self.step(self.second)
        self.first.engine.inbox.put(Submit(asked._replace(params=params._replace(max_tokens=1))))
        steps = 0
        while not self.first.texts[name]:
            during(steps)
            self.step(self.first)
            steps += 1
        during("end")
        produced = tuple(self.first.texts[name])
        self.second.engine.inbox.put(Submit(ahead._replace(produced=produced)))
        self.step(self.second)
        while self.second.engine.state.sequences:
            self.step(self.first, self.second)
        self.settle()
        return [*produced, *self.second.texts[name]]

    def step(self, *engines):
        for one in engines:
            one.step()
            one.engine.inbox.wait(0.001)

    def settle(self):
        """Let all moves end. Nothing is left of them on either side."""
        for one in (self.first, self.second):
            state = one.engine.state
            while state.moves.imports or state.moves.exports or state.has_work:
                self.step(one)
            assert violations(state) == [] and not state.host.leased and not state.host.reserved


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(folder / "x", 3, seed=3)
    return folder / "x"


@pytest.fixture
def pair(tiny_llama, adapter, tmp_path):
    pair = Pair(tiny_llama, adapter, tmp_path / "kv")
    yield pair
    pair.movers[0].close()


@pytest.fixture(scope="module")
def alone(tiny_llama, adapter):
    """Return a function that generates on one engine, without a move."""
    engine = TinyEngine(tiny_llama, adapter)

    def generate(params, model="base", prompt=PROMPT):
        engine.texts.clear()
        engine.ask("r", prompt, params, model)
        return engine.finish().texts["r"]

    return generate


def test_tokens_through_two_engines_are_those_of_one(pair, alone):
    for model in ("base", "adapter"):
        for params in (GREEDY, DRAWN):
            before = pair.counters.kv.pages_in
            assert pair.generate(params, model) == alone(params, model)
            assert pair.second.cached[f"r{pair.count}"] == 36, "nine pages came, or were there"
            assert pair.counters.kv.pages_in - before == (9 if params is GREEDY else 0)
    assert pair.counters.kv.fetches[FetchEnd.DONE] == 2 and pair.counters.kv.seconds_in > 0
    assert pair.first.engine.state.counters.kv.pages_out == 18
    assert pair.counters.prompt_tokens == 4 * len(PROMPT)


def test_a_prefix_of_another_engine_is_fetched_as_far_as_it_is_there(pair, alone):
    pair.first.chat("earlier", PROMPT[:20])
    pair.first.finish()
    now, source = pair.second.engine.clock(), KvSource(f"unix:{pair.path}", 20.0)
    asked = Request("later", PROMPT, GREEDY, kv_source=source, arrival=now)
    pair.second.engine.inbox.put(Submit(asked))
    while not pair.second.texts["later"]:
        pair.step(pair.first, pair.second)
    pair.second.finish()
    pair.settle()
    assert pair.second.texts["later"] == alone(GREEDY) and pair.second.cached["later"] == 20
    assert pair.counters.kv.fetches[FetchEnd.GONE] == 1


@pytest.mark.parametrize("when", ["begin", 2, "end"])
def test_the_sender_dies(pair, alone, when):
    """Before the move, during it and after it: all connections break, and none is accepted any more."""

    def die(step):
        if step == when:
            while when == 2 and not pair.movers[0]._sender.lines:
                pair.second.engine.inbox.wait(0.001)
            while when == "end" and pair.second.engine.state.moves.imports:
                pair.step(pair.first, pair.second)
            pair.movers[0].close()
            for line in list(pair.movers[0]._sender.lines):
                line.cut()

    assert pair.generate(DRAWN, "adapter", during=die) == alone(DRAWN, "adapter")
    assert pair.counters.kv.fetches[FetchEnd.DONE if when == "end" else FetchEnd.CUT] >= 1
    assert (pair.counters.kv.pages_in == 9) == (when == "end")


def test_pages_that_come_too_late_are_computed(pair, alone):
    """The other engine waits for a prompt that never comes."""
    engine = pair.second.engine
    asked = Request("r", PROMPT, GREEDY, kv_source=KvSource(f"unix:{pair.path}", 0.2, True), arrival=engine.clock())
    engine.inbox.put(Submit(asked))
    while not pair.second.texts["r"]:
        pair.step(pair.first, pair.second)
    pair.second.finish()
    pair.settle()
    assert pair.second.texts["r"] == alone(GREEDY) and pair.counters.kv.fetches[FetchEnd.LATE] == 1


def test_an_aborted_request_ends_its_fetch(pair):
    engine = pair.second.engine
    source = KvSource(f"unix:{pair.path}", 20.0, True)
    engine.inbox.put(Submit(Request("r", PROMPT, GREEDY, kv_source=source, arrival=engine.clock())))
    while not pair.first.engine.state.moves.exports:
        pair.step(pair.first, pair.second)
    engine.inbox.put(Abort("r"))
    pair.step(pair.second)
    pair.settle()
    assert pair.counters.kv.fetches[FetchEnd.CANCELLED] == 1
