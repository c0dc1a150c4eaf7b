"""Requests with grammars whose steps are planned ahead, on a device that computes later: as late as the host allows."""

import json
from collections import deque
from dataclasses import replace

import pytest
from grammar_model import EOS, byte_tokenizer, save_byte_model

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import FinishReason, Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.decode.decoder import StepOutput
from engine.model.grammar import mask_cost
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.sample.sampler import NO_PROPOSALS
from engine.model.steps.forward import Steps

BYTES = byte_tokenizer()
NUMBERS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 5}),
)
WORD = Grammar(GrammarKind.REGEX, "[a-f]{3}[0-9]{4}")
LONG = Grammar(GrammarKind.REGEX, "([a-z]{5} ){30}")
GREEDY = {"temperature": 0.0, "frequency_penalty": 0.5}
PARAMS = {
    "free": SamplingParams(24, temperature=0.0, ignore_eos=True, logprobs=2),
    "word": SamplingParams(30, **GREEDY, grammar=WORD, logprobs=1),
    "numbers": SamplingParams(60, **GREEDY, grammar=NUMBERS, min_tokens=20),
    "drawn": SamplingParams(30, temperature=1.1, top_k=30, seed=4, grammar=LONG),
    "filtered": SamplingParams(20, temperature=1.2, top_p=0.9, seed=5, ignore_eos=True),
    "cut": SamplingParams(7, **GREEDY, grammar=LONG),
    "stopped": SamplingParams(40, **GREEDY, grammar=LONG, stop_token_ids=tuple(BYTES.encode("bdfhjlnprtvxz").ids)),
    "aborted": SamplingParams(60, **GREEDY, grammar=LONG),
    "again": SamplingParams(30, **GREEDY, grammar=WORD),
}
ABORT_AFTER = 4
"""Tokens."""


class LateDevice:
    """Computes nothing before the host waits for it, or before memory that the host changes at once must be free. The
    journal has what the host did, in order: launched the logits of a step, launched its sampling, read its tokens."""

    def __init__(self):
        self.queue, self.journal = deque(), []

    def do(self, what, work):
        self.journal.append(what)
        later = Later(self, work)
        self.queue.append(later)
        return later

    def catch_up(self, until=None):
        while self.queue and not (until and until.is_done):
            self.queue.popleft().run()


class Later:
    """What the device computes once the host waits for it."""

    def __init__(self, device, work):
        self.device, self.work, self.is_done, self.value = device, work, False, None

    def run(self):
        self.value, self.is_done = self.work(), True

    def __getitem__(self, rows):
        """Some rows of logits, which the device takes when it gets there."""
        return Rows(self, rows)

    def to_host(self):
        self.device.journal.append("read")
        self.device.catch_up(until=self)
        return self.value.to_host()


class Rows:
    """Some rows of logits that the device computes later."""

    def __init__(self, logits, rows):
        self._logits, self._rows = logits, rows

    @property
    def value(self):
        return StepOutput(self._logits.value.logits[self._rows], None)


class LateSteps(Steps):
    def __init__(self, device, steps):
        super().__init__(steps._forward, steps._last_tokens)
        self._device = device

    def compute(self, batch, rung):
        later = self._device.do("logits", lambda: super(LateSteps, self).compute(batch, rung))
        return StepOutput(later, None)


class LateSampler:
    def __init__(self, device, sampler):
        self._device, self._sampler = device, sampler

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def add(self, *args):
        self._device.catch_up()
        self._sampler.add(*args)

    def remove(self, request_id):
        self._device.catch_up()
        self._sampler.remove(request_id)

    def start(self, logits, request_ids, masks=None, proposals=NO_PROPOSALS):
        what = "sample" if masks is None else "sample with masks"
        return self._device.do(what, lambda: self._sampler.start(logits.value.logits, request_ids, masks, proposals))


