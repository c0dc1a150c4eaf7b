"""The scheduling core under arbitrary traffic: a state machine whose every step is checked, on simulated memory."""

import pickle
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.commit.adapters import add_adapter, pin_adapter
from engine.core.commit.apply import cancel, set_mode
from engine.core.config import CoreConfig
from engine.core.memory.adapters import HostCopy
from engine.core.memory.prefix import realm_of, root_key
from engine.core.messages.commands import (
    Abort,
    AdapterFetched,
    DropAdapter,
    FetchCancelled,
    FetchFailed,
    GrammarFailed,
    GrammarReady,
    MaskFailed,
    MaskReady,
    Submit,
)
from engine.core.messages.requests import FinishReason, Lane, LaneMode, Pooling, PoolingKind, Request, SamplingParams
from engine.core.plan.next_step import plan_step
from engine.core.state.grammars import Stage
from engine.core.watch.check import leftovers, violations
from engine.executor.fake import fake_row, fake_vector
from tests.core.memory import (
    ADAPTERS,
    GRAMMARS,
    added,
    configs,
    expected_tokens,
    make_engine,
    modes,
    prompts,
    request,
    run_all,
    tokens_of,
)
from tests.examples import examples

pytestmark = pytest.mark.slow


class CoreMachine(RuleBasedStateMachine):
    @initialize(config=configs, mode=modes, overlaps=st.booleans())
    def begin(self, config, mode, overlaps):
        self.knows_lanes = mode.policy == "lanes"
        self.engine = make_engine(config, mode, at_once=False, overlaps=overlaps)
        self.requests, self.received, self.ended, self.scored = {}, {}, {}, {}
        for adapter_hash in ADAPTERS:
            self.engine.inbox.put(added(adapter_hash))

    @property
    def state(self):
        return self.engine.state

    @property
    def executor(self):
        return self.engine.executor

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 12),
        adapter_hash=st.sampled_from([None, *ADAPTERS]),
        lane=st.sampled_from(Lane),
        priority=st.integers(0, 2),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from("xyz"),
        deadline=st.sampled_from([None, 0.01, 0.2, 10.0]),
        grammar=st.sampled_from([None, None, *GRAMMARS]),
        expected=st.sampled_from([None, 1, 3, 100]),
    )
    def submit(self, prompt, max_tokens, adapter_hash, lane, priority, ignore_eos, tenant, deadline, grammar, expected):
        most = max_tokens if expected is None else 48 - len(prompt)
        self._submit(prompt, most, adapter_hash, lane, priority, ignore_eos, tenant, deadline, grammar, expected)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(2, 12),
        produced=st.integers(0, 6),
        adapter_hash=st.sampled_from([None, *ADAPTERS]),
        lane=st.sampled_from(Lane),
        suspect=st.booleans(),
        whole=st.booleans(),
        grammar=st.sampled_from([None, None, *GRAMMARS]),
        expected=st.sampled_from([None, None, 3]),
    )
    def submit_moved(self, prompt, max_tokens, produced, adapter_hash, lane, suspect, whole, grammar, expected):
        """A request that another engine process had before."""
        moved = (produced, suspect, whole)
        self._submit(prompt, max_tokens, adapter_hash, lane, 0, True, "x", None, grammar, expected, moved)

    @rule(prompt=prompts, count=st.integers(2, 4), lane=st.sampled_from(Lane))
    def submit_siblings(self, prompt, count, lane):
        """The answers of one request with n > 1."""
        for _ in range(count):
            self._submit((*prompt, *prompt), 12, None, lane, 0, True, "x", None)

    @rule(
        prompt=prompts,
        kind=st.sampled_from(PoolingKind),
        adapter_hash=st.sampled_from([None, *ADAPTERS]),
        lane=st.sampled_from(Lane),
        suspect=st.booleans(),
    )
    def submit_for_a_vector(self, prompt, kind, adapter_hash, lane, suspect):
        self._submit_suspect(prompt, SamplingParams(max_tokens=0), adapter_hash, lane, suspect, pooling=Pooling(kind))

    @rule(
        prompt=prompts,
        max_tokens=st.integers(0, 6),
        scored=st.integers(0, 6),
        adapter_hash=st.sampled_from([None, *ADAPTERS]),
        lane=st.sampled_from(Lane),
        suspect=st.booleans(),
    )
    def submit_for_logprobs_of_the_prompt(self, prompt, max_tokens, scored, adapter_hash, lane, suspect):
        """Now and then, another engine process has sent some of them before."""
        params = SamplingParams(max_tokens, seed=3, ignore_eos=True, prompt_logprobs=1)
        scored = min(scored, len(prompt) - 1) * suspect
        self._submit_suspect(prompt, params, adapter_hash, lane, suspect, num_scored=scored)

    @rule(adapters=st.permutations(sorted(ADAPTERS)), prompt=prompts, lane=st.sampled_from(Lane))
    def submit_to_each_adapter(self, adapters, prompt, lane):
        for adapter_hash in adapters:
            self._submit(prompt, 6, adapter_hash, lane, 0, True, adapter_hash, None)

    def _submit(
        self,
        prompt,
        max_tokens,
        adapter_hash,
        lane,
        priority,
        ignore_eos,
        tenant,
        deadline,
        grammar=None,
        expected=None,
        moved=None,
    ):
        params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=ignore_eos, grammar=grammar)
        name = f"r{len(self.requests)}"
        arrival = self.state.steps.now
        deadline = None if deadline is None else arrival + deadline
        request = Request(
            name, tuple(prompt), params, adapter_hash, lane, priority, tenant, 1.0 + len(name) % 2, arrival, deadline
        )
        kind = len(self.requests) % 3
        request = request._replace(expected_tokens=expected, request_class="a" * kind, class_weight=1.0 + kind)
        if grammar is GRAMMARS[-1]:
            self.executor.slow.add(name)
        self._put(request if moved is None else self._moved(request, *moved))

    def _submit_suspect(self, prompt, params, adapter_hash, lane, suspect, **wanted):
        """Submit a request that, if it is a suspect, another engine process had before."""
        name, moves = f"r{len(self.requests)}", int(suspect)
        request = Request(name, tuple(prompt), params, adapter_hash, lane, tenant="x", arrival=self.state.steps.now)
        self._put(request._replace(moves=moves, suspect=suspect, **wanted))

    def _put(self, request):
        self.requests[request.id], self.received[request.id] = request, list(request.produced)
        self.engine.inbox.put(Submit(request))

    def _moved(self, request, produced, suspect, whole):
        tokens = expected_tokens(request, min(produced, request.params.max_tokens - 1))
        tokens = tokens[: tokens.index(7)] if 7 in tokens else tokens
        return request._replace(produced=tuple(tokens), moves=1, suspect=suspect, whole=whole)

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            self.engine.inbox.put(Abort(data.draw(st.sampled_from(sorted(self.requests)))))

    @rule()
    def abort_everything(self):
        for name in self.requests.keys() - self.ended.keys():
            self.engine.inbox.put(Abort(name))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        """Cancel a request as an administrator does: between two steps, while one may still be computed."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=4))
        alive = self.engine.inspect(lambda state: len({*names} & state.sequences.keys()))
        assert self.engine.inspect(lambda state: cancel(state, names)) == alive

    @rule(lane=st.sampled_from(Lane), mode=st.sampled_from(LaneMode))
    def set_mode(self, lane, mode):
        if self.knows_lanes:  # the queue of a baseline has no lanes that could be paused
            self.engine.inspect(lambda state: set_mode(state, lane, mode))

    @rule(adapter_hash=st.sampled_from(sorted(ADAPTERS)), really=st.integers(0, 3))
    def drop_adapter(self, adapter_hash, really):
        """Now and then: most of the time there should be something to do."""
        if not really:
            self.engine.inbox.put(DropAdapter(adapter_hash))

    @rule(adapter_hash=st.sampled_from(sorted(ADAPTERS)))
    def add_adapter(self, adapter_hash):
        self.engine.inbox.put(added(adapter_hash))

    @rule(adapter_hash=st.sampled_from(sorted(ADAPTERS)))
    def read_adapter(self, adapter_hash):
        """Read an adapter as an operator's load does. It is packed into host memory if there is room."""
        if self.engine.inspect(lambda state: add_adapter(state, replace(added(adapter_hash), is_read=True))):
            self.executor.begin(adapter_hash)

    @rule(adapter_hash=st.sampled_from(sorted(ADAPTERS)), pinned=st.booleans())
    def pin_adapter(self, adapter_hash, pinned):
        with suppress(ValueError):  # unknown, or it leaves too little room
            self.engine.inspect(lambda state: pin_adapter(state, adapter_hash, pinned))

    @precondition(lambda self: self.executor.fetching)
    @rule(data=st.data(), kind=st.sampled_from([AdapterFetched, AdapterFetched, FetchFailed]))
    def answer_fetch(self, data, kind):
        adapter_hash = data.draw(st.sampled_from(sorted(self.executor.fetching)))
        if self.executor.fetching[adapter_hash] and data.draw(st.booleans()):
            kind = FetchCancelled
        self.executor.answer(adapter_hash, kind)

    @precondition(lambda self: self.executor.preparing)
    @rule(data=st.data(), kind=st.sampled_from([GrammarReady, GrammarReady, GrammarFailed]))
    def answer_grammar(self, data, kind):
        wanted = sorted(self.executor.preparing, key=lambda grammar: grammar.text)
        self.executor.tell(data.draw(st.sampled_from(wanted)), kind)

    @precondition(lambda self: self._guided)
    @rule(data=st.data())
    def fail_grammar(self, data):
        """From its next token on, a request's grammar can be followed no further."""
        self.executor.failing.add(data.draw(st.sampled_from(self._guided)))

    @precondition(lambda self: self._guided)
    @rule(data=st.data())
    def slow_down(self, data):
        """From now on, a request's masks take too long for a step; its next one, too, or only those after it."""
        name = data.draw(st.sampled_from(self._guided))
        self.executor.slow.add(name)
        if name in self.executor.sequences and data.draw(st.booleans()):
            self.executor.unready.add(name)

    @precondition(lambda self: self.executor.masking)
    @rule(data=st.data(), kind=st.sampled_from([MaskReady, MaskReady, MaskFailed]))
    def answer_mask(self, data, kind):
        self.executor.tell_mask(data.draw(st.sampled_from(sorted(self.executor.masking))), kind)

    @property
    def _guided(self):
        return [name for name, request in self.requests.items() if request.params.grammar and name not in self.ended]

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self._step()

    def _step(self):
        for event in self.engine.step():
            assert event.request_id not in self.ended, "an event after the terminal one"
            self.received[event.request_id].extend(event.tokens)
            self.scored[event.request_id] = self.scored.get(event.request_id, b"") + event.prompt_logprobs
            if event.finish_reason is not None:
                self.ended[event.request_id] = event

    @precondition(lambda self: len(self.requests) > 3)
    @rule()
    def drain(self):
        """Everything ends, and leaves nothing behind."""
        for lane in Lane:
            self.set_mode(lane=lane, mode=LaneMode.OPEN)
        for _ in range(3000):
            if not (self.state.has_work or self.engine.inbox._commands or self.executor.fetching):
                break
            self._step()
            for adapter_hash, cancelled in list(self.executor.fetching.items()):
                self.executor.answer(adapter_hash, FetchCancelled if cancelled else AdapterFetched)
            for grammar in list(self.executor.preparing):
                self.executor.tell(grammar, GrammarReady)
            for name in list(self.executor.masking):
                self.executor.tell_mask(name, MaskReady)
        else:
            raise AssertionError("it never came to rest")
        assert set(self.ended) == set(self.requests)
        assert leftovers(self.state) == []
        waiting = self.state.waiting
        assert not any((*waiting.num_tokens.values(), *waiting.num_outputs.values()))
        assert self.executor.sequences == {}
        assert not self.executor.preparing and not self.executor.prepared
        assert not self.executor.masking and not self.executor.unready and not self.state.grammars.masks.under_way
        assert not self.executor.fetching and not self.state.adapters.fetching
        assert self.executor.packed == {
            a.adapter_hash for a in self.state.adapters.values() if a.host is HostCopy.PRESENT
        }
        assert self.executor.resident.keys() == {a.adapter_hash for a in self.state.adapters.values() if a.is_resident}

    @invariant()
    def healthy(self):
        if hasattr(self, "engine"):
            assert violations(self.state) == []

    @invariant()
    def streams_are_undisturbed(self):
        for name, tokens in getattr(self, "received", {}).items():
            assert tokens == expected_tokens(self.requests[name], len(tokens))
            self._check_end(name, tokens)

    @invariant()
    def prompts_are_scored_in_order_and_once(self):
        for name, rows in getattr(self, "scored", {}).items():
            request = self.requests[name]
            width, prompt = request.params.prompt_logprobs, list(request.prompt_ids)
            missing = range(0 if width is None else request.num_scored, 0 if width is None else len(prompt) - 1)
            wanted = b"".join(fake_row(request.adapter_hash, prompt[: row + 2], width) for row in missing)
            ended = self.ended.get(name)
            is_whole = self.received[name] or (ended and ended.finish_reason is FinishReason.LENGTH)
            assert rows == wanted if is_whole else wanted.startswith(rows)

    def _check_end(self, name, tokens):
        event, params = self.ended.get(name), self.requests[name].params
        pooling = self.requests[name].pooling
        if event is not None and event.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
            assert (event.finish_reason is FinishReason.POOLED) is (pooling is not None)
        if event is not None and event.finish_reason is FinishReason.POOLED:
            request = self.requests[name]
            assert (tokens, event.num_cached) == ([], 0)
            assert event.vector == fake_vector(request.adapter_hash, pooling, list(request.prompt_ids))
        if event is not None and event.finish_reason is FinishReason.LENGTH:
            is_ceiling = self.requests[name].expected_tokens is not None
            assert 1 <= len(tokens) <= params.max_tokens if is_ceiling else len(tokens) == params.max_tokens
        if event is not None and event.finish_reason is FinishReason.STOP:
            assert tokens[-1] == 7 and (params.grammar or not params.ignore_eos)

    @invariant()
    def plans_are_pure_and_fit(self):
        if not hasattr(self, "engine"):
            return
        before = pickle.loads(pickle.dumps(self.state, -1))  # in a third of the time of copy.deepcopy
        plan = plan_step(self.state, self.engine.policy, 0.0)
        assert plan == plan_step(before, self.engine.policy, 0.0), "planning is not deterministic"
        assert _comparable(before) == _comparable(self.state), "planning changed the state"
        config = self.state.config
        assert plan.num_tokens <= config.token_budget
        assert not {copy.host_page for copy in plan.saves} & {copy.host_page for copy in plan.restores}
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            end = chunk.start + chunk.num_tokens
            last = len(request.prompt_ids) + max(0, request.params.max_tokens - 1)
            assert chunk.start < end <= last, "past the last token"
        assert all(name in self.state.running and name not in plan.preempted for name in plan.grammars.masks)
        unmasked = self.state.grammars.masks.waiting.keys()
        assert not {chunk.request_id for chunk in plan.chunks} & unmasked, "a mask is missing"
        on_trial = [chunk for chunk in plan.chunks if self.state.sequences[chunk.request_id].on_trial]
        assert not on_trial or len(plan.chunks) == 1, "a suspect was not alone in a step"
        self._check_lanes(plan)

    def _check_lanes(self, plan):
        lanes = {name: request.lane for name, request in self.requests.items()}
        modes = {self.state.waiting.modes[lanes[admission.request_id]] for admission in plan.admitted}
        assert LaneMode.PAUSED not in modes, "a start in a paused lane"
        survivors = [s for s in self.state.running if s not in plan.preempted]
        if self.knows_lanes and any(lanes[v] is Lane.INTERACTIVE for v in plan.preempted):
            assert all(lanes[s] is Lane.INTERACTIVE for s in survivors), "an interactive victim beside a batch one"
        used = {a.adapter_hash for a in plan.admitted if a.adapter_hash}
        used |= {self.requests[s].adapter_hash for s in survivors} - {None}
        assert not used & set(plan.adapters.evicted), "an adapter was evicted from under a sequence"
        pinned = {a.adapter_hash for a in self.state.adapters.values() if a.pinned}
        assert not pinned & set(plan.adapters.evicted), "a pinned adapter was evicted"
        assert not {load.adapter_hash for load in plan.adapters.loads} & set(plan.adapters.dropped), (
            "a copy is dropped as it is used"
        )
        fetching = len(self.state.adapters.fetching) + len(plan.adapters.fetches)
        assert fetching <= self.state.config.max_fetches
        preparing = self.state.grammars.count(Stage.UNDER_WAY) + len(plan.grammars.prepared)
        assert preparing <= self.state.config.max_preparations


