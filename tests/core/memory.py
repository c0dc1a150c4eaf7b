"""Engines on simulated memory, and what to ask of them: what a slot holds is known, so that a wrong read shows."""

from collections import Counter, deque
from dataclasses import replace
from zlib import crc32

from hypothesis import strategies as st

from engine.core.config import CoreConfig, LaneGoals, Scheduling
from engine.core.messages.commands import (
    Abort,
    AdapterFetched,
    AddAdapter,
    FetchCancelled,
    FetchFailed,
    GrammarReady,
    MaskReady,
    Submit,
)
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import ErrorCode, Lane, Refusal, Request, SamplingParams
from engine.core.watch.check import leftovers, violations
from engine.executor.fake import FakeExecutor, FakeSampler, num_alike
from lab.sim.baselines import AS_SERVED, Mode, engine_under

FAULTS = [Refusal(code, "it failed") for code in (ErrorCode.INVALID_GRAMMAR, ErrorCode.MODEL_OUTPUT_INVALID)]
"""Why a request's step may fail."""
ADAPTERS = {"a": 1, "b": 2, "c": 5}
"""Their pages, and their bytes packed."""
GRAMMARS = [Grammar(GrammarKind.REGEX, text) for text in ("x", "y", "z")]


class MemoryExecutor(FakeExecutor):
    """Also simulates the memory: what a slot holds is the prefix that was computed into it, and reads are checked.

    Fetches are under way until the test answers them, unless they are answered at once."""

    def __init__(self, config, vocab_size=50, at_once=True, overlaps=False, forces=None):
        super().__init__(vocab_size, overlaps=overlaps)
        self.forces = forces
        """Function of a request's name and known tokens -> the tokens that its grammar forces. None: it has none."""
        self.size, self.draft_size = config.block_size, config.draft_block
        self.slots = {}
        self.host = {}
        self.resident = {}
        self.at_once = at_once
        self.host_bytes = config.host_adapter_bytes
        self.packed = set()
        self.fetching = {}
        """Adapter -> whether it has been called off."""
        self.preparing, self.prepared = set(), set()
        self.written, self._writes = [], deque()
        """(host page, what it holds) that a mover has written since the last plan was submitted; and those before each
        plan under way, whose copies come after them."""
        self.failing = set()
        """Requests whose grammars can be followed no further."""
        self.slow, self.unready = set(), set()
        """Requests with slow masks, and those of them whose next mask is not there."""
        self.masking = {}
        """Request -> what the executor knew of it when a plan began its mask, which the test answers."""

    def submit(self, plan):
        for load in plan.adapters.loads:
            assert load.adapter_hash in self.packed, "a load of an adapter that is not in host memory"
        self._writes.append(self.written)
        self.written = []
        for name in plan.grammars.masks:
            assert name not in self.masking, "a mask is begun twice"
            self.masking[name] = self.sequences[name]
        return super().submit(plan)

    def tell_mask(self, name, kind):
        """Answer a mask. It is of no use to a request that was released meanwhile, even if it runs again."""
        if self.sequences.get(name) is self.masking.pop(name):
            self.unready.discard(name)
        self.report(kind(name, 0.002) if kind is MaskReady else kind(name, 0.002, "too large"))

    def compute(self, plan):
        self.host.update(self._writes.popleft() if self._writes else [])
        for page, host_page in plan.saves:
            self.host[host_page] = [self.slots[page, i] for i in range(self.size)]
        forked = [self._page(source) for source, _ in plan.forks]
        for (_, page), held in zip(plan.forks, forked, strict=True):
            self.slots.update({(page, i): one for i, one in enumerate(held)})
        for adapter_hash in plan.adapters.evicted:
            del self.resident[adapter_hash]
        for load in plan.adapters.loads:
            self.resident[load.adapter_hash] = load.pages
            self.slots.update({(page, i): load.adapter_hash for page in load.pages for i in range(self.size)})
        for page, host_page in plan.restores:
            self.slots.update({(page, i): held for i, held in enumerate(self.host[host_page])})
        self.unready.difference_update(plan.released)
        again = {one.request_id for one in plan.admitted if len(one.tokens) > one.num_prompt}
        self.unready |= again & self.slow
        self.late = []
        result = super().compute(plan)
        sampled = Counter(s.request_id for s in result.sampled)
        for chunk in plan.chunks:
            self._compute(chunk, sampled[chunk.request_id])
        kept = tuple(one for one in result.sampled if one.request_id not in self.failing)
        failed = sampled.keys() & self.failing
        forced = {name: self.forces(name, self.sequences[name].tokens) for name in sampled} if self.forces else {}
        failed = tuple((name, FAULTS[crc32(name.encode()) % len(FAULTS)]) for name in failed)
        self.unready |= self.slow & {one.request_id for one in kept}
        masking = tuple(name for name in (*sampled, *self.late) if name in self.unready)
        more = {"failed": failed, "forced": tuple(forced.items()), "unsampled": tuple(self.late), "masking": masking}
        return replace(result, sampled=kept, **more)

    def _sample(self, chunk):
        """A request whose mask is not there gets no token, and nor does the step after it that was planned ahead."""
        name, known = chunk.request_id, self.sequences[chunk.request_id].tokens
        if name not in self.unready and chunk.start + chunk.num_tokens <= len(known) + len(chunk.proposals):
            return super()._sample(chunk)
        self.late.append(name)
        return []

    def _page(self, page):
        return [self.slots.get((page, i)) for i in range(self.size)]

    def fetch(self, plan):
        self.packed.difference_update(plan.adapters.dropped)
        for adapter_hash in plan.adapters.cancelled:
            assert self.fetching.get(adapter_hash) is not True, "called off twice"
            if adapter_hash in self.fetching:
                self.fetching[adapter_hash] = True
        for fetch in plan.adapters.fetches:
            self.begin(fetch.adapter_hash)
        while self.at_once and self.fetching:
            self.answer(next(iter(self.fetching)), AdapterFetched)

    def prepare(self, plan):
        for grammar in plan.grammars.forgotten:
            assert grammar in self.preparing | self.prepared, "forgotten without need"
            self.preparing.discard(grammar)
            self.prepared.discard(grammar)
        for grammar in plan.grammars.prepared:
            assert grammar not in self.preparing | self.prepared, "prepared twice"
            self.preparing.add(grammar)
        for admission in plan.admitted:
            assert admission.params.grammar in (None, *self.prepared), "admitted before its grammar is ready"
        while self.at_once and self.preparing:
            self.tell(next(iter(self.preparing)), GrammarReady)

    def tell(self, grammar, kind):
        self.preparing.discard(grammar)
        self.prepared.add(grammar)
        self.report(kind(grammar) if kind is GrammarReady else kind(grammar, "too large"))

    def begin(self, adapter_hash):
        assert adapter_hash not in self.fetching and adapter_hash not in self.packed, "fetched twice"
        self.fetching[adapter_hash] = False
        held = self.packed | self.fetching.keys()
        assert sum(ADAPTERS.get(name, 0) for name in held) <= self.host_bytes, "host memory is overcommitted"

    def answer(self, adapter_hash, kind):
        del self.fetching[adapter_hash]
        if kind is AdapterFetched:
            self.packed.add(adapter_hash)
        more = {AdapterFetched: (0.001,), FetchFailed: ("it is gone",), FetchCancelled: ()}[kind]
        self.report(kind(adapter_hash, *more))

    def _draft(self, ask):
        seq = self.sequences[ask.request_id]
        right = num_alike(seq.held, seq.tokens)
        drafted = super()._draft(ask)
        assert len(drafted.tokens) == ask.guesses, "the draft model lacks more tokens than was planned for"
        for position in range(drafted.num_held):
            slot = seq.draft_pages[position // self.draft_size], position % self.draft_size
            held = "draft", seq.admission.adapter_hash, tuple(seq.held[: position + 1])
            assert position >= right or self.slots[slot] == held, "the draft model reads KV that is not its own"
            self.slots[slot] = held
        return drafted

    def _compute(self, chunk, num_sampled):
        seq = self.sequences[chunk.request_id]
        adapter_hash = seq.admission.adapter_hash
        known = [*seq.tokens[: len(seq.tokens) - num_sampled], *chunk.proposals]
        end = chunk.start + chunk.num_tokens
        if end > len(known):
            assert chunk.request_id in self.late, "an unknown token was computed"
            self.slots[seq.pages[(end - 1) // self.size], (end - 1) % self.size] = "made of nothing"
            return
        assert chunk.samples == (end == len(known))
        for position in range(chunk.start, end):
            self.slots[seq.pages[position // self.size], position % self.size] = (
                adapter_hash,
                tuple(known[: position + 1]),
            )
        for position in range(end):
            held = self.slots[seq.pages[position // self.size], position % self.size]
            assert held == (adapter_hash, tuple(known[: position + 1])), "a sequence reads KV that is not its own"
        for page in self.resident.get(adapter_hash, ()):
            assert self.slots[page, 0] == adapter_hash, "an adapter's pages were overwritten"
        assert adapter_hash is None or adapter_hash in self.resident


def make_engine(config, mode=AS_SERVED, **options):
    ticks = iter(range(10**9))
    return engine_under(mode, config, MemoryExecutor(config, **options), clock=lambda: next(ticks) * 1e-3)


def added(adapter_hash, pages=None):
    return AddAdapter(
        adapter_hash, pages or ADAPTERS[adapter_hash], num_bytes=ADAPTERS.get(adapter_hash, 0), path=adapter_hash
    )


def expected_tokens(request, count, vocab_size=50):
    sampler, tokens = FakeSampler(request.adapter_hash, request.params.seed, request.prompt_ids), []
    for _ in range(count):
        tokens.append(sampler.sample(vocab_size))
        sampler.add(tokens[-1])
    return tokens


goals = st.builds(LaneGoals, ttft_s=st.just(0.05), itl_s=st.sampled_from([0.001, 0.01]))
schedulings = st.builds(
    Scheduling,
    preemption=st.sampled_from(["recompute", "swap", "checkpoint"]),
    checkpoint_pages=st.integers(1, 4),
    min_chunk=st.integers(1, 4),
    adapter_age_s=st.sampled_from([0.0, 0.01]),
    hold_s=st.sampled_from([0.005, 300.0]),
    watermark=st.sampled_from([0.0, 0.2]),
)
modes = st.builds(
    Mode,
    scheduler=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    policy=st.sampled_from(["lanes", "lanes", "lanes", "fcfs", "sjf", "priority"]),
    window_s=st.just(0.002),
)
"""The policies that lab compares with the engine's own: plans keep the core's rules under any."""
configs = st.builds(
    CoreConfig,
    host_pages=st.sampled_from([0, 3, 6, 12]),
    interactive=goals,
    scheduling=schedulings,
    num_pages=st.integers(12, 40),
    block_size=st.sampled_from([1, 2, 4]),
    max_seqs=st.integers(1, 5),
    max_model_len=st.just(48),
    token_budget=st.integers(5, 20),
    max_resident_adapters=st.integers(1, 3),
    min_kv_pages=st.sampled_from([0, 0, 4]),
    max_adapter_pages=st.sampled_from([0, 0, 5, 7]),
    host_adapter_bytes=st.sampled_from([5, 6, 7, 100]),
    max_fetches=st.integers(1, 3),
    prefetch_window=st.integers(1, 4),
    fetch_backoff_s=st.sampled_from([0.0, 0.01]),
    max_preparations=st.integers(1, 2),
    grammar_bytes=st.sampled_from([1, 100 << 20]),
    max_waiting=st.just(1000),
    eos_token_ids=st.just((7,)),
    prefix_caching=st.booleans(),
)
# Few distinct tokens and a shared head, so that prefixes meet.
prompts = st.tuples(st.integers(0, 8), st.lists(st.integers(0, 1), min_size=1, max_size=10)).map(
    lambda p: (*([0] * p[0]), *p[1])
)

arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),
        prompts,
        st.integers(1, 16),
        st.sampled_from([None, *ADAPTERS]),
        st.sampled_from(Lane),
        st.booleans(),
        st.sampled_from([None, None, None, 1, 3, 9]),
    ),
    min_size=1,
    max_size=10,
)
"""Requests r0, r1, ...: (step of the arrival, prompt, max_tokens, adapter, lane, ignore_eos, steps until an abort)."""


def serve(config, arrivals, **options):
    """Run `arrivals`, checking the state between any two steps; return their events and the engine's counters."""
    engine = make_engine(config, **options)
    for adapter_hash in ADAPTERS:
        engine.inbox.put(added(adapter_hash))
    events, step = [], 0
    while engine.state.has_work or engine.inbox._commands or step <= 24:
        for number, (begin, prompt, max_tokens, adapter_hash, lane, ignore_eos, aborted) in enumerate(arrivals):
            if step == begin:
                params = {"ignore_eos": ignore_eos, "seed": 3}
                asked = request(f"r{number}", prompt, max_tokens, lane, adapter_hash, begin / 1000, **params)
                engine.inbox.put(Submit(asked))
            if aborted is not None and step == begin + aborted:
                engine.inbox.put(Abort(f"r{number}"))
        events += engine.step()
        assert violations(engine.state) == []
        step += 1
        assert step < 3000
    assert leftovers(engine.state) == []
    assert engine.executor.sequences.keys() <= set(engine.state.steps.released)
    assert engine.state.counters.generated_tokens == sum(len(event.tokens) for event in events)
    return events, engine.state.counters


def told(events, name):
    """Return a request's tokens, and how it ended."""
    ends = [event.finish_reason for event in events if event.request_id == name and event.finish_reason]
    return tokens_of(events, name), *ends


def check_alike(arrivals, plain, others):
    """Compare the events of two ways to serve `arrivals`; those of aborted requests as far as both went."""
    for number, (*_, aborted) in enumerate(arrivals):
        (expected, reason), (found, other_reason) = (told(events, f"r{number}") for events in (plain, others))
        if aborted is None:
            assert (found, other_reason) == (expected, reason)
        else:
            assert all(one == other for one, other in zip(expected, found, strict=False))


def run_all(engine, requests, adapters=ADAPTERS):
    for adapter_hash, pages in adapters.items():
        engine.inbox.put(added(adapter_hash, pages))
    for request in requests:
        engine.inbox.put(Submit(request))
    events = []
    while engine.state.has_work or engine.inbox._commands:
        events += engine.step()
        assert len(events) < 100_000
    return events


def run(engine, *requests):
    """Submit requests, and run the engine until all have ended; returns the events."""
    events = []
    for one in requests:
        engine.inbox.put(Submit(one))
    while engine.state.has_work or engine.inbox._commands:
        events += engine.step()
        assert violations(engine.state) == []
    return events


def tokens_of(events, name):
    return [token for event in events if event.request_id == name for token in event.tokens]


def request(name, prompt, max_tokens=8, lane=Lane.INTERACTIVE, adapter_hash=None, arrival=0.0, **params):
    return Request(name, tuple(prompt), SamplingParams(max_tokens, **params), adapter_hash, lane, arrival=arrival)
