"""Two engines over one model, without and with proposed tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.config import core_config
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Request, TokenEvent
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.model.runner.model_runner import ModelRunner

Clock = Callable[[], float]
"""Returns seconds: of wall time, or of the process's processor time."""


class Pair:
    """Two engines, off and auto, over one model. Only one of them has requests at a time."""

    def __init__(self, runner: ModelRunner, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        config = replace(runner.facts.config, prefix_caching=False)
        self.runner = runner
        core = core_config(config, runner.loaded.num_pages, 0, runner.facts.max_model_len, runner.facts.eos_token_ids)
        cores = {
            "off": replace(core, speculation=False),
            "auto": replace(core, speculation=True, draft_block=runner.loaded.draft_model.block),
        }
        self.engines = {name: Engine(EngineState.create(one), runner, clock=clock) for name, one in cores.items()}

    def run(self, speculation: str, asked: Sequence[Request]) -> tuple[float, dict[str, list[int]]]:
        """Compute requests that arrive together. Returns the seconds that it took, and the tokens of each."""
        engine, answers = self.begin(speculation), {request.id: list[int]() for request in asked}
        began = self.clock()
        for request in asked:
            self.submit(speculation, request)
        engine.step()
        while engine.state.has_work:
            for event in self.step(engine):
                answers[event.request_id] += event.tokens
        return self.clock() - began, answers

    def step(self, engine: Engine) -> Sequence[TokenEvent]:
        """Run a step, and return its events. If there is nothing to do before a grammar is compiled, wait for that."""
        events = engine.step()
        if not events and engine.state.steps.in_flight.is_empty:
            engine.inbox.wait(0.01)
        return events

    def begin(self, speculation: str) -> Engine:
        """Return the engine that is used from now on. A runner reports compiled grammars to one engine only."""
        engine = self.engines[speculation]
        self.runner.connect(engine.inbox.put)
        return engine

    def submit(self, speculation: str, request: Request) -> None:
        """Submit a request now. The runner, which both engines use, is told whether the request speculates."""
        params = request.params._replace(speculates=speculation == "auto")
        self.engines[speculation].inbox.put(Submit(request._replace(params=params, arrival=self.clock())))
