"""Answers that follow a grammar: a tiny model of random weights, which left to itself writes noise."""

import json
import random
import threading
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import regex as patterns
import torch
from grammar_model import EOS, byte_tokenizer, save_byte_model
from llguidance import LLParserLimits

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Abort, GrammarFailed, GrammarReady, Submit
from engine.core.messages.grammar import Grammar, GrammarKind, allowed_tokens
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Request, SamplingParams
from engine.core.messages.step import SampledToken
from engine.core.plan import proposals
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.grammar_check.job import THREAD_STACK_BYTES, WorkerLimits
from engine.grammar_check.source import MAX_CHARACTERS
from engine.model.grammar import cache as grammar_cache
from engine.model.grammar import row as grammar_row
from engine.model.grammar.cache import GrammarCache
from engine.model.grammar.compiler import Compiler, Unproven
from engine.model.grammar.matchers import GrammarRoom
from engine.model.grammar.row import MOST_FORCED
from engine.model.memory.arena import PageUses
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.submitted import Outputs, SubmittedStep
from engine.model.sample.masks import TokenMasks, num_words, pack_bits
from engine.model.sample.slot_sampler import HostSample
from tests.schemas import check, random_schema

VOCAB = 270
BYTES = byte_tokenizer()
SQL = 'root ::= "SELECT " column " FROM t" where?\ncolumn ::= "a" | "b"\nwhere ::= " WHERE " column "=" [0-9]{1,3}'
LARK = 'start: greeting ", " NAME "!"\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]{2,5}/'


def regex(text):
    return Grammar(GrammarKind.REGEX, text)


def schema(document):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(document))


def free(text):
    return Grammar(GrammarKind.CONTEXT_FREE, text)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


class SteppedEngine:
    """An engine around the model, in fp32."""

    def __init__(self, model, overlaps=False, **core):
        sizes = {"num_pages": 400, "max_seqs": 16, "token_budget": 64, "block_size": 16} | core
        shared = {name: sizes[name] for name in ("num_pages", "max_seqs", "token_budget", "block_size")}
        shared["speculation"] = "auto" if sizes.get("speculation") else "off"
        self.runner = ModelRunner(load(EngineConfig(str(model), dtype="float32", device="cpu", threads=1, **shared)))
        self.runner.overlaps = overlaps
        state = EngineState.create(CoreConfig(max_model_len=512, eos_token_ids=(EOS,), **sizes))
        self.engine = Engine(state, self.runner)
        self.tokens, self.logprobs, self.ends = {}, {}, {}

    def ask(self, name, grammar=None, prompt=b"once", lane=Lane.INTERACTIVE, **params):
        self.tokens[name], self.logprobs[name] = [], []
        params = {"max_tokens": 400, "seed": len(self.tokens)} | params
        prompt = tuple(BYTES.encode(prompt.decode()).ids)
        params = SamplingParams(grammar=grammar, **params)
        self.engine.inbox.put(Submit(Request(name, prompt, params, lane=lane, arrival=self.engine.clock())))
        return name

    def step(self):
        """Step, and return the events."""
        events = self.engine.step()
        for event in events:
            self.tokens[event.request_id] += event.tokens
            self.logprobs[event.request_id] += event.logprobs
            if event.finish_reason is not None:
                self.ends[event.request_id] = event
        return events

    def finish(self):
        while self.engine.state.has_work or self.engine.inbox._commands:
            if not self.step() and self.engine.state.steps.in_flight.is_empty:
                self.engine.inbox.wait(0.01)
                self.engine.inbox._arrived.clear()
        assert violations(self.engine.state) == leftovers(self.engine.state) == []
        return self

    def text(self, name):
        return BYTES.decode([token for token in self.tokens[name] if token != EOS])

    def answer(self, grammar, **params):
        """(text, why it ended) of one request."""
        name = self.ask(f"r{len(self.tokens)}", grammar, **params)
        return self.finish().text(name), self.ends[name].finish_reason


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def stepped(byte_model, request):
    """Also with steps that are planned while the one before is computed."""
    return SteppedEngine(byte_model, overlaps=request.param)


