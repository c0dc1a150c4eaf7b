"""Requests that wait for a grammar: who goes on, what is prepared first, and what each of them is told."""

from dataclasses import replace

import pytest

from engine.core.commit.sequences import finish_reason
from engine.core.messages.commands import Abort, GrammarFailed, GrammarReady, Submit
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Refusal, Request, SamplingParams
from engine.core.state.grammars import LEAST_BYTES
from engine.core.state.sequence import Sequence
from engine.core.watch.check import leftovers, violations
from tests.core.memory import expected_tokens
from tests.core.virtual import SteppedEngine

TOO_MANY = Refusal(ErrorCode.INVALID_GRAMMAR, "too many states")


def grammar(name):
    return Grammar(GrammarKind.REGEX, name)


class School(SteppedEngine):
    """An engine whose grammars are compiled only when a test calls `ready`."""

    def __init__(self, **config):
        super().__init__(**config)
        self.asked = []
        self.executor.prepare = self._note

    def fail(self, *names):
        """From now on, no grammar of these requests can be followed any further."""
        collect = self.executor.collect

        def failing():
            result = collect()
            sampled = tuple(one for one in result.sampled if one.request_id not in names)
            failed = tuple((one.request_id, TOO_MANY) for one in result.sampled if one.request_id in names)
            return replace(result, sampled=sampled, failed=failed)

        self.executor.collect = failing

    def steps_of(self, name):
        """The numbers of the steps that compute a request."""
        return [
            number
            for number, plan in enumerate(self.executor.plans)
            if any(chunk.request_id == name for chunk in plan.chunks)
        ]

    def _note(self, plan):
        self.asked += [f"not {one.text}" for one in plan.grammars.forgotten]
        self.asked += [one.text for one in plan.grammars.prepared]

    def ask(self, name, text=None, lane=Lane.INTERACTIVE, max_tokens=2, prompt=20, **fields):
        follow = None if text is None else grammar(text)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=text is None, grammar=follow)
        prompt = tuple(range(len(self.times) + 5, len(self.times) + 5 + prompt))
        self.times[name] = []
        self.engine.inbox.put(Submit(Request(name, prompt, params, lane=lane, arrival=self.clock.now, **fields)))

    def ready(self, *texts, num_bytes=0):
        for text in texts:
            self.engine.inbox.put(GrammarReady(grammar(text), num_bytes))

    def steps(self, count=6):
        for _ in range(count):
            self.step()
            assert violations(self.state) == []


def test_those_behind_go_on():
    school = School()
    school.ask("first", "slow")
    school.ask("second")
    school.steps()
    assert school.ends.keys() == {"second"} and school.times["first"] == []
    school.ready("slow")
    school.steps()
    assert school.ends.keys() == {"first", "second"}
    assert leftovers(school.state) == []


def test_one_preparation_serves_all_who_need_it():
    school = School()
    for name in "abc":
        school.ask(name, "same")
    school.steps(3)
    assert school.asked == ["same"]
    school.ready("same")
    school.steps()
    assert school.ends.keys() == {"a", "b", "c"} and school.asked == ["same", "not same"]


def test_a_batch_leaves_room_for_people():
    school = School(max_preparations=2)
    for name in "abc":
        school.ask(name, f"batch {name}", Lane.BATCH)
    school.steps(2)
    assert school.asked == ["batch a"]
    school.ask("d", "person")
    school.ask("e", "another")
    school.steps(2)
    assert school.asked == ["batch a", "person"]
    school.ready("batch a")
    school.steps(1)
    assert school.asked[2:] == ["another"]


def test_requests_that_wait_in_vain_are_told_why():
    school = School()
    for name, text in (("a", "bad"), ("b", "bad"), ("c", "good")):
        school.ask(name, text)
    school.steps(1)
    school.engine.inbox.put(GrammarFailed(grammar("bad"), "it is no regex"))
    school.ready("good")
    school.steps()
    assert [school.reason(name) for name in "abc"] == ["invalid_grammar", "invalid_grammar", "length"]
    assert school.ends["a"].refusal.message == "it is no regex"
    assert leftovers(school.state) == []


def test_leaving_while_it_is_prepared():
    school = School()
    school.ask("a", "slow")
    school.ask("b", "never begun", Lane.BATCH)
    school.steps(1)
    for name in "ab":
        school.engine.inbox.put(Abort(name))
    school.steps(2)
    assert leftovers(school.state) == [] and not school.state.has_work
    school.ready("slow")  # too late to matter
    school.engine.inbox.put(GrammarFailed(grammar("slow"), "nor does this"))
    school.steps(2)
    assert "not slow" in school.asked and "not never begun" not in school.asked
    school.ask("c", "slow")
    school.steps(1)
    assert school.asked.count("slow") == 2
    assert school.times["c"] == []


def test_the_preempted_need_it_still():
    school = School(num_pages=8, max_seqs=2)
    school.ask("batch", "kept", Lane.BATCH, max_tokens=40, prompt=60)
    school.steps(1)
    school.ready("kept")
    school.steps(6)
    school.ask("person", None, prompt=60)
    school.steps(60)
    assert school.state.counters.preemptions and school.ends.keys() == {"batch", "person"}
    assert school.asked == ["kept", "not kept"]


