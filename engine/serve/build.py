"""Builds what an engine consists of: the executor, the engine's description for its gateways, and its pulse."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from google.protobuf import json_format

from engine.config import EngineConfig, core_config
from engine.core.config import CoreConfig
from engine.core.predict.capacity import decode_seconds, prompt_within
from engine.core.predict.step_time import StepTimeModel
from engine.core.state.engine_state import EngineState
from engine.executor.base import Executor
from engine.executor.fake import FAKE_HIDDEN, FAKE_ROWS, FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.process.pulse import Pulse
from engine.rpc.wire import PROTOCOL
from engine.sizing import CPU_SEQS, CPU_TOKENS, GIB, MOST_ADAPTER_BYTES

Progress = Callable[[str, int, int], None]
"""Callback for the progress of a start: what is done, how much of it is done, and how much there is."""
Build = Callable[[EngineConfig, Progress], tuple[CoreConfig, Executor, pb.EngineInfo]]
"""Makes the parts of an engine: `build_real`, or `build_fake` in tests."""

CPU_PATIENCE_S = 5.0
"""Seconds that one iteration of the step loop may take on a CPU before the engine counts as hung. A step takes at most
a quarter of a second, or a few seconds on a machine under load."""
GPU_PATIENCE_S = 30.0
"""Seconds that one iteration of the step loop may take on a GPU before the engine counts as hung. A step may compile a
kernel for a shape absent in warm-up."""
PREDICTIONS = 3.0
"""An iteration of the step loop may take longer than the patience by this multiple of the predicted duration of the
steps under way before the engine counts as hung."""


def build_real(config: EngineConfig, on_progress: Progress) -> tuple[CoreConfig, Executor, pb.EngineInfo]:
    """Load the model onto this machine's device, calling `on_progress`, and start the grammar workers. Return the
    core's configuration, the executor, and the description of the engine for its gateways."""
    from engine.model.memory.allocation import free_host_bytes
    from engine.model.runner.loading import load
    from engine.model.runner.model_runner import ModelRunner
    from engine.model.runner.sizes import adapter_bytes_per_rank

    executor: Executor
    if config.ranks > 1:
        from engine.model.parallel.group import start_ranks

        loaded, executor = start_ranks(config, on_progress)
    else:
        loaded = load(config, on_progress)
        executor = ModelRunner(loaded)
    loaded.grammars.start()
    facts = loaded.facts
    config, spec = facts.config, facts.spec
    sizes = loaded.num_pages, loaded.num_host_pages, facts.max_model_len, spec.eos_token_ids
    core = replace(core_config(config, *sizes), chosen_experts=spec.chosen_experts, vocab_size=spec.vocab_size)
    core = replace(core, speculation=core.speculation and facts.proposes, draft_block=loaded.draft_model.block)
    info = pb.EngineInfo(
        model=config.model,
        model_hash=facts.model_hash,
        architecture=spec.model_type,
        device=str(facts.device),
        dtype=str(facts.dtype).removeprefix("torch."),
        backend=loaded.backend.name,
        vocab_size=spec.vocab_size,
        page_bytes=facts.page_bytes,
        hidden_size=spec.hidden_size,
        weights=facts.weights,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        kv_identity=facts.kv_identity if config.ranks == 1 else "",
    )
    info.outlook.adapter_bytes_per_rank = adapter_bytes_per_rank(config, spec, facts.dtype, facts.shard)
    info.outlook.free_bytes = free_host_bytes() if facts.device.type == "cpu" else 0
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
    info.vocab_size, info.hidden_size = FAKE_ROWS, FAKE_HIDDEN
    info.kv_identity, info.page_bytes = f"fake-{config.block_size}", executor.page_memory.page_bytes
    return core, executor, info


def describe_sizes(info: pb.EngineInfo, core: CoreConfig) -> None:
    """Fill in what `info` says about the scheduler's sizes, and the version of the protocol. Mutates `info`."""
    info.max_model_len, info.num_pages = core.max_model_len, core.usable_pages
    info.block_size, info.max_seqs = core.block_size, core.max_seqs
    info.protocol, info.share_prefixes = PROTOCOL, core.share_prefixes
    info.outlook.host_pages, info.outlook.adapter_pages = core.host_pages, core.adapter_pages
    info.outlook.host_adapter_bytes = core.host_adapter_bytes


def describe_predictions(info: pb.EngineInfo, core: CoreConfig, model: StepTimeModel) -> None:
    """Fill in `info`, from a step-time model, the seconds of a full step of decodes, and the tokens of the longest
    prompt within the TTFT goal; 0 before the model has seen enough steps."""
    info.outlook.decode_seconds = decode_seconds(model, core)
    info.outlook.prompt_tokens = prompt_within(model, core, core.interactive.ttft_s)


def describe_life(info: pb.EngineInfo, previous: str) -> None:
    """Fill in `info.life`, a new random id of this engine process, and `info.previous`, its predecessor, from a
    `PreviousLife` as JSON, or empty, so that gateways learn which requests may have caused a crash."""
    info.life = uuid.uuid4().hex
    if previous:
        json_format.Parse(previous, info.previous)


def heart(info: pb.EngineInfo, path: Path | None) -> Callable[[EngineState], None]:
    """Create the pulse file at `path` and return the function that writes a beat in each iteration of the step loop:
    requests under way, and the seconds to the next beat. Without `path` it does nothing."""
    if path is None:
        return lambda state: None
    pulse = Pulse(path, info.life)
    patience = GPU_PATIENCE_S if info.device.startswith("cuda") else CPU_PATIENCE_S

    def beat(state: EngineState) -> None:
        steps = state.under_way
        predicted = sum(step.plan.predicted for step in steps)
        pulse.beat(patience + PREDICTIONS * predicted, (name for step in steps for name in step.sequences))

    return beat