def test_random_schemas_at_temperature_one(stepped):
    rng = random.Random(5)
    schemas = {stepped.ask(f"schema-{i}", schema(s)): s for i in range(40) if (s := random_schema(rng))}
    stepped.finish()
    for name, wanted in schemas.items():
        check(stepped.text(name), wanted)
        assert stepped.ends[name].finish_reason is FinishReason.STOP
    assert len({stepped.text(name) for name in schemas}) > 30


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (regex(r"[a-f0-9]{8}(-[a-f0-9]{4}){3}"), r"[a-f0-9]{8}(-[a-f0-9]{4}){3}"),
        (regex(r"\p{Greek}{3}é?"), None),
        (free('start: "yes" | "no" | "dunno\\n\\"é😀\\""'), r'yes|no|dunno\n"é😀"'),
        (free(LARK), r"(hello|bye), [A-Z][a-z]{2,5}!"),
        (free(SQL), r"SELECT [ab] FROM t( WHERE [ab]=[0-9]{1,3})?"),
    ],
)
@pytest.mark.parametrize("shaping", [{}, {"temperature": 0.0}, {"top_p": 0.3, "top_k": 4, "repetition_penalty": 1.8}])
def test_other_grammars(stepped, grammar, pattern, shaping):
    text, reason = stepped.answer(grammar, **shaping)
    assert patterns.fullmatch(pattern or grammar.text, text), text
    assert reason is FinishReason.STOP


def test_answers_are_the_same_with_proposals(byte_model):
    """Forced tokens and repetitions are proposed, also beyond `min_tokens`, where a grammar ends, and of all kinds."""
    rng = random.Random(7)
    grammars = [schema(document) for _ in range(14) if (document := random_schema(rng))]
    grammars += [regex("(some[ab]thing ){3,9}"), free(SQL), free(LARK)]
    asked = [
        {"grammar": grammar, "temperature": (0.0, 0.8)[i % 2], "min_tokens": 5} for i, grammar in enumerate(grammars)
    ]
    answers = []
    for speculation in (False, True):
        stepped = SteppedEngine(byte_model, speculation=speculation)
        with patch.object(
            proposals, "_worthwhile", lambda state, guesses, *_: {seq: len(g.tokens) for seq, g in guesses.items()}
        ):
            for number, params in enumerate(asked):
                stepped.ask(f"r{number}", seed=number, **params)
                if number % 5 == 4:  # few at a time, as steps with proposals have
                    stepped.finish()
            stepped.finish()
        answers.append(stepped.tokens)
    assert answers[0] == answers[1]
    counters = stepped.engine.state.counters
    assert counters.proposed_tokens > counters.accepted_tokens > 0.2 * counters.generated_tokens


def test_guesses_do_not_use_up_a_requests_limits(byte_model):
    """The automaton has a state for every history of 20 letters, and may have 1,000 states."""
    limits = LLParserLimits(max_lexer_states=1000)
    params = SamplingParams(grammar=regex("(.*a.{20}){5}"))
    answer, rng = random.Random(1), random.Random(2)
    letters = BYTES.encode("abc").ids
    with patch("engine.model.grammar.compiler.LIMITS", limits):
        lengths = []
        for guesses in (0, 12):
            room = speculating_room(byte_model)
            room.prepare([], [params.grammar])
            room.add("r", params, (70,), 1)
            answer.seed(1)
            length = 0
            while length < 400:
                room.masks(["r"] * (1 + guesses), {"r": tuple(rng.choices(letters, k=guesses))} if guesses else {})
                if room.advance([SampledToken("r", answer.choice(letters))]):
                    break
                length += 1
            lengths.append(length)
    assert lengths[0] == lengths[1] < 400


def test_an_answer_may_be_cut_short(stepped):
    text, reason = stepped.answer(regex("[a-z]{50}"), max_tokens=7)
    assert reason is FinishReason.LENGTH and text.isalpha() and 7 <= len(text) <= 21


def test_min_tokens_count_as_long_as_the_grammar_has_more(stepped):
    name = stepped.ask("long", regex("a*"), min_tokens=9)
    stepped.finish()
    assert len(stepped.tokens[name]) > 9 and set(stepped.text(name)) == {"a"}
    assert stepped.answer(free('start: "yes"'), min_tokens=9) == ("yes", FinishReason.STOP)


def test_no_bias_brings_back_what_is_forbidden(stepped):
    bias = ((EOS, 100.0), (BYTES.token_to_id("z"), 100.0), (BYTES.token_to_id("b"), 50.0))
    assert stepped.answer(regex("[ab]{6}"), logit_bias=bias)[0] == "b" * 6


