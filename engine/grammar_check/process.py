"""The parent's side of a worker process: starts it with a minimal environment, sends it one grammar at a time, and
kills it when it hangs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from engine.core.messages.grammar import Grammar
from engine.grammar_check.job import (
    DEATHS,
    LENGTH_BYTES,
    Reason,
    Reply,
    Verdict,
    WorkerLimits,
    decode_reply,
    encode_grammar,
    write_frame,
)

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
"""Seconds that a worker may take to start. A machine that imports the library more slowly cannot check grammars."""
PATIENT_SECONDS = 0.25
"""Seconds of compiling after which a worker gets a low priority, so that it hardly delays other tenants' tokens."""
LOW_PRIORITY = 5
"""Niceness that leaves the worker a quarter of a contended core. A smaller share would block workers for minutes."""
MAX_REPLY_BYTES = 1 << 20
"""Maximum size of a reply in bytes. A worker that announces more is broken."""
WALL_SECONDS = 60.0
"""Seconds of wall time after which a worker is killed, even if its CPU time has not run out."""
FAULTS = {
    signal.SIGPROF: Reason.CPU,
    signal.SIGSEGV: Reason.CRASHED,
    signal.SIGBUS: Reason.CRASHED,
    signal.SIGILL: Reason.CRASHED,
    signal.SIGABRT: Reason.CRASHED,
    signal.SIGFPE: Reason.CRASHED,
    signal.SIGTRAP: Reason.CRASHED,
}
"""Signals that a grammar causes, with the reason for its refusal. All others, mainly SIGKILL, come from outside."""
OUT_OF_MEMORY = b"memory allocation of"
"""Text that the library's runtime writes to standard error when it ends a process whose allocation failed."""


class WorkerLost(Exception):
    """Raised if a grammar worker process died, hung or sent nonsense for a reason other than the grammar, which gets no
    verdict from it."""


class WorkerProcess:
    """The parent's handle of a child process that the constructor starts and that checks one grammar at a time. Only
    the thread that created it may use it, except for `kill`: the child dies with that thread."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._complaints = _scratch_file()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.grammar_check.worker", limits.to_json(), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=_environment(),
            start_new_session=True,
        )
        self.spent = False
        """True means that the process must check no further grammar: it died, grew or has a low priority."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the process accepts grammars. If it does not within `START_SECONDS`, close it and raise
        WorkerLost."""
        if self._read(time.monotonic() + START_SECONDS) != b"ready":
            self.close()
            raise WorkerLost("a grammar worker did not start")

    def ask(self, grammar: Grammar) -> Reply:
        """Have the process check one grammar and return its reply; crashes and exceeded limits are verdicts, after
        which it may be `spent`. Raises WorkerLost if it was ended from outside or gave no reply, ValueError or
        TypeError for a bad one."""
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, encode_grammar(grammar))
        except OSError as error:
            self.spent = True
            raise WorkerLost("a grammar worker was gone before it was asked") from error
        if not self._answers_by(time.monotonic() + PATIENT_SECONDS):
            self._yield_to_others()
        body = self._read(time.monotonic() + WALL_SECONDS)
        if body is None:
            return Reply(self._post_mortem())
        reply = decode_reply(body)
        self.spent = self.spent or reply.spent or reply.verdict.reason in DEATHS
        return reply

    def kill(self) -> None:
        """End the grammar worker process now. Any thread may call this; the grammar that the process checks gets no
        reply."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait until it has ended, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._complaints):
            assert file is not None
            with suppress(OSError):  # buffered data could not be written to the dead process
                file.close()

    def _yield_to_others(self) -> None:
        """Lower the priority of the process and mark it as `spent`, because the priority cannot be raised again."""
        self.spent = True
        try:
            os.setpriority(os.PRIO_PROCESS, self.pid, LOW_PRIORITY)
        except ProcessLookupError:
            return

    def _answers_by(self, deadline: float) -> bool:
        """Wait until `deadline` (monotonic seconds) for output or the process's end; return whether either came."""
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout.fileno(), select.POLLIN)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _read(self, deadline: float) -> bytes | None:
        """Return the body of the process's next message. None means that the process has died or sent none before
        `deadline` (monotonic seconds). Raises WorkerLost if the message is longer than `MAX_REPLY_BYTES`."""
        assert self._process.stdout is not None
        head = self._read_bytes(LENGTH_BYTES, deadline)
        if head is None:
            return None
        length = int.from_bytes(head, "big")
        if length > MAX_REPLY_BYTES:
            raise WorkerLost("a grammar worker sent what is no reply")
        return self._read_bytes(length, deadline)

    def _read_bytes(self, count: int, deadline: float) -> bytes | None:
        assert self._process.stdout is not None
        parts = b""
        while len(parts) < count:
            part = os.read(self._process.stdout.fileno(), count - len(parts)) if self._answers_by(deadline) else b""
            if not part:
                return None
            parts += part
        return parts

    def _post_mortem(self) -> Verdict:
        """Mark a process without reply as `spent` and return the verdict that follows from the signal that ended it.
        Raises WorkerLost if it still runs or was not ended by the grammar."""
        self.spent = True
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired as error:
            raise WorkerLost(f"a grammar worker did not answer within {WALL_SECONDS:.0f} s") from error
        reason = FAULTS.get(-status) if status < 0 else None  # type: ignore[call-overload]
        if reason is None:
            raise WorkerLost(f"a grammar worker was ended from outside (status {status})")
        if reason is Reason.CRASHED and OUT_OF_MEMORY in self._last_words():
            reason = Reason.MEMORY
        return Verdict(reason, self._explain(reason))

    def _last_words(self) -> bytes:
        self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, self._complaints.tell() - 4096))
        return self._complaints.read()

    def _explain(self, reason: Reason) -> str:
        limits = self._limits
        return {
            Reason.CPU: f"compiling it takes more than {limits.cpu_seconds:g} s of CPU time",
            Reason.MEMORY: f"compiling it takes more than {limits.memory_bytes >> 20} MiB of memory",
            Reason.CRASHED: "compiling it makes the grammar library crash",
        }[reason]


def _scratch_file() -> BinaryIO:
    """Return a file for a worker's standard error, in memory (on Linux) or temporary. Unlike a pipe, it cannot be full
    and block the worker."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("grammar-worker"), "w+b")
    import tempfile

    return tempfile.TemporaryFile()


def _environment() -> dict[str, str]:
    """Return the environment variables that a worker needs to start and to compute in one thread, without secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV") if name in os.environ}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return {**kept, **single, "PYTHONPATH": os.pathsep.join(paths)}
