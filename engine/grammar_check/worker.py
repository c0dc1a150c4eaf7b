"""The child process that compiles grammars: `python -m engine.grammar_check.worker LIMITS PARENT_PID`. It reads one
grammar at a time from standard input, writes verdicts to standard output, and ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.job import (
    SOUND,
    Reason,
    Reply,
    Verdict,
    Vocabulary,
    WorkerLimits,
    decode_grammar,
    encode_reply,
    read_frame,
    refusal,
    write_frame,
)
from engine.grammar_check.source import objection

IS_LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
WARM_UP = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
"""Grammar that a worker compiles before it is ready. It makes the library do its one-time initialization, which would
otherwise count towards the limits of a tenant's grammar."""
GROWTH_BYTES = 96 << 20
"""Growth of the address space in bytes after which a worker is replaced, because malloc does not return all memory."""


def main() -> None:
    limits = WorkerLimits.from_json(sys.argv[1])
    _die_with_parent(int(sys.argv[2]))
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints must not end up among the replies
    judge = _judge(limits.vocabulary)
    examine(WARM_UP, judge)
    _limit_stack(limits.stack_bytes)
    begun = address_space()
    write_frame(replies, b"ready")
    while (body := read_frame(requests)) is not None:
        _arm(limits)
        verdict = examine(decode_grammar(body), judge)
        _disarm()
        write_frame(replies, encode_reply(Reply(verdict, address_space() - begun > GROWTH_BYTES)))


def examine(grammar: Grammar, judge: Callable[[Grammar], Verdict]) -> Verdict:
    """Return the verdict of `judge` on a grammar. Exceptions become verdicts: MEMORY for MemoryError, INVALID for
    others, CRASHED for a panic of the library. Only SystemExit and KeyboardInterrupt are raised."""
    try:
        return judge(grammar)
    except MemoryError:
        return Verdict(Reason.MEMORY, "compiling it takes too much memory")
    except Exception as error:
        return refusal(str(error))
    except BaseException as error:  # a panic of the library, which is not derived from Exception
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise
        return Verdict(Reason.CRASHED, "compiling it makes the grammar library fail")


def _judge(vocabulary: Vocabulary | None) -> Callable[[Grammar], Verdict]:
    """Return the function that checks a grammar: a `Trial` with the vocabulary's tokens, or `objection` without one."""
    if vocabulary is None:
        return lambda grammar: refusal(why) if (why := objection(grammar)) else SOUND
    from engine.grammar_check.trial import Trial

    return Trial(vocabulary)


def address_space() -> int:
    """Return the size of this process's address space in bytes; 0 if the system is not Linux."""
    if not IS_LINUX:
        return 0
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _arm(limits: WorkerLimits) -> None:
    """Set this worker process's CPU and memory limits for the next grammar: SIGPROF ends this process after
    `cpu_seconds` of CPU time, and on Linux an allocation beyond `memory_bytes` fails."""
    if IS_LINUX:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (address_space() + limits.memory_bytes, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)


def _disarm() -> None:
    """Lift the CPU and memory limits, so that the reply can be written even if the grammar has used them up."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    if IS_LINUX:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _limit_stack(stack_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def _die_with_parent(parent: int) -> None:
    """On Linux, have the system kill this process when process `parent` dies, and exit if it is gone already."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(0)


if __name__ == "__main__":
    main()