def test_logprobs_are_the_models_own(stepped):
    """Not those of what the grammar left: an allowed token is one of many to the model."""
    name = stepped.ask("probable", regex("[0-9]{4}"), logprobs=3, temperature=0.0)
    stepped.finish()
    first = stepped.logprobs[name][0]
    assert first.logprob < first.top[0][1] and first.top[0][0] != stepped.tokens[name][0]


def test_stop_tokens_end_a_grammars_answer_too(stepped):
    text, reason = stepped.answer(regex("[ab]{200}"), stop_token_ids=(BYTES.token_to_id("b"),), seed=3)
    assert reason is FinishReason.STOP and len(text) < 200 and text.endswith("b")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("(["), "unclosed character class"),
        (schema({"type": "foo"}), "Invalid type: foo"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (schema({"$ref": "#/nowhere"}), "does not exist"),
        (schema({"$ref": "https://example.com/schema.json"}), "does not fetch"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":'), "not a JSON document"),
        (Grammar(GrammarKind.JSON_SCHEMA, '[{"type": "object"}]'), "must be a JSON object"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"properties":{"x":' * 2000 + "{}" + "}}" * 2000), "recursion"),
        (free("start: nowhere"), "unknown name"),
        (free("root := x"), "Expected ::="),
        (free("root ::= " + "(" * 20_000), "recursion"),
        (regex("a" * (MAX_CHARACTERS + 1)), f"may be {MAX_CHARACTERS}"),
        (schema({"enum": [f"{i * 7919 % 10007}" * 2 for i in range(4000)]}), None),
        (regex("((a{1000}){1000}){1000}"), None),
    ],
)
def test_what_is_none_or_too_much_is_refused(stepped, grammar, why):
    name = stepped.ask(f"refused-{len(stepped.tokens)}", grammar, max_tokens=20)
    refusal = stepped.finish().ends[name].refusal
    if why is None:  # large, and either followed or refused
        assert refusal is None or refusal.code.value == "invalid_grammar"
    else:
        assert refusal.code.value == "invalid_grammar" and why in refusal.message


def hostile_chain(length):
    return free("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(length)) + f'\na{length}: "x"')


@pytest.mark.parametrize("stepped", [True], ids=["ahead"], indirect=True)  # no step ever sees what is refused
@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (schema({"const": -9223372036854775808}), "crash"),
        (schema({"enum": [-9223372036854775807]}), "crash"),
        (schema({"type": "integer", "minimum": -1e30, "maximum": -1e29}), "crash"),
        (schema({"allOf": [{"type": "integer"}, {"enum": [-1e308]}]}), "crash"),
        (hostile_chain(3000), "crash"),
        (schema({"allOf": [{"type": "string", "pattern": f"^.*a.*{i}$"} for i in range(200)]}), "more than"),
        (schema({"type": "integer", "multipleOf": 1_000_003}), "more than"),
        (schema({"allOf": [{"multipleOf": 99_991}, {"multipleOf": 99_989}]}), "more than"),
    ],
)
def test_what_would_kill_or_stall_the_engine_is_refused(stepped, grammar, why):
    """Requests beside it end as they would have, and so does the next with a grammar."""
    hostile = stepped.ask(f"hostile-{len(stepped.tokens)}", grammar, max_tokens=20)
    beside = stepped.ask(f"beside-{len(stepped.tokens)}", regex("[0-9]{12}"))
    stepped.finish()
    assert stepped.ends[hostile].refusal.code.value == "invalid_grammar"
    assert why in stepped.ends[hostile].refusal.message
    assert len(stepped.text(beside)) == 12


def test_a_grammar_that_becomes_too_much_spoils_only_the_request_that_made_it_so(stepped):
    """Its automaton has a state for every history of 200 characters, and may have 1,000 states."""
    hostile = regex("(.*a.{200}){5}")
    for attempt in range(2):
        name = stepped.ask(f"hostile-{attempt}", hostile, logit_bias=((BYTES.token_to_id("a"), 3.0),))
        beside = stepped.ask(f"beside-{attempt}", regex("[0-9]{12}"))
        with patch("engine.model.grammar.compiler.LIMITS", LLParserLimits(max_lexer_states=1000)):
            stepped.finish()
        assert len(stepped.text(beside)) == 12
        assert len(stepped.tokens[name]) > 5


def test_rows_without_a_grammar_are_the_same_beside_any(byte_model):
    """Bit for bit: greedy, drawn, filtered and penalised ones, and their logprobs."""
    shapes = (
        {"temperature": 0.0},
        {},
        {"top_p": 0.8, "top_k": 20},
        {"temperature": 0.7, "frequency_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": ((70, 1.0),)},
    )

    def run(*grammars):
        stepped = SteppedEngine(byte_model)
        for number, one in enumerate(grammars):
            stepped.ask(f"grammar-{number}", one)
        for _ in range(20):
            stepped.step()
        names = [stepped.ask(f"free-{i}", seed=i, logprobs=4, max_tokens=30, **s) for i, s in enumerate(shapes)]
        stepped.finish()
        return [(stepped.tokens[name], stepped.logprobs[name]) for name in names]

    same_shape = [None] * 3  # as many rows beside them: products of matrices round by their shapes
    assert run(regex("a{300}"), regex("[ab]{300}"), schema({"type": "object"})) == run(*same_shape)


def test_the_preempted_go_on_as_if_nothing_had_been(byte_model):
    """Batch requests whose pages are taken again and again, against the same ones undisturbed. Greedy ones, kept from
    repeating themselves: between drawn tokens rounding decides now and then."""
    shaping = {"lane": Lane.BATCH, "max_tokens": 55, "temperature": 0.0, "frequency_penalty": 0.5}
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 15}
    grammars = [
        schema({"type": "object", "properties": {"all": numbers}, "required": ["all"]}),
        regex("[a-z]{20}[A-Z]{30}"),
    ] * 2

    def run(disturbed, **core):
        stepped = SteppedEngine(byte_model, **core)
        names = [stepped.ask(f"b{i}", one, **shaping) for i, one in enumerate(grammars)]
        for number in range(12):
            for _ in range(6):
                stepped.step()
            if disturbed:
                stepped.ask(f"person-{number}", prompt=b"x" * 30, max_tokens=4, ignore_eos=True)
        stepped.finish()
        return [stepped.tokens[name] for name in names], stepped.engine.state.counters.preemptions

    undisturbed, none = run(False, block_size=4)
    resumed, preemptions = run(True, block_size=4, num_pages=24, max_seqs=4)
    assert none == 0 < preemptions
    assert resumed == undisturbed and len({*map(tuple, resumed)}) == 2