def _comparable(state):
    pool, prefix = state.pool, state.prefix
    return (
        list(pool.refs),
        list(pool.free),
        dict(prefix.page_of),
        {lane: list(pages) for lane, pages in prefix.idle.items()},
        dict(prefix.promised),
        dict(state.host.page_of),
        [(s.id, s.tokens, s.num_pending, s.num_computed, s.pages) for s in state.sequences.values()],
        [s.id for s in state.waiting],
        list(state.running),
        [(a.adapter_hash, a.host, a.pages, a.live, a.running, a.closing, a.pinned) for a in state.adapters.values()],
        (list(state.grammars.masks.waiting), list(state.grammars.masks.under_way)),
        (state.adapters.held, list(state.adapters.idle), list(state.adapters.hosted), list(state.adapters.fetching)),
        list(state.steps.released),
    )


CoreMachine.TestCase.settings = settings(max_examples=examples(45), stateful_step_count=40, deadline=None)
TestCore = CoreMachine.TestCase


def test_preempted_streams_equal_undisturbed_ones():
    config = CoreConfig(num_pages=12, block_size=2, max_seqs=4, max_model_len=64, token_budget=16)
    engine = make_engine(config)
    requests = [request(f"r{i}", [i, i + 1, 3], 10, arrival=float(i), ignore_eos=True) for i in range(4)]
    events = run_all(engine, requests)
    assert engine.state.counters.preemptions > 0
    for r in requests:
        assert tokens_of(events, r.id) == expected_tokens(r, 10)
    assert leftovers(engine.state) == []


