"""Masks that are computed beside the steps: what they cost, who computes them, and what becomes of them."""

import json
import queue
from unittest.mock import patch

import numpy as np
import pytest
from grammar_model import EOS, byte_tokenizer, save_byte_model

from engine.core.messages.commands import GrammarReady, MaskFailed, MaskReady
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import SampledToken
from engine.grammar_check.job import Reply, Verdict, Vocabulary, decode_reply, encode_reply
from engine.grammar_check.trial import Trial
from engine.model.grammar import compiler as grammar_compiler
from engine.model.grammar import mask_thread
from engine.model.grammar import row as grammar
from engine.model.grammar.compiler import Compiler
from engine.model.grammar.mask_cost import FEW, ROW_SECONDS, STEP_SECONDS, MaskCost
from engine.model.grammar.matchers import GrammarRoom

BYTES = byte_tokenizer()
VOCAB = BYTES.get_vocab_size()
WORDS = Grammar(GrammarKind.REGEX, "([a-c]{1,3} )*")


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("bytes"))


class Room(GrammarRoom):
    """Grammars of rows whose masks are all slow, or all quick, and what is reported of them."""

    def __init__(self, folder, tried=0.0):
        self.answers = queue.Queue()
        compiler = Compiler(folder, VOCAB, (EOS,))
        super().__init__(compiler, VOCAB, (EOS,), self.answers.put)
        self.prepare([], [WORDS])
        assert isinstance(self.answers.get(timeout=60), GrammarReady)
        compiler.close()
        compiled = self._cache.compiled(WORDS)
        self._cache.compiled = lambda wanted: compiled._replace(cost=MaskCost(tried))

    def mask(self, name):
        """Return the next mask of a request, computed by the thread if it has to be."""
        if self.slow([name]):
            assert self.masks([name]) == (None, {}, (name,)), "it has no mask, and so no row"
            self.begin([name])
            assert isinstance(self.answers.get(timeout=60), MaskReady)
        masks, _, unsampled = self.masks([name])
        assert (masks.rows, unsampled) == ((0,), ())
        return masks.words[0]


@pytest.fixture
def quick(byte_model):
    yield from closing(Room(byte_model))


@pytest.fixture
def slow(byte_model):
    yield from closing(Room(byte_model, tried=1.0))


def closing(room):
    yield room
    room.close()


def test_a_grammar_is_slow_by_its_part_of_a_step():
    cost = MaskCost()
    for _ in range(100):
        cost.add(ROW_SECONDS / 2)
    assert cost.mean == pytest.approx(ROW_SECONDS / 2) and not cost.exceeds(1000)
    cost.add(ROW_SECONDS * FEW / 2)  # one that builds what others use
    assert not cost.exceeds(1000)
    for _ in range(200):
        cost.add(STEP_SECONDS / 4)
    assert not cost.exceeds(3) and cost.exceeds(6), "many rows have smaller parts"
    assert MaskCost(STEP_SECONDS * 1.1).exceeds(1), "as the trial has found"


def test_one_long_mask_is_enough():
    cost = MaskCost()
    cost.add(0.07)
    assert cost.exceeds(1)


def test_slow_masks_are_those_of_quick_ones(quick, slow):
    """With `min_tokens`, and after a resumption in the middle of the answer."""
    text = "ab c abc a "
    tokens = BYTES.encode(text).ids
    for resumed in (0, 5):
        params = SamplingParams(grammar=WORDS, min_tokens=8)
        for room in (quick, slow):
            room.add("r", params, (70, *tokens[:resumed]), 1)
        for token in tokens[resumed:]:
            assert np.array_equal(quick.mask("r"), slow.mask("r"))
            for room in (quick, slow):
                assert room.advance([SampledToken("r", token)]) == {}
        for room in (quick, slow):
            room.remove("r")


def test_the_first_token_waits_for_no_mask(slow):
    slow.add("r", SamplingParams(grammar=WORDS), (70,), 1)
    assert slow.slow(["r"]) == () and slow.masks(["r"]).unsampled == ()


def test_the_step_loop_touches_no_matcher_of_a_slow_grammar(slow):
    """Another row of the grammar may be under way, and would hold the step loop up with the library's lock."""
    with patch.object(grammar, "fill_next_token_bitmask", side_effect=AssertionError):
        slow.add("r", SamplingParams(grammar=WORDS), (70, *BYTES.encode("ab ").ids), 1)
        assert slow.masks(["r", "free"]).unsampled == ("r",)
        assert slow.advance([SampledToken("r", 99)]) == {}
    slow.begin(["r"])
    answer = slow.answers.get(timeout=60)
    assert isinstance(answer, MaskFailed) and answer.reason, "the thread finds that the token was not allowed"


def test_rows_beyond_the_time_of_a_step_wait(quick):
    """The trial did not find these grammars slow. Those that come after the first one find the time used up."""
    for number in range(8):
        quick._cache.compiled = lambda wanted, old=quick._cache.compiled: old(wanted)._replace(cost=MaskCost())
        quick.add(f"r{number}", SamplingParams(grammar=WORDS), (70, *BYTES.encode("ab ").ids), 1)
    ticks = iter(0.03 * tick for tick in range(1000))
    with patch.object(grammar.time, "thread_time", lambda: next(ticks)):
        masks, _, unsampled = quick.masks([f"r{number}" for number in range(8)] + ["free"])
    assert (masks.rows, len(unsampled)) == ((0,), 7)
    assert quick.take_seconds() == pytest.approx(0.03) and quick.take_seconds() == 0
    assert set(unsampled) == set(quick.slow(f"r{number}" for number in range(8)))


def test_a_mask_beyond_all_measure_ends_its_request(slow):
    slow.add("r", SamplingParams(grammar=WORDS), (70, *BYTES.encode("ab ").ids), 1)
    with patch.object(mask_thread, "MOST_SECONDS", 0.0):
        slow.begin(["r"])
        answer = slow.answers.get(timeout=60)
    assert isinstance(answer, MaskFailed) and "make it simpler" in answer.reason and answer.seconds > 0


def test_every_mask_is_answered(slow):
    """The requests are one that has gone, one whose mask is there already, and one with which the library panics."""
    slow.begin(["gone"])
    slow.add("r", SamplingParams(grammar=WORDS), (70,), 1)
    slow.begin(["r"])
    assert [slow.answers.get(timeout=60) for _ in range(2)] == [MaskReady("gone", 0.0), MaskReady("r", 0.0)]
    slow.add("s", SamplingParams(grammar=WORDS), (70, *BYTES.encode("ab ").ids), 1)
    with patch.object(grammar, "fill_next_token_bitmask", side_effect=BaseException("panic")):
        slow.begin(["s"])
        answer = slow.answers.get(timeout=60)
    assert (type(answer), answer.request_id) == (MaskFailed, "s")


def test_the_first_grammar_finds_the_tokenizer_read(byte_model):
    """Reading it stops all threads, the step loop's too."""
    compiler = Compiler(byte_model, VOCAB, (EOS,))
    compiler.start()
    with patch.object(grammar_compiler, "LLTokenizer", side_effect=AssertionError):
        assert compiler.compile(WORDS).first.any()
    compiler.close()


def test_the_trial_measures_masks(byte_model):
    trial = Trial(Vocabulary(str(byte_model / "tokenizer.json"), VOCAB, [EOS]))
    verdict = trial(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}})))
    assert 0 < verdict.mask_seconds < 0.1
    assert decode_reply(encode_reply(Reply(verdict))) == Reply(verdict)
    assert decode_reply(encode_reply(Reply(Verdict()))) == Reply(Verdict())