class Held:
    """A compiler that waits for leave with grammars named so, and counts."""

    def __init__(self, compiler):
        self.compiler, self.leave, self.count = compiler, threading.Event(), Counter()

    def close(self):
        self.compiler.close()

    def compile(self, grammar):
        self.count[grammar] += 1
        if grammar.text.startswith("held"):
            assert self.leave.wait(30)
        return self.compiler.compile(grammar)


@pytest.fixture
def held(byte_model, monkeypatch):
    made = []

    def hold(*args, **options):
        made.append(Held(Compiler(*args, **options)))
        return made[-1]

    monkeypatch.setattr("engine.model.runner.loading.Compiler", hold)
    stepped = SteppedEngine(byte_model)
    yield stepped, made[0]
    made[0].leave.set()


def test_a_grammar_that_takes_long_to_prepare_holds_no_other_request_up(held):
    """While both threads are busy, requests without a grammar go on and requests for new grammars wait."""
    stepped, compiler = held
    assert stepped.answer(regex("ready[0-9]"))[1] is FinishReason.STOP
    slow = [stepped.ask(f"slow-{i}", regex(f"held{i}")) for i in range(3)]
    others = [stepped.ask("free", max_tokens=5, ignore_eos=True), stepped.ask("other", regex("[xy]{3}"), max_tokens=5)]
    for _ in range(30):
        stepped.step()
    assert "free" in stepped.ends and not {*slow, "other"} & stepped.ends.keys()
    compiler.leave.set()
    stepped.finish()
    assert [stepped.text(name) for name in slow] == ["held0", "held1", "held2"]
    assert others[1] in stepped.ends


