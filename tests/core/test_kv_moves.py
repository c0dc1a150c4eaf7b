"""Moves of KV pages between engines, as the core sees them: a state machine with a mover that answers when it likes, on
simulated memory that tells what each page holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.core.config import CoreConfig
from engine.core.memory.prefix import next_key, root_key
from engine.core.messages.commands import FetchKv, Submit
from engine.core.messages.moves import (
    CancelFetch,
    EndExport,
    ExportOver,
    ExportPages,
    FetchEnd,
    FetchEnded,
    FetchPages,
    PagesCame,
    PagesReady,
    PagesSent,
)
from engine.core.messages.requests import KvSource
from engine.core.state.sequence import PrefixUse, Sequence, page_keys
from tests.core.memory import ADAPTERS, expected_tokens, make_engine, prompts, request, run, tokens_of
from tests.core.test_engine_properties import CoreMachine
from tests.examples import examples


class HandMover:
    """Records the engine's orders, for a test to carry out. What pages hold comes from the executor's memory."""

    def __init__(self, engine):
        self.engine, self.size = engine, engine.state.config.block_size
        self.fetches, self.cancelled, self.exports, self.over = {}, set(), {}, set()
        """Orders of the fetches under way, by number; pages of each export that are ready and not sent; exports that
        get no more pages."""
        self.contents = {}
        """Key -> what its page holds."""
        engine.connect(self)

    def take(self, order):
        match order:
            case FetchPages(number):
                self.fetches[number] = list(zip(order.keys, order.host_pages, strict=True))
            case CancelFetch(number):
                self.cancelled.add(number)
            case PagesReady(number, host_pages):
                if number in self.exports:
                    self.exports[number][1].extend(host_pages)
            case ExportOver(number):
                self.over.add(number)

    def know(self, asked, realm=None):
        """Note what the pages of a request's tokens hold, and return their keys."""
        known = [*asked.prompt_ids, *asked.produced]
        key, keys = root_key(asked.adapter_hash, asked.tenant if realm is None else realm), []
        for end in range(self.size, len(known) + 1, self.size):
            key = next_key(key, known[end - self.size : end])
            keys.append(key)
            positions = range(end - self.size, end)
            self.contents[key] = [(asked.adapter_hash, tuple(known[: one + 1])) for one in positions]
        return keys

    def deliver(self, number, count):
        """Let the next pages of a fetch come."""
        come, self.fetches[number] = self.fetches[number][:count], self.fetches[number][count:]
        for key, page in come:
            self.engine.executor.written.append((page, self.contents[key]))
        if come:
            self.engine.inbox.put(PagesCame(number, len(come)))

    def end(self, number, reason):
        del self.fetches[number]
        self.engine.inbox.put(FetchEnded(number, reason, 0.1))

    def export(self, number, keys, waits):
        self.exports[number] = list(keys), []
        self.engine.inbox.put(ExportPages(number, tuple(keys), waits))

    def check(self):
        """Leased copies hold what their keys say."""
        for keys, ready in self.exports.values():
            for key, page in zip(keys, ready, strict=False):
                assert self.engine.executor.host[page] == self.contents[key], "a leased page was overwritten"

    def send(self, number, count):
        keys, ready = self.exports[number]
        count = min(count, len(ready))
        self.exports[number] = keys[count:], ready[count:]
        if count:
            self.engine.inbox.put(PagesSent(number, count))

    def end_export(self, number):
        del self.exports[number]
        self.engine.inbox.put(EndExport(number))


