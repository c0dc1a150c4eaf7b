"""An engine with the tiny model of conftest.py and one adapter of it."""

from collections import defaultdict

from engine.config import EngineConfig
from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner


class TinyEngine:
    """One engine in fp32 on a CPU, and the tokens of its requests, with the number of their cached prompt tokens."""

    def __init__(self, folder, adapter, scheduling=None, **core):
        sizes = {"num_pages": 200, "max_seqs": 8, "block_size": 4, "token_budget": 12} | core
        self.runner = ModelRunner(load(EngineConfig(str(folder), dtype="float32", device="cpu", swap_gb=0.01, **sizes)))
        config = CoreConfig(
            max_model_len=128, host_pages=50, scheduling=scheduling or Scheduling(), eos_token_ids=(), **sizes
        )
        self.engine = Engine(EngineState.create(config), self.runner)
        self.adapters = {"base": None, "adapter": self.engine.load_adapter(str(adapter)).adapter_hash}
        self.texts, self.cached = defaultdict(list), {}

    def ask(self, name, prompt, params, model="base", lane=Lane.INTERACTIVE, pooling=None):
        request = Request(name, tuple(prompt), params, self.adapters[model], lane, pooling=pooling)
        self.engine.inbox.put(Submit(request))

    def chat(self, name, prompt, model="base", lane=Lane.INTERACTIVE, max_tokens=16):
        self.ask(name, prompt, SamplingParams(max_tokens, temperature=0.0), model, lane)

    def finish(self):
        while self.step() or self.engine.state.has_work:
            pass
        assert leftovers(self.engine.state) == []
        return self

    def step(self):
        events = self.engine.step()
        for event in events:
            assert event.refusal is None, event.refusal
            self.cached[event.request_id] = event.num_cached
            if event.tokens:
                self.texts[event.request_id] += event.tokens
        assert violations(self.engine.state) == []
        return events