def test_leaving_while_a_grammar_is_compiled(held):
    stepped, compiler = held
    names = [stepped.ask(f"leaves-{i}", regex(f"held{i}")) for i in range(3)]
    for _ in range(3):
        stepped.step()
    for name in names:
        stepped.engine.inbox.put(Abort(name))
    stepped.finish()
    assert {stepped.ends[name].finish_reason for name in names} == {FinishReason.ABORT}
    compiler.leave.set()
    assert stepped.answer(regex("held0"))[0] == "held0"
    assert compiler.count[regex("held0")] == 1
    assert compiler.count[regex("held2")] == 0


def test_compiled_grammars_are_kept_but_not_all(byte_model, monkeypatch):
    monkeypatch.setattr(grammar_cache, "KEPT", 2)
    compiler, answers = Held(Compiler(byte_model, VOCAB, (EOS,))), []
    arrived = threading.Semaphore(0)
    cache = GrammarCache(compiler, lambda answer: (answers.append(answer), arrived.release()))

    def use(*names):
        for name in names:
            cache.begin(regex(name))
            arrived.acquire()
        for name in names:
            cache.forget(regex(name))

    use("a", "b", "c", "d")
    use("d", "c", "a")
    assert compiler.count == {regex("a"): 2, regex("b"): 1, regex("c"): 1, regex("d"): 1}
    assert {type(answer) for answer in answers} == {GrammarReady}
    assert all(answer.num_bytes > 0 for answer in answers), "the core is told what each of them holds"
    use("(")
    use("(")
    assert compiler.count[regex("(")] == 1
    assert [type(answer) for answer in answers[-2:]] == [GrammarFailed] * 2


def test_a_grammar_that_could_not_be_checked_is_not_kept_as_refused(byte_model):
    """Its worker was killed from outside: the next request with it may find it sound."""
    compiler = Held(Compiler(byte_model, VOCAB, (EOS,)))
    compiler.compile(regex("warm"))
    real, verdicts = compiler.compiler.compile, [Unproven("a worker was killed")]
    compiler.compiler.compile = lambda grammar: real(grammar) if not verdicts else throw(verdicts.pop())
    arrived, answers = threading.Semaphore(0), []
    cache = GrammarCache(compiler, lambda answer: (answers.append(type(answer)), arrived.release()))
    for _ in range(2):
        cache.begin(regex("a"))
        arrived.acquire()
        cache.forget(regex("a"))
    assert answers == [GrammarFailed, GrammarReady]
    compiler.close()


def test_grammars_are_compiled_on_a_stack_of_known_size(byte_model, monkeypatch):
    start, sizes = threading.Thread.start, []
    monkeypatch.setattr(threading.Thread, "start", lambda self: (sizes.append(threading.stack_size()), start(self)))
    compiler, before = Held(Compiler(byte_model, VOCAB, (EOS,))), threading.stack_size()
    arrived = threading.Semaphore(0)
    cache = GrammarCache(compiler, lambda answer: arrived.release())
    cache.begin(regex("a"))
    arrived.acquire()
    assert sizes[0] == THREAD_STACK_BYTES == 4 * WorkerLimits().stack_bytes
    assert threading.stack_size() == before
    compiler.close()


def throw(error):
    raise error


def test_grammars_are_kept_by_what_they_hold(byte_model, monkeypatch):
    monkeypatch.setattr(grammar_cache, "KEPT_BYTES", 10)
    compiler = Held(Compiler(byte_model, VOCAB, (EOS,)))
    real = compiler.compiler.compile
    compiler.compiler.compile = lambda grammar: real(grammar)._replace(num_bytes=4)
    arrived = threading.Semaphore(0)
    cache = GrammarCache(compiler, lambda answer: arrived.release())
    for name in "abcda":
        cache.begin(regex(name))
        arrived.acquire()
        cache.forget(regex(name))
    assert compiler.count == {regex("a"): 2, regex("b"): 1, regex("c"): 1, regex("d"): 1}
    compiler.close()


def test_the_bytes_that_a_grammar_holds_are_measured(byte_model):
    compiler = Compiler(byte_model, VOCAB, (EOS,))
    large = schema({"enum": [f"{i * 7919 % 10007}" * 2 for i in range(4000)]})
    small, large = (compiler.compile(grammar).num_bytes for grammar in (regex("a+"), large))
    assert 0 < small < large < 64 << 20
    compiler.close()