class MovesMachine(CoreMachine):
    @property
    def mover(self):
        if not hasattr(self, "_mover"):
            self._mover = HandMover(self.engine)
            self.asked = {}
        return self._mover

    def _put(self, request):
        self.mover.know(request)
        super()._put(request)

    @rule(
        prompt=prompts,
        adapter_hash=st.sampled_from([None, *ADAPTERS]),
        tenant=st.sampled_from("xyz"),
        seconds=st.sampled_from([0.003, 0.02, 10.0]),
        ahead=st.sampled_from(["no", "same", "keep", "only"]),
    )
    def submit_with_a_source(self, prompt, adapter_hash, tenant, seconds, ahead):
        """Some are fetched ahead of their submission; some of these are then submitted without a source, or never."""
        asked = request(f"r{len(self.requests)}", prompt * 2, 8, adapter_hash=adapter_hash, seed=3, ignore_eos=True)
        asked = asked._replace(tenant=tenant, arrival=self.state.steps.now, kv_source=KvSource("x", seconds, True))
        self.mover.know(asked)
        if ahead != "no":
            self.engine.inbox.put(FetchKv(asked))
        if ahead != "only":
            self._put(asked if ahead != "keep" else asked._replace(kv_source=None))

    @precondition(lambda self: self.mover.fetches)
    @rule(data=st.data(), count=st.integers(1, 4), end=st.sampled_from([None, None, *FetchEnd]))
    def answer_a_fetch(self, data, count, end):
        number = data.draw(st.sampled_from(sorted(self.mover.fetches)))
        self.mover.deliver(number, count)
        if end or not self.mover.fetches[number]:
            self.mover.end(number, end or FetchEnd.DONE)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), waits=st.booleans())
    def begin_an_export(self, data, waits):
        asked = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.mover.export(len(self.asked), self.mover.know(asked), waits)
        self.asked[len(self.asked)] = asked

    @precondition(lambda self: self.mover.exports)
    @rule(data=st.data(), count=st.integers(0, 3), ends=st.booleans())
    def answer_an_export(self, data, count, ends):
        number = data.draw(st.sampled_from(sorted(self.mover.exports)))
        self.mover.check()
        self.mover.send(number, count)
        if ends:
            self.mover.end_export(number)

    def _step(self):
        super()._step()
        if getattr(self, "_draining", False):
            self._end_moves()

    def _end_moves(self):
        for number in list(self.mover.fetches):
            self.mover.end(number, FetchEnd.LATE)
        for number in list(self.mover.exports):
            self.mover.end_export(number)

    def drain(self):
        self._draining = True
        self._end_moves()
        super().drain()
        self._draining = False
        assert not self.state.moves.imports and not self.state.moves.exports
        assert not self.state.host.reserved and not self.state.host.leased

    drain = precondition(lambda self: len(self.requests) > 3)(rule()(drain))

    @invariant()
    def leases_hold(self):
        if hasattr(self, "engine"):
            self.mover.check()


MovesMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
TestMoves = pytest.mark.slow(MovesMachine.TestCase)

CONFIG = CoreConfig(num_pages=40, block_size=4, max_seqs=4, max_model_len=64, token_budget=8, host_pages=20)


@pytest.fixture
def mover():
    return HandMover(make_engine(CONFIG))


def asking(name="r", prompt=range(1, 18), seconds=10.0, **fields):
    asked = request(name, prompt, 4, seed=3, ignore_eos=True)
    return asked._replace(kv_source=KvSource("x", seconds, True), **fields)


@pytest.mark.parametrize("end", [FetchEnd.CUT, FetchEnd.CORRUPT, FetchEnd.REFUSED, FetchEnd.GONE])
def test_a_request_waits_for_its_pages_and_computes_the_rest(mover, end):
    engine, asked = mover.engine, asking()
    mover.know(asked)
    engine.inbox.put(Submit(asked))
    engine.step()
    assert [len(pages) for pages in mover.fetches.values()] == [4] and not engine.state.running
    mover.deliver(1, 3)
    engine.step()
    assert not engine.state.running, "one page may still come"
    mover.end(1, end)
    events = run(engine)
    assert tokens_of(events, "r") == expected_tokens(asked, 4)
    assert events[0].num_cached == 12 and engine.state.counters.cached_tokens == 12
    assert engine.state.counters.kv.fetches[end] == 1 and not engine.state.host.reserved


def test_a_deadline_ends_the_wait_and_a_late_page_does_no_harm(mover):
    engine, asked = mover.engine, asking(seconds=0.01)
    mover.know(asked)
    events = run(engine, asked)
    assert tokens_of(events, "r") == expected_tokens(asked, 4) and events[0].num_cached == 0
    assert engine.state.host.reserved, "the mover may still write"
    mover.deliver(1, 4)
    mover.end(1, FetchEnd.LATE)
    run(engine)
    assert not engine.state.host.reserved and not engine.state.moves.awaited


def test_a_fetch_ahead_is_given_up_with_its_request(mover):
    engine, asked = mover.engine, asking()
    mover.know(asked)
    engine.inbox.put(FetchKv(asked))
    engine.step()
    mover.deliver(1, 2)
    events = run(engine, asked._replace(kv_source=None))
    assert mover.cancelled == {1} and events[0].num_cached == 8, "what has come is used"


def test_pages_are_ready_as_they_become_full(mover):
    engine, asked = mover.engine, asking()._replace(kv_source=None)
    keys = mover.know(asked)
    mover.export(1, keys, waits=True)
    mover.export(2, keys, waits=False)
    engine.step()
    assert mover.over == {2} and not engine.state.has_work, "a page that may come makes no steps"
    engine.inbox.put(Submit(asked))
    seen = []
    while engine.state.has_work or engine.inbox._commands:
        engine.step()
        seen.append(len(mover.exports[1][1]))
        mover.check()
    assert seen[:5] == [0, 2, 4, 4, 4] and mover.over == {1, 2}
    assert len(engine.state.host.leased) == 4
    mover.send(1, 3)
    mover.end_export(1)
    engine.step()
    assert not engine.state.host.leased


def test_keys_of_tests_are_those_of_the_engine(mover):
    asked = asking(adapter_hash="a", tenant="t")
    seq = Sequence(asked, list(asked.prompt_ids), prefix=PrefixUse("t"))
    assert mover.know(asked) == page_keys(seq, 4, 4)
