"""Builds what an engine consists of: the scheduler's configuration, the executor, and the engine's description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.capacity import decode_seconds, prompt_within
from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.step_time import StepTimeModel
from engine.executor.base import Executor
from engine.executor.fake import FAKE_HIDDEN, FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import PROTOCOL
from engine.sizing import CPU_SEQS, CPU_TOKENS, GIB, MOST_ADAPTER_BYTES

Progress = Callable[[str, int, int], None]
"""Callback for the progress of a start: what is done, how much of it is done, and how much there is."""
Build = Callable[[EngineConfig, Progress], tuple[CoreConfig, Executor, pb.EngineInfo]]
"""Makes the parts of an engine: `build_real`, or `build_fake` in tests."""

GRAMMAR_BYTES_OF_A_SEQUENCE = 8 << 20
"""Memory in bytes for compiled grammars, for each sequence that may run at once: each may follow a grammar of its own,
and as many more grammars may be ready for the requests that start next."""


def build_real(config: EngineConfig, on_progress: Progress) -> tuple[CoreConfig, Executor, pb.EngineInfo]:
    """Load the model onto this machine's device, calling `on_progress`, and start the grammar workers. Returns the
    core's configuration, the executor, and the description of the engine for its gateways."""
    from engine.model.memory import free_host_bytes
    from engine.model.runner import ModelRunner
    from engine.model.sizes import adapter_bytes_per_rank

    executor: Executor
    if config.ranks > 1:
        from engine.model.parallel.group import start_ranks

        runner, executor = start_ranks(config, on_progress)
    else:
        runner = executor = ModelRunner(config, on_progress)
    runner.start_grammar_workers()
    config = runner.config
    sizes = runner.num_pages, runner.num_host_pages, runner.max_model_len, runner.eos_token_ids
    core = replace(core_config(config, *sizes), chosen_experts=runner.spec.chosen_experts)
    core = replace(core, speculation=core.speculation and runner.proposes, draft_block=runner.draft_block)
    info = pb.EngineInfo(
        model=config.model,
        model_hash=runner.model_hash,
        architecture=runner.spec.model_type,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        backend=runner.backend.name,
        vocab_size=runner.vocab_size,
        page_bytes=runner.page_bytes,
        hidden_size=runner.spec.hidden_size,
        weights=runner.weights,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        kv_identity=runner.kv_identity if config.ranks == 1 else "",
    )
    info.outlook.adapter_bytes_per_rank = adapter_bytes_per_rank(config, runner.spec, runner.dtype, runner.shard)
    info.outlook.free_bytes = free_host_bytes() if runner.device.type == "cpu" else 0
    return core, executor, info


def build_fake(config: EngineConfig, on_progress: Progress) -> tuple[CoreConfig, Executor, pb.EngineInfo]:
    """Return the same kinds of values as `build_real`, with a `FakeExecutor` in place of a model, for tests of
    everything else: each token is a digest of those before it. `on_progress` is not called."""
    adapter_gb = config.host_adapter_gb or MOST_ADAPTER_BYTES["cpu"] / GIB
    config = replace(config.sized(CPU_SEQS, CPU_TOKENS), host_adapter_gb=adapter_gb)
    core = core_config(config, config.num_pages or 4096, 4096, config.max_model_len or 2048, ())
    executor = FakeExecutor()
    info = pb.EngineInfo(
        model=config.model, model_hash="fake", device="none", dtype="none", backend="fake", weights="none"
    )
    info.vocab_size, info.hidden_size = executor.vocab_size, FAKE_HIDDEN
    info.kv_identity, info.page_bytes = f"fake-{config.block_size}", executor.page_memory.page_bytes
    return core, executor, info


def core_config(
    config: EngineConfig, num_pages: int, host_pages: int, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> CoreConfig:
    """Return the scheduler's configuration: `config`, which leaves no size to the engine, and the sizes given.
    `max_model_len` is cut to what the page pool can hold."""
    return CoreConfig(
        num_pages=num_pages,
        block_size=config.block_size,
        max_seqs=config.max_seqs,
        max_model_len=min(max_model_len, (num_pages - 1) * config.block_size),
        token_budget=config.token_budget,
        max_resident_adapters=config.max_resident_adapters,
        min_kv_pages=config.min_kv_pages,
        max_adapter_pages=config.max_adapter_pages,
        adapter_half_life_s=config.adapter_half_life_s,
        grammar_bytes=config.max_seqs * GRAMMAR_BYTES_OF_A_SEQUENCE,
        max_fetches=max(2, config.fetch_threads),  # one is reserved for the interactive lane
        host_adapter_bytes=int(config.host_adapter_gb * GIB),
        eos_token_ids=eos_token_ids,
        prefix_caching=config.prefix_caching,
        share_prefixes=config.share_prefixes,
        speculation=config.speculation != "off",
        host_pages=host_pages,
        interactive=config.interactive,
        batch=config.batch,
        scheduling=config.scheduling,
    )


def describe_sizes(info: pb.EngineInfo, core: CoreConfig) -> None:
    """Fill in what `info` says about the scheduler's sizes, and the version of the protocol. Mutates `info`."""
    info.max_model_len, info.num_pages = core.max_model_len, core.usable_pages
    info.block_size, info.max_seqs = core.block_size, core.max_seqs
    info.protocol, info.share_prefixes = PROTOCOL, core.share_prefixes
    info.outlook.host_pages, info.outlook.adapter_pages = core.host_pages, core.adapter_pages
    info.outlook.host_adapter_bytes = core.host_adapter_bytes


def describe_predictions(info: pb.EngineInfo, core: CoreConfig, model: StepTimeModel) -> None:
    """Fill in what a step-time model predicts, which is nothing before it has seen steps. Mutates `info`."""
    info.outlook.decode_seconds = decode_seconds(model, core)
    info.outlook.prompt_tokens = prompt_within(model, core, core.interactive.ttft_s)