def test_a_spent_grammar_is_compiled_again(byte_model):
    compiler = Held(Compiler(byte_model, VOCAB, (EOS,)))
    arrived = threading.Semaphore(0)
    room = GrammarRoom(compiler, VOCAB, (EOS,), lambda answer: arrived.release())
    params = SamplingParams(grammar=regex("[ab]+"))
    for round_ in range(2):
        room.prepare([params.grammar] * round_, [params.grammar])
        arrived.acquire()
        room.add("r", params, (70,), 1)
        assert room.advance([SampledToken("r", 99), SampledToken("other", 99)]).keys() == {"r"}
        room.remove("r")
    assert compiler.count[params.grammar] == 2


def speculating_room(folder):
    compiler = Compiler(folder, VOCAB, (EOS,), speculates=True)
    return GrammarRoom(compiler, VOCAB, (EOS,), lambda answer: None)


def test_masks_after_proposals_are_those_after_the_tokens(byte_model):
    """With `min_tokens` counted on, none after a token that is not allowed, and nothing of the request changed."""
    room = speculating_room(byte_model)
    params = SamplingParams(grammar=regex("(ab|ac)*"), min_tokens=3)
    room.prepare([], [params.grammar])
    room.add("r", params, (70,), 1)
    tokens = tuple(BYTES.encode("abac").ids)
    rows, alone = room.masks(["r"] * 5, {"r": tokens})[0].words, []
    for token in tokens:
        alone.append(room.masks(["r"])[0].words[0])
        room.advance([SampledToken("r", token)])
    alone.append(room.masks(["r"])[0].words[0])
    assert np.array_equal(rows, alone)
    assert (
        not (alone[2] & pack_bits(np.array([EOS]), VOCAB)).any()
        and (alone[4] & pack_bits(np.array([EOS]), VOCAB)).any()
    )
    wrong = (tokens[0], tokens[0], tokens[1])
    masks, kept, _ = room.masks(["r"] * 4, {"r": wrong})
    rows = masks.words
    assert kept == {"r": wrong[:1]}
    assert (rows[2:] == -1).all() and np.array_equal(rows[0], alone[4])


def test_proposals_of_a_slow_grammar_are_followed_no_further(byte_model):
    room = speculating_room(byte_model)
    params, tokens = SamplingParams(grammar=regex("[ab]*")), tuple(BYTES.encode("abab").ids)
    room.prepare([], [params.grammar])
    room.add("r", params, (70,), 1)
    with patch.object(grammar_row, "AHEAD_SECONDS", 0.0):
        assert room.masks(["r"] * 5, {"r": tokens})[1] == {"r": tokens[:1]}
    assert room.advance([SampledToken("r", token) for token in tokens[:2]]) == {}
    masks, kept, _ = room.masks(["r"] * 5, {"r": tokens})
    assert room.forced(["r"]) == ()
    assert kept == {"r": ()} and (masks.words[1:] == -1).all() and not (masks.words[0] == -1).all()


def test_what_followed_a_grammar_before_it_failed_in_a_step_is_kept(byte_model):
    room = speculating_room(byte_model)
    params, (a, b) = SamplingParams(grammar=regex("[ab]*")), BYTES.encode("ab").ids
    room.prepare([], [params.grammar])
    room.add("r", params, (70,), 1)
    tokens = [SampledToken(*one) for one in (("r", a), ("other", a), ("r", b), ("r", 99), ("r", a), ("other", 99))]
    step = SubmittedStep(Outputs(HostSample(tokens)), 0.0, 0.0, PageUses(()))
    assert step.read() == step.followed == tuple(tokens)
    step.failed = room.advance(tokens)
    assert step.failed.keys() == {"r"} and step.failed["r"].num_good == 2
    assert step.followed == (*tokens[:3], tokens[5])


def test_a_long_constant_is_computed_once(byte_model):
    """Its tokens are reported some at a time, and computed anew where others are sampled for the same text."""
    text = "x" + "0123456789" * 20
    room = speculating_room(byte_model)
    params = SamplingParams(grammar=regex(text))
    room.prepare([], [params.grammar])
    room.add("r", params, (70,), 1)
    tokens = tuple(BYTES.encode(text).ids)
    row = room._rows["r"]
    for start in range(3):
        assert room.forced(["r"]) == (("r", tokens[start : start + MOST_FORCED]),)
        assert len(row.forced) == len(tokens) - start
        room.advance([SampledToken("r", tokens[start])])
    row.forced[0] = 5
    room.advance([SampledToken("r", tokens[3])])
    assert not row.forced
    assert room.forced(["r"]) == (("r", tokens[4 : 4 + MOST_FORCED]),)


