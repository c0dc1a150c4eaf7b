"""What other threads have for the step loop: commands, and questions about the state."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.core.messages.commands import Command


class EngineStopped(RuntimeError):
    """The step loop has ended, so that it answers no further questions."""


class Inbox:
    """Thread-safe queue of commands and questions to the step loop, which handles them between two steps. A question is
    a function that the loop calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: list[Command] = []
        self._questions: list[Callable[[], None]] = []
        self._closed = False
        self._arrived = threading.Event()

    def put(self, command: Command) -> None:
        with self._lock:
            self._commands.append(command)
        self._arrived.set()

    def ask(self, question: Callable[[], None]) -> None:
        """Queue a question and wake the loop. Raises EngineStopped if the inbox is closed."""
        with self._lock:
            if self._closed:
                raise EngineStopped("the engine has stopped")
            self._questions.append(question)
        self._arrived.set()

    @property
    def is_closed(self) -> bool:
        """Return whether the inbox no longer accepts questions."""
        return self._closed

    def wake(self) -> None:
        self._arrived.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Let the step loop wait, at most `timeout` seconds (None: no limit), until a command, a question or a `wake`
        has come since the last `drain_questions`; return whether one has."""
        return self._arrived.wait(timeout)

    def drain(self) -> list[Command]:
        """Remove all queued commands to the step loop, but no questions, and return them in order of arrival."""
        with self._lock:
            commands, self._commands = self._commands, []
        return commands

    def drain_questions(self) -> list[Callable[[], None]]:
        with self._lock:
            questions, self._questions = self._questions, []
            self._arrived.clear()
        return questions

    def close(self) -> list[Callable[[], None]]:
        """Accept no more questions to the step loop; remove and return those that are still open. Commands are accepted
        as before."""
        with self._lock:
            self._closed = True
        return self.drain_questions()
