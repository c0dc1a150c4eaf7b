"""Masks that take too long for a step: only their requests wait, tenants take turns, and every mask is paid for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.messages.commands import Abort, MaskFailed, MaskReady, Submit
from engine.core.messages.requests import FinishReason, Lane, Request, SamplingParams
from engine.core.state.grammars import SLICE_S
from engine.core.watch.check import leftovers, violations
from tests.core.memory import ADAPTERS, GRAMMARS, added, arrivals, configs, expected_tokens, make_engine
from tests.core.test_grammars import School
from tests.examples import examples


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(configs, arrivals, st.booleans(), st.randoms(use_true_random=False))
def test_every_request_ends_once_with_its_tokens_and_no_mask_is_lost(config, arrivals, overlaps, rng):
    """Requests come, are preempted and aborted, and their masks come at any time, or not at all."""
    engine = make_engine(replace(config, grammar_bytes=100 << 20), overlaps=overlaps)
    executor, state, requests, ended, step = engine.executor, engine.state, {}, {}, 0
    received = {}
    for adapter_hash in ADAPTERS:
        engine.inbox.put(added(adapter_hash))
    while state.has_work or engine.inbox._commands or executor.masking or step <= 24:
        for number, (begin, prompt, count, adapter_hash, lane, _, aborted) in enumerate(arrivals):
            name = f"r{number}"
            if step == begin:
                params = SamplingParams(count, seed=3, grammar=GRAMMARS[number % len(GRAMMARS)])
                asked = Request(name, prompt, params, adapter_hash, lane, tenant="xy"[number % 2], arrival=begin / 1000)
                requests[name], received[name] = asked, []
                executor.slow |= {name} if number % 4 else set()
                engine.inbox.put(Submit(asked))
            if aborted is not None and step == begin + aborted:
                engine.inbox.put(Abort(name))
        executor.unready |= {name for name in executor.slow & executor.sequences.keys() if rng.random() < 0.05}
        for name in [name for name in executor.masking if rng.random() < 0.5]:
            executor.tell_mask(name, MaskFailed if rng.random() < 0.05 else MaskReady)
        for event in engine.step():
            assert event.request_id not in ended, "an event after the terminal one"
            received[event.request_id] += event.tokens
            if event.finish_reason is not None:
                ended[event.request_id] = event.finish_reason
        assert violations(state) == []
        step += 1
        assert step < 3000
    assert ended.keys() == requests.keys() and leftovers(state) == [] and not state.grammars.masks.under_way
    for name, request in requests.items():
        assert received[name] == expected_tokens(request, len(received[name]))
        if ended[name] in (FinishReason.STOP, FinishReason.LENGTH):
            assert len(received[name]) == request.params.max_tokens or received[name][-1] in config.eos_token_ids


class Masked(School):
    """An engine on a virtual clock. The masks of the requests in `slow` take long, and come when a test says so."""

    def __init__(self, *slow, **config):
        super().__init__(**config)
        self.slow, self.begun, self.absent = slow, [], set()
        submit, collect = self.executor.submit, self.executor.collect

        def submitted(plan):
            self.begun += plan.grammars.masks
            return submit(plan)

        def collected():
            result = collect()
            names = tuple(one.request_id for one in result.sampled if one.request_id in self.slow)
            late = tuple(name for name in names if name in self.absent)
            kept = tuple(one for one in result.sampled if one.request_id not in late)
            return replace(result, sampled=kept, unsampled=late, masking=names)

        self.executor.submit, self.executor.collect = submitted, collected

    def ask(self, name, text="x", **fields):
        super().ask(name, text, **fields)

    def mask(self, name, seconds=0.05):
        self.engine.inbox.put(MaskReady(name, seconds))

    def served(self, tenant):
        return self.state.ledger.accounts.get(Lane.INTERACTIVE, tenant).seconds


@pytest.mark.parametrize("overlaps", [False, True])
def test_only_the_request_waits_whose_mask_is_not_there(overlaps):
    masked = Masked("slow", overlaps=overlaps)
    masked.ask("slow", max_tokens=4)
    masked.ask("other", max_tokens=40)
    masked.steps(2)
    masked.ready("x")
    masked.steps(8)
    computed = 1 + overlaps  # a step ahead is planned before the engine learns that the masks are slow
    assert len(masked.times["slow"]) == computed and len(masked.steps_of("slow")) == computed
    assert len(masked.times["other"]) >= 6 and masked.begun == ["slow"]
    while "slow" not in masked.ends:
        masked.mask("slow")
        masked.steps(3)
    assert len(masked.times["slow"]) == 4 and "other" not in masked.ends


def test_a_token_without_a_mask_is_computed_again():
    masked = Masked("slow")
    masked.absent.add("slow")
    masked.ask("slow", max_tokens=3)
    masked.steps(2)
    masked.ready("x")
    masked.steps(4)
    seq = masked.state.running["slow"]
    assert (masked.times["slow"], seq.num_computed, seq.num_pending) == ([], len(seq.tokens) - 1, 0)
    masked.absent.clear()
    masked.mask("slow")
    masked.steps(2)
    assert len(masked.times["slow"]) == 1


def test_tenants_take_turns_and_pay_for_their_masks():
    """A tenant with many slow requests does not make another's single one wait behind all of them."""
    many = [f"a{number}" for number in range(6)]
    masked = Masked(*many, "b")
    for name in (*many, "b"):
        masked.ask(name, max_tokens=40, tenant=name[0])
    masked.steps(2)
    masked.ready("x")
    masked.steps(4)
    before = masked.served("a"), masked.served("b")
    for _ in range(30):
        if masked.begun:
            masked.mask(masked.begun[-1], 0.05)
        masked.steps(8)
    assert masked.begun.count("b") > 2 * max(map(masked.begun.count, many))
    paid = masked.served("a") - before[0], masked.served("b") - before[1]
    assert min(paid) > 0.05 * 8 and 0.5 < paid[0] / paid[1] < 2


