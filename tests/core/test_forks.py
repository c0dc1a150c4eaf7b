"""The answers of one prompt (`n` > 1) copy the page with the prompt's end from the first of them."""

import pytest

from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.requests import Lane
from tests.core.memory import ADAPTERS, added, expected_tokens, make_engine, request, run, tokens_of

SIZE = 4


class Watched:
    """An engine on simulated memory, with the forks and the computed tokens of its plans."""

    def __init__(self, overlaps=False, **config):
        sizes = {"num_pages": 60, "block_size": SIZE, "max_seqs": 8, "max_model_len": 64, "token_budget": 64}
        self.engine = make_engine(CoreConfig(**sizes | config), overlaps=overlaps)
        self.plans, submit = [], self.engine.executor.submit
        self.engine.executor.submit = lambda plan: self.plans.append(plan) or submit(plan)
        for adapter_hash in ADAPTERS:
            self.engine.inbox.put(added(adapter_hash))

    def answer(self, *requests):
        """Answer requests, whose tokens must be those of an engine that serves each alone."""
        events = run(self.engine, *requests)
        for one in requests:
            assert tokens_of(events, one.id) == expected_tokens(one, one.params.max_tokens)

    @property
    def forks(self):
        return sum(len(plan.forks) for plan in self.plans)

    @property
    def computed(self):
        return sum(plan.num_tokens for plan in self.plans)


def siblings(count, prompt, **fields):
    return [request(f"r{number}", prompt, 9, seed=number, ignore_eos=True, **fields) for number in range(count)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("length", [SIZE + 1, SIZE + 2, 2 * SIZE, 2 * SIZE + 1, 11])
def test_a_prompt_is_computed_once_but_for_its_last_token(length, overlaps):
    watched = Watched(overlaps)
    watched.answer(*siblings(4, range(length)))
    assert watched.computed == length + 3 + 4 * 8
    assert watched.forks == (0 if length % SIZE == 1 else 3)


def test_without_a_cache_nothing_is_copied():
    watched = Watched(prefix_caching=False)
    watched.answer(*siblings(3, range(11)))
    assert watched.forks == 0


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"cache_salt": "x"}, {"adapter_hash": "a"}, {"prompt_ids": (9,) * 11}]
)
def test_only_the_same_prompt_of_the_same_realm_is_copied(other):
    watched = Watched()
    first, second = siblings(2, range(11))
    watched.answer(first, second._replace(**other))
    assert watched.forks == 0
    watched.answer(first._replace(id="later"))
    assert watched.forks == 0, "a request that has ended was copied from"


@pytest.mark.parametrize("preemption", ["recompute", "swap", "checkpoint"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_preempted_siblings_copy_again_from_those_that_run(preemption, overlaps):
    """Four answers in a pool for two or three of them, and chats that take what they hold."""
    rules = Scheduling(preemption=preemption)
    watched = Watched(overlaps, num_pages=14, host_pages=6, scheduling=rules)
    batch = [one._replace(id=f"b{one.id}") for one in siblings(4, range(11), lane=Lane.BATCH)]
    watched.answer(*batch, *siblings(2, range(30, 45)))
    assert watched.engine.state.counters.preemptions
    assert watched.forks >= 3
    assert not watched.engine.state.prefix.tails
