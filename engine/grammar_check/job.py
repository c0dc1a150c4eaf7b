"""The messages between a grammar pool and its worker processes, the limits under which a worker compiles, and a cache
of verdicts."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import IO

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.source import told

LENGTH_BYTES = 4
THREAD_STACK_BYTES = 8 << 20
"""Stack size in bytes of the engine's threads that compile grammars for decoding. Such a thread compiles a grammar only
after a worker process has survived compiling it."""
KEPT = 4096
"""Maximum number of remembered verdicts; each takes less than a kilobyte."""
DEATH_SECONDS = 600.0
"""Seconds for which a verdict whose reason is in `DEATHS` is remembered. The worker's death may have had another cause
than the grammar, such as a machine that was out of memory."""


class Reason(Enum):
    """Why a grammar was not accepted. The values are labels of a metric."""

    INVALID = "invalid"
    """The grammar library (llguidance) rejects the grammar; `Verdict.message` is its error."""
    CPU = "cpu"
    """Compiling took more CPU time than a grammar may take."""
    MEMORY = "memory"
    """Compiling took more memory than a grammar may take."""
    CRASHED = "crashed"
    """The library crashed the worker process, for example by a stack overflow, or panicked."""
    QUEUE = "queue"
    """The tenant has too many grammars waiting already."""
    UNDECIDED = "undecided"
    """The worker was ended from outside or the machine was too busy: the grammar may be sound."""


DEATHS = frozenset({Reason.CPU, Reason.MEMORY, Reason.CRASHED})
"""Reasons for which the worker process is replaced, because the grammar ended it or used up one of its limits."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of checking one grammar. `reason` is None if it is sound; otherwise `message` explains why not.
    `num_bytes` is the memory of the compiled grammar; 0 if it was not measured."""

    reason: Reason | None = None
    message: str = ""
    num_bytes: int = 0
    """Memory in bytes that the compiled grammar holds, if a worker with a vocabulary has measured it; otherwise 0."""
    mask_seconds: float = 0.0
    """Mean CPU time in seconds of a mask in the trial's random answer; 0 if none was measured."""


SOUND = Verdict()


def refusal(why: str) -> Verdict:
    """Return the verdict that a grammar is INVALID, whose message is the grammar library's error `why`, shortened by
    `told`."""
    return Verdict(Reason.INVALID, told(why))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, in its tokenizer's `file`. With them, a grammar worker process also compiles each grammar
    for the tokens and computes a mask; without them, it only checks the grammar's text."""

    file: str
    """Path of the model's tokenizer.json."""
    size: int
    """Number of token ids, which is the number of columns of the model's logits."""
    eos_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of the resources that checking one grammar may use, and the vocabulary with which the grammar is tried."""

    cpu_seconds: float = 2.0
    """Limit in seconds of CPU time, not of wall time, so that a busy machine does not refuse sound grammars."""
    memory_bytes: int = 64 << 20
    """Limit of the address space in bytes, in addition to what the worker used before the grammar."""
    stack_bytes: int = THREAD_STACK_BYTES // 4
    """Stack size in bytes: a quarter of the stack of the engine's threads, so that the engine survives any grammar that
    a worker survives. While an answer follows a grammar, the library also runs in the engine's main thread, whose stack
    has the system's default size (8 MiB on Linux unless `ulimit -s` says otherwise)."""
    vocabulary: Vocabulary | None = None
    """None means that grammars are checked without a model's tokens."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerLimits:
        fields = json.loads(text)
        if fields["vocabulary"] is not None:
            fields["vocabulary"] = Vocabulary(**fields["vocabulary"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker process's reply about one grammar: the verdict. `spent` means that the process's memory has grown so far
    that the worker should be replaced."""

    verdict: Verdict
    spent: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """Content hash of a grammar, which identifies the grammar where its text need not be kept."""

    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, grammar: Grammar) -> Key:
        text = grammar.text.encode("utf-8", "surrogatepass")
        return cls(hashlib.sha256(grammar.kind.value.encode() + b"\0" + text).digest())


def encode_grammar(grammar: Grammar) -> bytes:
    return json.dumps([grammar.kind.value, grammar.text]).encode()


def decode_grammar(body: bytes) -> Grammar:
    kind, text = json.loads(body)
    return Grammar(GrammarKind(kind), text)


def encode_reply(reply: Reply) -> bytes:
    verdict = reply.verdict
    reason = verdict.reason.value if verdict.reason else None
    return json.dumps([reason, verdict.message, verdict.num_bytes, verdict.mask_seconds, reply.spent]).encode()


def decode_reply(body: bytes) -> Reply:
    reason, message, num_bytes, mask_seconds, spent = json.loads(body)
    return Reply(Verdict(Reason(reason) if reason else None, message, num_bytes, mask_seconds), spent)


def write_frame(file: IO[bytes], body: bytes) -> None:
    """Write one message between pool and worker process to `file`, a pipe, and flush it: the length of `body` as a
    4-byte big-endian integer, then `body`."""
    file.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Wait for one message of `write_frame` and return its body. None means that the writer has closed the pipe."""
    head = file.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    body = file.read(length)
    return body if len(body) == length else None


class Verdicts:
    """LRU cache of at most `kept` verdicts by grammar hash. Verdicts that say nothing about the grammar (UNDECIDED,
    QUEUE) are not kept, and those in `DEATHS` expire after `DEATH_SECONDS`. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._known: OrderedDict[Key, tuple[Verdict, float]] = OrderedDict()
        """Key -> (verdict, time on the clock at which it expires), the least recently used first."""

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key) -> Verdict | None:
        """Return the cached verdict on a grammar, and mark it as the most recently used. None means that there is none
        or that it has expired."""
        found = self._known.get(key)
        if found is None:
            return None
        if found[1] <= self._clock():
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return found[0]

    def put(self, key: Key, verdict: Verdict) -> None:
        if verdict.reason in (Reason.UNDECIDED, Reason.QUEUE):
            return
        lasts = DEATH_SECONDS if verdict.reason in DEATHS else float("inf")
        self._known[key] = (verdict, self._clock() + lasts)
        self._known.move_to_end(key)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