def test_a_tenant_that_fills_the_memory_waits_and_its_neighbour_does_not():
    """The greedy tenant's grammars fill the memory; what else it wants waits until one of them is needed no more."""
    school = School(grammar_bytes=3 * LEAST_BYTES, max_preparations=9)
    for number in range(6):
        school.ask(f"greedy{number}", f"greedy{number}", max_tokens=30, tenant="greedy", weight=1000.0)
    school.steps(2)
    assert school.asked == ["greedy0", "greedy1", "greedy2"]
    school.ask("near1", "near1", tenant="near", weight=0.001)
    school.ask("near2", "near2", tenant="near", weight=0.001)
    school.steps(2)
    assert school.asked[3:] == ["near1"]
    school.ready("near1", "greedy0")
    school.steps(8)
    assert school.ends.keys() == {"near1"} and school.reason("near1") == "length"
    assert school.asked[4:] == ["not near1", "near2"]
    school.ready("near2")
    school.steps(30)
    assert school.ends.keys() == {"near1", "near2", "greedy0"} and "greedy3" in school.asked
    for number in range(1, 6):
        school.ready(f"greedy{number}")
        school.steps(40)
    assert len(school.ends) == 8 and leftovers(school.state) == []


def test_a_grammar_is_charged_with_what_it_holds():
    school = School(grammar_bytes=20 * LEAST_BYTES)
    school.ask("a", "large", max_tokens=9, tenant="one")
    school.steps(1)
    school.ready("large", num_bytes=20 * LEAST_BYTES)
    school.ask("b", "next", tenant="one")
    school.steps(2)
    assert school.asked == ["large"]
    assert school.state.grammars.memory.held("one") == 20 * LEAST_BYTES
    school.steps(12)
    assert school.ends.keys() == {"a"} and school.asked == ["large", "not large", "next"]


def test_a_grammar_of_two_tenants_is_charged_once():
    school = School(grammar_bytes=2 * LEAST_BYTES, max_preparations=9)
    school.ask("a", "shared", tenant="one")
    school.ask("b", "shared", tenant="two")
    school.ask("c", "own", tenant="two")
    school.steps(1)
    assert sorted(school.asked) == ["own", "shared"]
    assert school.state.grammars.memory.total == 2 * LEAST_BYTES


def test_batch_grammars_leave_half_of_the_memory_to_people():
    school = School(grammar_bytes=4 * LEAST_BYTES, max_preparations=9)
    for number in range(4):
        school.ask(f"batch{number}", f"batch{number}", Lane.BATCH, tenant="one")
    school.steps(1)
    assert school.asked == ["batch0", "batch1"]
    for number in range(3):
        school.ask(f"chat{number}", f"chat{number}", tenant="one")
    school.steps(2)
    assert school.asked[2:] == ["chat0", "chat1"]


@pytest.mark.parametrize("overlaps", [False, True])
def test_one_that_becomes_too_much_ends_its_request(overlaps):
    """Once, though the next step was planned already and fails as well."""
    school = School(overlaps=overlaps)
    school.ask("a", "x", max_tokens=9)
    school.ask("b", max_tokens=6)
    school.steps(1)
    school.ready("x")
    school.steps(2)
    before = len(school.times["a"])
    school.fail("a")
    school.steps(9)
    assert (school.reason("a"), school.ends["a"].refusal.message) == ("invalid_grammar", "too many states")
    assert school.ends["a"].tokens == () and len(school.times["a"]) == before
    assert (school.reason("b"), len(school.times["b"])) == ("length", 6)
    assert len(school.steps_of("a")) == before + 1 + overlaps
    assert leftovers(school.state) == []


def test_a_row_with_a_grammar_takes_part_in_every_step():
    """Its next step is planned before its token is known, as that of a row without one is."""
    school = School(overlaps=True)
    school.ask("guided", "x", max_tokens=12)
    school.steps(2)
    school.ready("x")
    school.ask("free", max_tokens=12)
    school.steps(16)
    assert school.ends.keys() == {"guided", "free"}
    first = school.steps_of("guided")[0]
    assert school.steps_of("guided") == school.steps_of("free") == list(range(first, first + 12))


def test_what_follows_the_end_of_a_grammar_is_thrown_away():
    probe = Request("r", tuple(range(5, 25)), SamplingParams(12, grammar=grammar("x")))
    tokens = expected_tokens(probe, 12, 1000)
    school = School(overlaps=True, eos_token_ids=(tokens[4],))
    school.ask("r", "x", max_tokens=12)
    school.steps(2)
    school.ready("x")
    school.steps(12)
    assert (school.reason("r"), len(school.times["r"])) == ("stop", tokens.index(tokens[4]) + 1)
    assert len(school.steps_of("r")) == len(school.times["r"]) + 1
    assert leftovers(school.state) == []


@pytest.mark.parametrize("asked", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_an_eos_that_a_grammar_allows_is_the_end(asked):
    def reason(**more):
        params = SamplingParams(max_tokens=20, **asked, **more)
        return finish_reason(Sequence(Request("r", (5,), params), [5, 6, 7]), (7,), 100)

    assert reason(grammar=grammar("x")) is FinishReason.STOP
    assert reason() is None
