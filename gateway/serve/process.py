"""What every process of ours begins with: its log, its event loop, and the signals that end it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from engine.lossy_log import log_renderers, lossy_loggers

T = TypeVar("T")

COLLECT_AFTER = 10_000
"""Objects made and not freed; a request makes some hundreds and frees all but a few."""


def leave_torch_out() -> None:
    """To be called before a tokenizer library is imported, which would bring torch along where it is installed: nothing
    a gateway needs, and two thirds of its memory and of the time it takes to start."""
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in str(record.msg))
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python itself means by this: there is none


def configure_logging() -> None:
    """Log to standard error, as long as it can be written: short lines on a terminal, JSON elsewhere."""
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
    """Has what libraries log through the standard library look like every other line."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info, logger=record.name)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the fastest event loop there is."""
    if sys.platform == "win32":
        return asyncio.run(work)
    from uvloop import new_event_loop

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work)
    finally:
        gc.unfreeze()  # or libraries would find their objects alive at the very end, and complain


def settle_memory() -> None:
    """What is there by now stays, so no collection needs to look at it again: there are half a million objects of
    libraries and tokenizer, and looking through them took a third of the time of a gateway under load."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


def told_to_reload() -> asyncio.Event:
    """Returns an event that SIGHUP sets; the signal does nothing else any more."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, event.set)
    return event