class SteppedEngine:
    def __init__(self, model, is_late, **core):
        sizes = {"num_pages": 200, "max_seqs": 10, "token_budget": 48, "block_size": 4} | core
        loaded = load(EngineConfig(str(model), dtype="float32", device="cpu", threads=1, **sizes))
        self.device = LateDevice() if is_late else None
        if is_late:
            steps, sampler = LateSteps(self.device, loaded.steps), LateSampler(self.device, loaded.sampler)
            loaded = replace(loaded, steps=steps, sampler=sampler)
        self.runner = ModelRunner(loaded)
        self.runner.overlaps = is_late
        core = CoreConfig(max_model_len=256, eos_token_ids=(EOS,), prefix_caching=False, **sizes)
        ticks = iter(range(10**9))
        self.engine = Engine(EngineState.create(core), self.runner, clock=lambda: next(ticks) / 1000)
        self.tokens, self.logprobs, self.ends = {}, {}, {}

    def ask(self, name, params, lane=Lane.INTERACTIVE):
        self.tokens[name], self.logprobs[name] = [], []
        prompt = tuple(BYTES.encode("once " + name).ids)
        self.engine.inbox.put(Submit(Request(name, prompt, params, lane=lane)))

    def prepare(self, grammar):
        """Have a grammar compiled, which takes a time of its own, so that both engines plan the same from then on."""
        self.ask(f"warm {grammar.text}", SamplingParams(1, grammar=grammar))
        self.finish()

    def step(self):
        """Step, and return the events."""
        events = self.engine.step()
        for event in events:
            assert event.request_id not in self.ends, "an event after the terminal one"
            self.tokens[event.request_id] += event.tokens
            self.logprobs[event.request_id] += event.logprobs
            if event.finish_reason is not None:
                self.ends[event.request_id] = event
        assert violations(self.engine.state) == []
        return events

    def finish(self):
        while self.engine.state.has_work or self.engine.inbox._commands:
            if not self.step() and self.engine.state.steps.in_flight.is_empty:
                self.engine.inbox.wait(0.01)
                self.engine.inbox._arrived.clear()
        assert leftovers(self.engine.state) == [] and len(self.runner._requests.batch) == 0
        assert self.runner.loaded.grammars._rows == {}


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


IN_BATCH = ("numbers", "drawn")


def serve(model, is_late, **core):
    """Serve all requests. Those of the batch lane have some tokens when the interactive ones come, and lose their
    places if there are few."""
    stepped = SteppedEngine(model, is_late, **core)
    for grammar in (NUMBERS, LONG, WORD):
        stepped.prepare(grammar)
    for name in IN_BATCH:
        stepped.ask(name, PARAMS[name], Lane.BATCH)
    while min(len(stepped.tokens[name]) for name in IN_BATCH) < ABORT_AFTER:
        stepped.step()
    for name in [name for name in PARAMS if name not in IN_BATCH]:
        stepped.ask(name, PARAMS[name])
    while len(stepped.tokens["aborted"]) < ABORT_AFTER:
        stepped.step()
    stepped.engine.inbox.put(Abort("aborted"))
    stepped.finish()
    return stepped


def check_alike(plain, other):
    assert {name: end.finish_reason for name, end in other.ends.items()} == {
        name: end.finish_reason for name, end in plain.ends.items()
    }
    for name in PARAMS.keys() - {"aborted"}:
        assert other.tokens[name] == plain.tokens[name], name
    assert other.tokens["aborted"][:ABORT_AFTER] == plain.tokens["aborted"][:ABORT_AFTER]


@pytest.mark.parametrize("core", [{}, {"num_pages": 30, "max_seqs": 4}], ids=["roomy", "preempted"])
def test_a_device_that_computes_later_says_what_one_says_that_computes_at_once(byte_model, core):
    plain, late = (serve(byte_model, is_late, **core) for is_late in (False, True))
    check_alike(plain, late)
    for name in ("free", "word"):
        assert len(late.logprobs[name]) == len(late.tokens[name])
        for one, other in zip(late.logprobs[name], plain.logprobs[name], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    reasons = [late.ends[name].finish_reason for name in ("word", "numbers", "cut", "stopped", "aborted")]
    assert reasons == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.ABORT,
    ]
    for stepped in (plain, late):
        assert bool(stepped.engine.state.counters.preemptions) == bool(core)


