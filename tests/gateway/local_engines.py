"""Real engines with fake executors in threads of the test's process, pools over them, and readers of their answers."""

import asyncio
import threading
from contextlib import aclosing

from engine.core.config import CoreConfig
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor, fake_token
from engine.pb import engine_pb2 as pb
from engine.rpc.service import EngineService
from engine.rpc.target import EngineTarget
from engine.rpc.wire import PROTOCOL
from engine.serve.server import _listen, start_mover
from gateway.engines.pool import EnginePool
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import Waits
from gateway.requests.submission import answer_stream
from gateway.routing.news import Role


class SlowExecutor(FakeExecutor):
    """Steps take a few milliseconds, so that answers are under way when something happens to their engine."""

    refused = ()
    blocked = ()
    is_stuck = False
    """True means that steps wait for `go_on`."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def load_host(self, path, claim):
        if path in self.blocked:
            self.go_on.wait(60)
        if path in self.refused:
            raise ValueError("the disk of this machine is another")
        return super().load_host(path, claim)

    def submit(self, plan):
        if self.is_stuck:
            self.go_on.wait(60)
        threading.Event().wait(0.003)
        return super().submit(plan)


class LocalEngine:
    """One engine in a thread of this process, with its server."""

    def __init__(self, folder, name, address="", kv_listen="", **described):
        config = CoreConfig(num_pages=1000, block_size=16, max_seqs=16, max_model_len=4000, host_pages=200)
        self.name = name
        self.executor = SlowExecutor()
        self.engine = Engine(EngineState.create(config), self.executor)
        facts = {
            "model": "fake",
            "model_hash": "a",
            "life": f"life-{name}",
            "num_pages": 1000,
            "block_size": 16,
            "weights": "bf16",
        }
        info = pb.EngineInfo(**facts | {"protocol": PROTOCOL, "max_model_len": 4000, "max_seqs": 16} | described)
        service = EngineService(self.engine, info)
        self.target = EngineTarget(address or f"unix:{folder / name}.sock")
        info.kv_identity, info.page_bytes = "fake", self.executor.page_memory.page_bytes
        self.mover = start_mover(self.engine, info, self.executor.page_memory, kv_listen, self.target)
        self.server = _listen(service, self.target.address)
        self.thread = threading.Thread(target=self.engine.run, args=(service.deliver,))
        self.thread.start()

    async def stop(self):
        self.engine.stop()
        await asyncio.to_thread(self.thread.join)
        self.mover.close()
        await asyncio.to_thread(self.server.stop(grace=0).wait)


class Engines:
    """Engines by name, and pools over them, all of which are closed at the end."""

    def __init__(self, folder):
        self.folder, self.running, self.pools = folder, {}, []

    def start(self, name, address="", **described):
        self.running[name] = LocalEngine(self.folder, name, address, **described)
        return self.running[name]

    async def pool(self, *names, roles=(), **options):
        pool = EnginePool(**options)
        self.pools.append(pool)
        await pool.start()
        for name, role in zip(names, roles or [Role.BOTH] * len(names), strict=True):
            await pool.add(name, (self.running.get(name) or self.start(name)).target, role=role)
        await asyncio.wait_for(pool.wait_serving(len(names)), 60)
        return pool

    async def stop(self, name):
        await self.running.pop(name).stop()

    async def close(self):
        for pool in self.pools:
            async with asyncio.timeout(60):
                await pool.close()
        for name in tuple(self.running):
            await self.stop(name)


def ask(name, adapter=None, length=60, prompt=(1, 2, 3), lane=Lane.INTERACTIVE):
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=7)
    return Request(name, tuple(prompt), params, adapter, lane, tenant="acme")


def expected(request):
    tokens = list(request.prompt_ids)
    for _ in range(request.params.max_tokens):
        tokens.append(fake_token(request.adapter_hash, 7, tokens, FakeExecutor().vocab_size))
    return tokens[len(request.prompt_ids) :]


class Answer:
    """Reads one answer through all its moves."""

    def __init__(self, pool, request, session=""):
        self.request, self.moves, self.places, self.tokens = request, [], [], []
        self.trial, waits = CrashTrial(pool, False), Waits(30.0, 30.0)
        self.stream = answer_stream(pool, request, self.trial, waits, self.moves.append, self.places.append, session)
        self.task = asyncio.create_task(self.read())

    async def read(self):
        async with aclosing(self.stream) as stream:
            async for events in stream:
                self.tokens += [token for event in events for token in event.tokens]
                assert not any(event.refusal for event in events), events

    async def whole(self):
        await asyncio.wait_for(self.task, 60)
        assert self.tokens == expected(self.request)

    @property
    def engines(self):
        return [place.engine for place in self.places]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
