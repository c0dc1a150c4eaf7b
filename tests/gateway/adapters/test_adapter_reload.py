"""Replaced and reloaded twenty times under load, on a real engine process: no answer is of two versions."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fakes import ACME, CountingLimiter, grammar_pool, principal, tiny_tokenizer
from records import make_request

from engine.config import EngineConfig
from engine.core.messages.requests import SamplingParams
from engine.rpc.client import EngineClient
from engine.serve.local import LocalEngine
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.record import adapter_store
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import LocalSources
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.service import Gateway
from gateway.serve.supervisor import EngineSupervisor
from tests.model.conftest import tiny_llama  # noqa: F401
from tests.model.tiny_adapters import save_adapter

RELOADS = 20
CLIENTS = 6
PROMPTS = [(*range(10, 50), number) for number in (60, 61, 62)]
"""Five whole pages in common: what a prefix left behind by another version says is all they differ by."""
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def engine_config(model, *, prefix_caching):
    return EngineConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        threads=1,
        num_pages=2000,
        block_size=8,
        max_seqs=8,
        prefix_caching=prefix_caching,
    )


@asynccontextmanager
async def open_gateway(engine, root, client):
    """Yield a gateway with the engine, which is started here."""
    registry = AdapterRegistry(engine, adapter_store(client, "tiny"), LocalSources([root]), base_names=("tiny",))
    await registry.start()
    engine.on_connect = registry.restore
    await engine.start()
    await asyncio.wait_for(engine.wait_ready(), 120)
    limiter = CountingLimiter()
    await limiter.configure([ACME])
    model = ServedModel(engine, tiny_tokenizer(), registry, grammars=grammar_pool())
    yield Gateway(ServedModels([model]), AdapterAdmin([registry], LocalSources([root])), limiter)
    await registry.close()
    await engine.close()


@dataclass
class Seen:
    """An answer, as its caller sees it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    fingerprint: str
    cached: int


async def ask(gateway, prompt) -> Seen:
    request = make_request("voice", prompt, sampling=SAMPLING, max_tokens=SAMPLING.max_tokens)
    async with gateway.generate(principal(), request) as generation:
        chunks = [chunk async for chunk in generation]
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    return Seen(prompt, tokens, generation.admitted.fingerprint, chunks[-1].usage.cached)


@asynccontextmanager
async def clients(gateway, answers):
    """Each asks one question after the other, all the while."""
    stopping = asyncio.Event()

    async def one(number):
        while not stopping.is_set():
            answers.append(await ask(gateway, PROMPTS[number % len(PROMPTS)]))

    async with asyncio.TaskGroup() as group:  # which ends the test with the first client that fails
        for number in range(CLIENTS):
            group.create_task(one(number))
        yield
        stopping.set()


async def undisturbed_answers(gateway, voices, live):
    """Return the tokens that each version answers while nothing is replaced, by system fingerprint and prompt."""
    answers = {}
    for folder in voices:
        replace_files(folder, live)
        await gateway.models.default.adapters.load("voice", "live", replace=True)
        for seen in [await ask(gateway, prompt) for prompt in PROMPTS]:
            answers[seen.fingerprint, seen.prompt] = seen.tokens
    assert len(set(answers.values())) == len(voices) * len(PROMPTS), "every version answers in its own way"
    return answers


async def test_every_answer_is_one_versions(tiny_llama, tmp_path, valkey):  # noqa: F811
    voices, live = [tmp_path / "low", tmp_path / "high"], tmp_path / "live"
    for seed, folder in enumerate(voices):
        save_adapter(folder, rank=4 + 4 * seed, seed=seed)
    alone = LocalEngine(engine_config(tiny_llama, prefix_caching=False))
    async with open_gateway(alone, tmp_path, valkey) as gateway:
        undisturbed = await undisturbed_answers(gateway, voices, live)
    config = engine_config(tiny_llama, prefix_caching=True)
    async with (
        EngineSupervisor(config, tmp_path / "engine.sock") as supervisor,
        open_gateway(EngineClient(supervisor.address), tmp_path, valkey) as gateway,
    ):
        answers = await answers_while_reloading(gateway, voices, live)
        await gateway.models.default.adapters.wait_until_released()
        stats = await gateway.models.default.engine.stats(check=True)
    assert [seen for seen in answers if seen.tokens != undisturbed[seen.fingerprint, seen.prompt]] == []
    assert {seen.fingerprint for seen in answers} == {fingerprint for fingerprint, _ in undisturbed}
    assert any(seen.cached for seen in answers), "prefixes were shared"
    assert ([*stats.violations], len(stats.adapters)) == ([], 1)


async def answers_while_reloading(gateway, voices, live) -> list[Seen]:
    answers: list[Seen] = []
    async with clients(gateway, answers):
        for number in range(RELOADS):
            replace_files(voices[number % 2], live)
            assert await gateway.models.default.adapters.reload("voice")
            await until_answered(answers, len(answers) + CLIENTS // 2)
            fresh = await ask(gateway, PROMPTS[0])
            assert fresh.fingerprint.endswith(gateway.models.default.adapters.pick("voice").version[:10])
    return answers


async def until_answered(answers, count) -> None:
    async with asyncio.timeout(60):
        while len(answers) < count:
            await asyncio.sleep(0.005)


def replace_files(source, target) -> None:
    """Replace the adapter's folder in one rename, as operators are told to."""
    fresh = target.with_name("fresh")
    shutil.copytree(source, fresh)
    if target.exists():
        target.rename(target.with_name("stale"))
    fresh.rename(target)
    shutil.rmtree(target.with_name("stale"), ignore_errors=True)