@pytest.mark.parametrize(("core", "is_late"), [({}, False), ({"num_pages": 30, "max_seqs": 4}, True)])
def test_slow_masks_say_what_quick_ones_say(byte_model, monkeypatch, core, is_late):
    plain = serve(byte_model, is_late=False, **core)
    monkeypatch.setattr(mask_cost, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(mask_cost, "ROW_SECONDS", 0.0)
    slow = serve(byte_model, is_late, **core)
    check_alike(plain, slow)
    assert slow.runner.loaded.grammars._thread._consumer is not None, "the thread has consumed the tokens"


def test_the_logits_of_a_step_are_launched_before_its_masks_wait_for_tokens(byte_model):
    stepped = SteppedEngine(byte_model, is_late=True)
    stepped.prepare(LONG)
    stepped.device.journal.clear()
    stepped.ask("r", SamplingParams(5, grammar=LONG))
    stepped.finish()
    first, ahead = ["logits", "sample with masks"], ["logits", "read", "sample with masks"]
    assert stepped.device.journal == first + 4 * ahead + ["read"]


def test_a_step_without_grammars_waits_for_no_token(byte_model):
    stepped = SteppedEngine(byte_model, is_late=True)
    stepped.ask("r", SamplingParams(3, ignore_eos=True))
    stepped.finish()
    assert stepped.device.journal == ["logits", "sample", *2 * ["logits", "sample", "read"], "read"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_grammar_that_can_go_no_further_ends_its_request_once(byte_model, is_late):
    """The step after the token that failed is under way already, and its row may hold any token."""
    stepped = SteppedEngine(byte_model, is_late)
    stepped.prepare(LONG)
    stepped.ask("r", SamplingParams(40, grammar=LONG))
    stepped.ask("other", SamplingParams(20, ignore_eos=True))
    while len(stepped.tokens["r"]) < 3:
        stepped.step()
    row = stepped.runner.loaded.grammars._rows["r"]
    row.matcher.consume_token(BYTES.encode("?").ids[0])
    assert row.matcher.is_error()
    stepped.finish()
    end = stepped.ends["r"]
    assert end.finish_reason is FinishReason.ERROR and end.refusal.message and end.tokens == ()
    assert len(stepped.tokens["other"]) == 20
    stepped.ask("r again", SamplingParams(40, grammar=LONG, temperature=0.0))
    stepped.finish()
    assert BYTES.decode(stepped.tokens["r again"])[5] == " ", "the grammar is prepared again"


def test_a_name_is_used_again_while_a_token_of_its_first_request_is_under_way(byte_model):
    stepped = SteppedEngine(byte_model, is_late=True)
    for grammar in (LONG, WORD):
        stepped.prepare(grammar)
    stepped.ask("r", SamplingParams(40, **GREEDY, grammar=LONG))
    stepped.ask("keeps grammars", SamplingParams(60, **GREEDY, grammar=WORD))
    while len(stepped.tokens["r"]) < 3:
        stepped.step()
    stepped.engine.inbox.put(Abort("r"))
    stepped.step()
    assert stepped.ends.pop("r").finish_reason is FinishReason.ABORT
    stepped.ask("r", SamplingParams(40, **GREEDY, grammar=WORD))
    stepped.finish()
    assert stepped.ends["r"].finish_reason is FinishReason.STOP
    alone = SteppedEngine(byte_model, is_late=False)
    alone.prepare(WORD)
    alone.ask("r", SamplingParams(40, **GREEDY, grammar=WORD))
    alone.finish()
    assert stepped.tokens["r"] == alone.tokens["r"]