def test_interactive_takes_the_place_of_batch():
    config = CoreConfig(num_pages=40, block_size=4, max_seqs=2, max_model_len=64, token_budget=16)
    engine = make_engine(config)
    for i in range(2):
        engine.inbox.put(Submit(request(f"b{i}", [i] * 8, 20, Lane.BATCH, arrival=float(i), ignore_eos=True)))
    for _ in range(3):
        engine.step()
    engine.inbox.put(Submit(request("now", [5] * 4, 2, arrival=9.0, ignore_eos=True)))
    events = engine.step()
    assert "now" in engine.state.running
    assert [s.id for s in engine.state.waiting] == ["b1"]
    assert any(event.request_id == "now" and event.tokens for event in events)


def test_adapter_pages_yield_to_interactive_adapters():
    """A batch sequence holding the only room for adapters gives it up, with its adapter, to an interactive one."""
    config = CoreConfig(num_pages=10, block_size=4, max_seqs=4, max_model_len=32, token_budget=16)
    engine = make_engine(config)
    adapters = {"x": 5, "y": 5}
    for adapter_hash, pages in adapters.items():
        engine.inbox.put(added(adapter_hash, pages))
    engine.inbox.put(Submit(request("b", [1] * 8, 8, Lane.BATCH, "x", 0.0, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    assert "b" in engine.state.running
    engine.inbox.put(Submit(request("i", [2] * 4, 2, Lane.INTERACTIVE, "y", 1.0, ignore_eos=True)))
    events = [event for _ in range(2) for event in engine.step()]
    assert any(event.request_id == "i" and event.tokens for event in events)


def test_prefix_hits_are_reported_and_keyed_by_adapter():
    config = CoreConfig(num_pages=60, block_size=4, max_seqs=4, max_model_len=64, token_budget=64)
    engine = make_engine(config)
    prompt = list(range(17))
    run_all(engine, [request("first", prompt)])
    again = run_all(engine, [request("again", prompt)], {})
    other = run_all(engine, [request("other", prompt, adapter_hash="a")], {})
    assert next(e for e in again if e.tokens).num_cached == 16
    assert next(e for e in other if e.tokens).num_cached == 0
    assert tokens_of(again, "again") == expected_tokens(request("again", prompt), len(tokens_of(again, "again")))


@pytest.mark.parametrize(("shared", "cached"), [(False, 0), (True, 16)])
def test_what_one_tenant_asked_is_not_found_by_another_unless_they_share(shared, cached):
    config = CoreConfig(
        num_pages=60, block_size=4, max_seqs=4, max_model_len=64, token_budget=64, share_prefixes=shared
    )
    engine = make_engine(config)
    for tenant, expected in (("acme", 0), ("acme", 16), ("globex", cached), ("", cached), ("acme", 16)):
        asked = request(f"{tenant} {expected}", list(range(17)))._replace(tenant=tenant)
        events = run_all(engine, [asked], {})
        assert next(event for event in events if event.tokens).num_cached == expected


@pytest.mark.parametrize("shared", [False, True])
def test_a_prefix_is_found_only_with_the_salt_that_it_was_computed_with(shared):
    config = CoreConfig(
        num_pages=60, block_size=4, max_seqs=4, max_model_len=64, token_budget=64, share_prefixes=shared
    )
    engine = make_engine(config)
    shown = 16 if shared else 0
    asked = [("acme", "", 0), ("acme", "s", 0), ("acme", "s", 16), ("acme", "t", 0), ("acme", "", 16)]
    for number, (tenant, salt, expected) in enumerate([*asked, ("globex", "s", shown), ("globex", "s", 16)]):
        events = run_all(engine, [request(str(number), list(range(17)))._replace(tenant=tenant, cache_salt=salt)], {})
        assert next(event for event in events if event.tokens).num_cached == expected, (tenant, salt)


def test_answers_that_arrive_together_compute_the_full_pages_of_their_prompt_once():
    engine = make_engine(CoreConfig(num_pages=60, block_size=4, max_seqs=8, max_model_len=64, token_budget=12))
    names = ["0", "1", "2", "3"]
    events = run_all(engine, [request(name, list(range(17))) for name in names])
    found = [next(event for event in events if event.request_id == name and event.tokens) for name in names]
    assert sorted(event.num_cached for event in found) == [0, 16, 16, 16]


def test_no_tenant_and_salt_read_like_others():
    pairs = [("", ""), ("", "a"), ("a", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("", "a\0b"), ("a", "\0b")]
    realms = [realm_of(Request("r", (1,), SamplingParams(), tenant=one, cache_salt=salt)) for one, salt in pairs]
    assert len(set(realms)) == len(pairs)


def test_no_adapter_and_tenant_read_like_others():
    pairs = [(None, ""), (None, "a"), ("a", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("1:a", "b"), ("a", "1:b")]
    assert len({root_key(*pair) for pair in pairs}) == len(pairs)


def test_long_prompts_are_chunked_beside_decodes():
    config = CoreConfig(num_pages=100, block_size=4, max_seqs=4, max_model_len=128, token_budget=8)
    engine = make_engine(config)
    engine.inbox.put(Submit(request("short", [1], 30, ignore_eos=True)))
    engine.step()
    engine.inbox.put(Submit(request("long", [2] * 40, 4, arrival=1.0, ignore_eos=True)))
    for _ in range(5):
        events = engine.step()
        assert [e.request_id for e in events if e.tokens] == ["short"], "a decode waits for no other request's prompt"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_ids": ()}, "invalid_request"),
        ({"adapter_hash": "unknown"}, "model_not_found"),
        ({"params": SamplingParams(max_tokens=10_000)}, "context_length_exceeded"),
        ({"prompt_ids": (1,) * 40, "params": SamplingParams(max_tokens=20)}, "context_length_exceeded"),
    ],
)
def test_requests_that_can_never_run_are_refused(changes, code):
    config = CoreConfig(num_pages=8, block_size=4, max_seqs=4, max_model_len=64, token_budget=8)
    engine = make_engine(config)
    fields = {"id": "r", "prompt_ids": (1,), "params": SamplingParams()} | changes
    engine.inbox.put(Submit(Request(**fields)))
    (event,) = engine.step()
    assert event.finish_reason is FinishReason.ERROR
    assert event.refusal.code.value == code


def test_the_queue_is_bounded():
    config = CoreConfig(num_pages=8, block_size=4, max_seqs=1, max_model_len=16, token_budget=8, max_waiting=2)
    engine = make_engine(config)
    for i in range(3):
        engine.inbox.put(Submit(request(f"r{i}", [1], arrival=float(i))))
    refused = [e for e in engine.step() if e.refusal]
    assert [(e.request_id, e.refusal.code.value) for e in refused] == [("r2", "lane_queue_full")]


def test_an_interactive_request_does_not_wait_for_a_batch_prompt():
    config = CoreConfig(num_pages=100, block_size=4, max_seqs=4, max_model_len=128, token_budget=8)
    engine = make_engine(config)
    engine.inbox.put(Submit(request("batch", [2] * 100, 4, Lane.BATCH)))
    engine.step()
    engine.inbox.put(Submit(request("now", [1] * 8, 4, arrival=1.0, ignore_eos=True)))
    assert [e.request_id for e in engine.step() if e.tokens] == ["now"]


def test_batch_sequences_that_share_a_prefix_yield_their_pages():
    """None of them frees the shared pages by itself; all together they do."""
    config = CoreConfig(num_pages=12, block_size=4, max_seqs=8, max_model_len=44, token_budget=64)
    engine = make_engine(config)
    run_all(engine, [request("warm", [1] * 25, 1)])
    for i in range(2):
        engine.inbox.put(Submit(request(f"b{i}", [1] * 25, 8, Lane.BATCH, arrival=float(i), ignore_eos=True)))
    engine.step()
    assert len(engine.state.running) == 2
    engine.inbox.put(Submit(request("now", [2] * 36, 2, arrival=9.0, ignore_eos=True)))
    assert "now" in [e.request_id for e in engine.step() if e.tokens]
