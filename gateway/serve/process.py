"""Setup that every gateway process does first: its imports, log, event loop, garbage collector and SIGHUP."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from engine.process.lossy_log import log_renderers, lossy_loggers
from gateway.serve.memory import bound_heaps

T = TypeVar("T")

COLLECT_AFTER = 10_000
"""Number of objects that must be allocated and not freed before a garbage collection starts. A request allocates some
hundreds and frees all but a few."""
SWITCH_SECONDS = 0.001
"""Seconds after which a thread that computes in Python lets the event loop go on, which else waits five times as long
after each of its calls to the operating system. Long bodies are parsed and rendered in threads."""


def leave_torch_out() -> None:
    """Make every later import of torch in this process fail. Call this before a tokenizer library is imported, which
    would import torch if it is installed: two thirds of a gateway's memory and start time, which it does not need."""
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in str(record.msg))
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python itself means by this: there is none


def configure_logging() -> None:
    """Configure structlog, and logging from WARNING on, to write to standard error: short lines on a terminal, JSON
    elsewhere. Lines that cannot be written are dropped."""
    exceptions = [] if sys.stderr.isatty() else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            *exceptions,
            *log_renderers(sys.stderr),
        ],
        logger_factory=lossy_loggers(sys.stderr),
    )
    logging.getLogger().addHandler(_ToStructlog(logging.WARNING))


class _ToStructlog(logging.Handler):
    """Forwards log records of libraries, which use the standard library, to structlog, so that all lines look alike."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info, logger=record.name)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new uvloop event loop (on Windows asyncio's), in a process whose heaps are bounded, and
    return its result; then undo `gc.freeze`."""
    bound_heaps()
    if sys.platform == "win32":
        return asyncio.run(work)
    from uvloop import new_event_loop

    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work)
    finally:
        gc.unfreeze()  # otherwise libraries would find their objects alive at exit, and complain


def freeze_memory() -> None:
    """Exclude all objects that exist now from later garbage collections, make collections rarer, and enable them, which
    the start may have suspended.

    Libraries and the tokenizer hold half a million objects, which live as long as the process. To traverse them took a
    third of the time of a gateway under load.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


def reload_requested() -> asyncio.Event:
    """Install a handler for SIGHUP in the running event loop and return the event that it sets. From this call on, the
    signal has no other effect."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, event.set)
    return event