def test_masks_rest_as_long_as_they_took_while_others_are_computed():
    masked = Masked("slow")
    masked.ask("slow", max_tokens=9)
    masked.ask("other", max_tokens=900, prompt=3)
    masked.steps(2)
    masked.ready("x")
    masked.steps(3)
    for _ in range(4):
        begun, now = len(masked.begun), masked.clock.now
        masked.mask("slow", 0.2)
        while len(masked.begun) == begun:
            masked.steps(1)
        assert 0.2 <= masked.clock.now - now < 0.3
    masked.engine.inbox.put(Abort("other"))
    masked.mask("slow", 0.2)
    masked.steps(3)
    assert len(masked.begun) == begun + 2, "no other request is computed"


def test_short_masks_are_begun_together():
    names = [f"a{number}" for number in range(6)]
    masked = Masked(*names)
    for name in names:
        masked.ask(name, max_tokens=30)
    masked.steps(2)
    masked.ready("x")
    masked.steps(60)
    for _ in range(10):
        for name in list(masked.state.grammars.masks.under_way):
            masked.mask(name, SLICE_S / 4)
        masked.steps(6)
    assert len(masked.state.grammars.masks.under_way) == 4


def test_a_grammar_that_cannot_be_followed_ends_its_request_and_is_paid_for():
    masked = Masked("slow")
    masked.ask("slow", max_tokens=9, tenant="a")
    masked.steps(2)
    masked.ready("x")
    masked.steps(3)
    before = masked.served("a")
    masked.engine.inbox.put(MaskFailed("slow", 0.5, "it takes too long"))
    masked.steps(2)
    assert masked.reason("slow") == "invalid_grammar" and masked.ends["slow"].refusal.message == "it takes too long"
    assert masked.served("a") == pytest.approx(before + 0.5) and leftovers(masked.state) == []


def test_slow_masks_make_no_token_of_another_request_late():
    """A request that waits for masks is late whatever a step takes: it must not keep prompts out of steps."""
    masked = Masked("slow")
    masked.ask("slow", max_tokens=9)
    masked.steps(2)
    masked.ready("x")
    for _ in range(30):  # the step-time model gets to know steps
        masked.ask(f"warm{masked.clock.now}", None, max_tokens=2)
        masked.steps(3)
    assert masked.state.grammars.masks.under_way and masked.clock.now > masked.state.running["slow"].due
    masked.ask("prompt", None, max_tokens=1, prompt=200)
    masked.steps(3)
    assert masked.reason("prompt") == "length"


def test_a_tenant_whose_requests_wait_for_masks_keeps_no_other_out():
    """It holds every slot and is charged little, so that its waiting requests are first in turn, and find no slot."""
    names = [f"a{number}" for number in range(6)]
    masked = Masked(*names, max_seqs=4)
    for number in range(20):
        masked.ask(f"before{number}", None, max_tokens=8, tenant="b")
    masked.steps(60)
    for name in names:
        masked.ask(name, max_tokens=30, tenant="a")
    masked.steps(2)
    masked.ready("x")
    masked.steps(6)
    assert masked.served("b") > 2 * masked.served("a") and len(masked.state.running) == 4
    masked.ask("b", None, max_tokens=2, tenant="b")
    masked.steps(4)
    assert masked.reason("b") == "length"
