"""An engine on a virtual clock: a step takes what a formula says, and requests come when they come."""

from dataclasses import replace
from itertools import pairwise

from engine.core.config import CoreConfig
from engine.core.messages.commands import AddAdapter, Submit
from engine.core.messages.requests import FinishReason, Lane, Request, SamplingParams
from engine.core.messages.step import Launch
from engine.executor.fake import FakeExecutor
from lab.sim.baselines import AS_SERVED, engine_under
from lab.sim.timed import VirtualClock, VirtualDevice

STEP, PREFILL, DECODE = 0.010, 0.0005, 0.001
"""Seconds: of any step, of a prompt token, of a decoded one. About SmolLM2 on two cores."""
PLAN = 0.004
"""Seconds the host takes over a plan, where it takes any; a step takes at least 10 ms, and 14 with four decodes."""


class SlowExecutor(FakeExecutor):
    """A fake executor that takes virtual time for every step and records every plan."""

    def __init__(self, clock, copy_seconds=0.0, **options):
        super().__init__(**options)
        self.clock, self.copy_seconds = clock, copy_seconds
        self.device = VirtualDevice(clock)
        self.plans, self.took, self.measured = [], [], []
        self.plan_seconds = 0.0
        """Seconds that the host takes to plan a step."""
        self.lag = 0.0
        """Seconds until the host hears that a step has ended."""
        self.launch_seconds = 0.0
        """Seconds that the host takes to launch a step with a prompt kernel by kernel. With 0, every step is replayed.
        """
        self.late = []
        """For each step, True if it was late."""
        self.load_seconds = self.surprise = 0.0
        """Seconds that a step with several decodes takes longer than it did while the engine learned."""

    def submit(self, plan):
        begun, free_at = self.clock.now, self.device.free_at
        self.clock.advance(self.plan_seconds)
        self.plans.append(plan)
        super().submit(plan)
        launched = self.is_launched(plan)
        reached = self.clock.now - begun if launched else None
        self.took.append(self.seconds(plan))
        self.late.append(self.device.begin(self.took[-1], self.launch_seconds * launched))
        self.measured.append(self.device.free_at - max(begun, free_at))
        return Launch(self.late[-1], reached)

    def is_launched(self, plan):
        return bool(self.launch_seconds and any(chunk.num_tokens > 1 for chunk in plan.chunks))

    def collect(self):
        self.device.wait()
        self.clock.advance(self.lag)
        seconds, launched = self.measured[-len(self._submitted)], self.is_launched(self._submitted[0])
        result = super().collect()
        return replace(result, seconds=seconds, launched=launched) if self.overlaps else result

    def seconds(self, plan):
        tokens = sum(chunk.num_tokens for chunk in plan.chunks if not chunk.is_decode)
        decodes = sum(chunk.num_tokens for chunk in plan.chunks if chunk.is_decode)
        copies = self.load_seconds * len(plan.adapters.loads)
        if not plan.chunks:
            return copies
        copies += self.copy_seconds * len(plan.saves)
        return STEP + PREFILL * tokens + DECODE * decodes + copies + self.surprise * (decodes > 1)


class SteppedEngine:
    """An engine on a virtual clock that a test steps by hand. It records every request's token times and its end."""

    def __init__(self, adapters=None, mode=AS_SERVED, *, overlaps=False, **config):
        self.clock = VirtualClock()
        defaults = {"num_pages": 400, "block_size": 16, "max_seqs": 32, "max_model_len": 1024, "token_budget": 256}
        self.executor = SlowExecutor(self.clock, overlaps=overlaps)
        core = CoreConfig(**defaults | config)
        self.engine = engine_under(mode, core, self.executor, clock=self.clock, sleep=self.sleep)
        self.times, self.ends = {}, {}
        for adapter_hash, pages in (adapters or {}).items():
            self.add_adapter(adapter_hash, pages)

    @property
    def state(self):
        return self.engine.state

    @property
    def ledger(self):
        return self.state.ledger

    def add_adapter(self, name, pages, num_bytes=0):
        self.engine.inbox.put(AddAdapter(name, pages, 8, num_bytes, path=name))

    def submit(self, name, prompt=64, out=32, lane=Lane.INTERACTIVE, **fields):
        tokens = (
            tuple(prompt) if not isinstance(prompt, int) else tuple(hash((name, i)) % 50_000 for i in range(prompt))
        )
        params = SamplingParams(out, ignore_eos=True)
        fields = {"arrival": self.clock.now} | fields
        self.send(Request(name, tokens, params, lane=lane, **fields))

    def send(self, request):
        self.engine.inbox.put(Submit(request))

    def batch(self, name, prompt=128, out=200, **fields):
        self.submit(name, prompt, out, Lane.BATCH, **fields)

    def sleep(self, seconds):
        """Advance the clock by the time that the host sleeps before it plans a step."""
        self.clock.advance(seconds)

    def step(self, count=1):
        for _ in range(count):
            for event in self.engine.step():
                self.times.setdefault(event.request_id, []).extend([self.clock.now] * len(event.tokens))
                if event.finish_reason is not None:
                    self.ends[event.request_id] = event
            if self.engine._is_stuck:
                self.clock.advance(0.001)

    def run_until(self, done, most=20_000):
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError("it never came to that")

    def finish(self):
        self.run_until(lambda: not self.state.has_work and not self.engine.inbox._commands)

    def learn(self):
        """Lets the engine see small and large steps, so that it knows what they take."""
        for name in range(6):
            self.submit(f"learn-{name}", 30 + 40 * name, 6 + 4 * name)
            self.step(3)
        self.finish()
        for name in range(20):
            self.batch(f"learn-batch-{name}", 64, 20)
        self.finish()
        assert self.ledger.model.is_warm

    def gaps(self, name):
        times = self.times[name]
        return [later - earlier for earlier, later in pairwise(times)]

    def reason(self, name):
        end = self.ends[name]
        return end.refusal.code.value if end.finish_reason is FinishReason.ERROR else end.finish_reason.value