def test_the_text_that_a_grammar_leaves_no_choice_of_is_forced(byte_model):
    room = speculating_room(byte_model)
    params = SamplingParams(grammar=regex("x(only this|[0-9])y"))
    room.prepare([], [params.grammar])
    room.add("r", params, (70,), 1)
    room.add("free", SamplingParams(), (70,), 1)
    room.add("penalised", params._replace(frequency_penalty=0.5), (70,), 1)
    assert room.forced(["free", "penalised", "r", "unknown"]) == (("r", tuple(BYTES.encode("x").ids)),)
    room.advance([SampledToken("r", token) for token in BYTES.encode("x").ids])
    assert room.forced(["r"]) == ()
    room.advance([SampledToken("r", token) for token in BYTES.encode("o").ids])
    assert room.forced(["r"]) == (("r", tuple(BYTES.encode("nly thisy").ids)),)


def test_a_model_without_what_it_takes_says_so(tiny_llama, byte_model):
    for compiler in (Compiler(tiny_llama, 97, (2,)), Compiler(byte_model, VOCAB, ())):
        with pytest.raises(ValueError, match=r"no tokenizer\.json or no EOS"):
            compiler.compile(regex("a"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 32, 97, 270])
def test_masks_forbid_what_has_no_bit(vocab, dtype):
    rng = np.random.default_rng(vocab)
    allowed = [rng.choice(vocab, size=rng.integers(1, vocab), replace=False) for _ in range(3)]
    words = np.stack([pack_bits(ids, vocab) for ids in allowed])
    assert words.shape == (3, num_words(vocab)) and words.dtype == np.int32
    logits = torch.randn(5, vocab, dtype=dtype)
    scores = logits.clone()
    TokenMasks((1, 2, 4), words).apply(scores, (1, 2, 4))
    expected = logits.clone()
    for row, ids in zip((1, 2, 4), allowed, strict=True):
        expected[row, np.setdiff1d(np.arange(vocab), ids)] = -torch.inf
    assert torch.equal(scores, expected)


def test_a_sampler_is_left_what_a_room_does_not_see_to(byte_model):
    room = GrammarRoom(Compiler(byte_model, VOCAB, (EOS,)), VOCAB, (EOS,), lambda answer: None)
    plain = SamplingParams(min_tokens=4)
    assert room.add("plain", plain, (70,), 1) is plain
    assert room.masks(["plain"]) == (None, {}, ())
    room.remove("plain")
    guided = plain._replace(grammar=regex("a+"))
    room.prepare([], [guided.grammar])
    assert room.add("guided", guided, (70,), 1) == guided._replace(min_tokens=0)
    masks, _, _ = room.masks(["plain", "guided"])
    assert masks.rows == (1,) and masks.words.shape == (1, num_words(VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_only_allowed_tokens_are_chosen(stepped, temperature):
    """Nothing ends the answer unless its end is among them, as in vLLM."""
    for ids in ([98, 104, 111], [7], range(5, 255, 2)):
        name = stepped.ask(f"{ids} {temperature}", allowed_tokens(ids), temperature=temperature, max_tokens=20)
        stepped.finish()
        assert stepped.ends[name].finish_reason is FinishReason.LENGTH, stepped.ends[name].refusal
        assert len(stepped.tokens[name]) == 20 and {*stepped.tokens[name]} <= {*ids}
    names = [stepped.ask(f"end {seed} {temperature}", allowed_tokens([98, EOS]), temperature=3.0) for seed in range(5)]
    stepped.finish()
    assert all(stepped.tokens[name][-1] == EOS for name in names)
    assert {token for name in names for token in stepped.tokens[name]} == {98, EOS}


def test_tokens_that_are_none_cannot_be_allowed(stepped):
    name = stepped.ask("beyond", allowed_tokens([98, 10**6]), max_tokens=5)
    assert stepped.finish().ends[name].refusal.code is ErrorCode.INVALID_GRAMMAR
