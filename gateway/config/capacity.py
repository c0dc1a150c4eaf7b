"""Describes the capacity of a configuration on a machine, with warnings, for `serve` and for `check`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from engine.config import EngineConfig
from engine.core.predict.capacity import HEADROOM, Capacity
from engine.pb import engine_pb2 as pb
from engine.process.adapter_files import CONFIG_FILE
from engine.process.small_files import read_small_text
from gateway.config.models import ModelSettings

GIB = 2**30
FEW_SEQUENCES = 4
"""Sequences of full length that the pages should hold, so that long requests do not preempt each other."""
LARGE_SHARE = 0.3
"""Share of the page pool above which adapters leave too little for KV."""
SHORT_PROMPT = 64
"""Length in tokens of a prompt that should meet the TTFT goal on an idle engine; a warning says so if it does not."""
LATE = 1.25
"""Multiple of the ITL goal above which the predicted duration of a full decode step causes a warning. Predictions err
by some per cent."""
CACHED_TOKENS = 256
"""Tokens of KV assumed for each running sequence when estimating whether pages are left for cached prefixes."""
USUAL_RANK = 16
Row = tuple[str, str]
"""One row of the description that `serve` and `check` print: a topic and a sentence. The topic `note` marks a
warning."""


def capacity_of_info(info: pb.EngineInfo) -> Capacity | None:
    """Return the capacity of a running engine. None means that its release does not say, or that its pages take no
    memory because it has no model."""
    if not info.HasField("outlook") or not info.page_bytes:
        return None
    outlook = info.outlook
    return Capacity(
        info.num_pages, info.block_size, info.page_bytes, info.max_model_len, info.max_seqs, outlook.host_pages,
        outlook.adapter_pages, outlook.adapter_bytes_per_rank, outlook.host_adapter_bytes, outlook.free_bytes,
        outlook.decode_seconds, outlook.prompt_tokens,
    )  # fmt: skip


def preloaded_ranks(settings: ModelSettings) -> list[int]:
    """Return the LoRA ranks of the adapters to load at start, read from their PEFT configurations. Adapters without a
    readable configuration are left out."""
    ranks = []
    for place in settings.preload.values():
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            config = json.loads(read_small_text(place / CONFIG_FILE))
            ranks.append(int(max(config["r"], *config.get("rank_pattern", {}).values(), 1)))
    return ranks


def capacity_rows(settings: ModelSettings, capacity: Capacity, ranks: Sequence[int]) -> Iterator[Row]:
    """Yield what one engine of a base model holds, and warnings that name a setting and what to do. `ranks` are those
    of the adapters that are loaded at the start."""
    yield from _facts(settings, capacity, ranks)
    for warning in (*_memory_warnings(settings.engine, capacity, ranks), *_speed_warnings(settings, capacity)):
        yield "note", warning


def _facts(settings: ModelSettings, capacity: Capacity, ranks: Sequence[int]) -> Iterator[Row]:
    if settings.engine.ranks > 1:
        stages = f"{settings.engine.pipeline_parallel} stages of {settings.engine.tensor_parallel}"
        yield "ranks", f"{stages}: the sizes below are those of each, of the largest stage"
    kib = capacity.page_bytes / capacity.block_size / 1024
    pool = f"{capacity.num_pages:,} pages of {capacity.block_size} tokens, {capacity.pool_bytes / GIB:.2f} GiB"
    yield "page pool", f"{pool}: KV of {capacity.tokens:,} tokens ({kib:,.1f} KiB each), less resident adapters"
    full = f"{capacity.sequences(capacity.max_model_len):,} of {capacity.max_model_len:,} tokens fit"
    each = int(HEADROOM * capacity.tokens / capacity.max_seqs)
    both = f"up to {capacity.max_seqs:,} at once, of {min(each, capacity.max_model_len):,} tokens each"
    yield "sequences", f"{full} with {1 - HEADROOM:.0%} spare; {both}"
    yield "adapter memory", _adapters(capacity, ranks)
    tier = f"{capacity.host_pages:,} pages, {capacity.host_pages * capacity.page_bytes / GIB:.2f} GiB"
    yield "host tier", f"{tier}: KV of {capacity.host_pages * capacity.block_size:,} tokens, preempted or evicted"
    if capacity.decode_s:
        goals = settings.lanes.interactive
        step = f"a full step of decodes takes {_ms(capacity.decode_s)} (ITL goal: {_ms(goals.itl_s)})"
        yield "predicted", f"{step}; prompts of up to {capacity.prompt_tokens:,} tokens meet the TTFT goal alone"


def _adapters(capacity: Capacity, ranks: Sequence[int]) -> str:
    """Return how many adapters fit into pages and host memory, at the largest rank of those loaded at the start."""
    rank = max(ranks, default=USUAL_RANK)
    pages, parts = capacity.pages_of_adapter(rank), []
    if ranks:
        taken = _adapter_pages(capacity, ranks)
        parts.append(f"{len(ranks):,} at the start take {taken / capacity.num_pages:.1%} of the page pool")
    host = capacity.host_adapter_bytes // (pages * capacity.page_bytes)
    parts.append(
        f"of rank {rank}, {capacity.adapter_pages // pages:,} fill the pool, and {host:,} fit into host memory"
    )
    return "; ".join(parts)


def _memory_warnings(engine: EngineConfig, capacity: Capacity, ranks: Sequence[int]) -> Iterator[str]:
    full = capacity.sequences(capacity.max_model_len)
    if engine.max_model_len > capacity.max_model_len:
        yield (
            f"engine.max_model_len is {engine.max_model_len:,}, but the pages hold {capacity.max_model_len:,} tokens: "
            "lower it, or raise engine.memory_gb; longer requests are refused"
        )
    elif full < FEW_SEQUENCES:
        needed = (
            FEW_SEQUENCES * math.ceil(capacity.max_model_len / capacity.block_size) * capacity.page_bytes / HEADROOM
        )
        length = int(HEADROOM * capacity.tokens / FEW_SEQUENCES) // capacity.block_size * capacity.block_size
        yield (
            f"the page pool holds {full} sequences of engine.max_model_len ({capacity.max_model_len:,}) tokens: raise "
            f"engine.memory_gb to {needed / GIB:.1f}, or lower max_model_len to {max(capacity.block_size, length):,}"
        )
    if (taken := _adapter_pages(capacity, ranks)) > LARGE_SHARE * capacity.num_pages:
        yield (
            f"the adapters of the start take {taken / capacity.num_pages:.0%} of the page pool, if all are in use: "
            "raise engine.memory_gb, or bound them by engine.max_adapter_pages"
        )
    in_host = _adapter_pages(capacity, ranks) * capacity.page_bytes
    if in_host > capacity.host_adapter_bytes:
        yield (
            f"the adapters of the start take {in_host / GIB:.1f} GiB, more than engine.host_adapter_gb "
            f"({capacity.host_adapter_bytes / GIB:.1f}), and are read from disk again and again: raise it"
        )
    if engine.prefix_caching and capacity.tokens < 2 * capacity.max_seqs * CACHED_TOKENS:
        yield (
            f"engine.prefix_caching has no room: {capacity.max_seqs} sequences of {CACHED_TOKENS} tokens take most "
            "pages: raise engine.memory_gb, or lower engine.max_seqs"
        )
    taken, swap = engine.ranks * capacity.host_pages * capacity.page_bytes, engine.swap_gb * GIB
    if swap - taken > max(engine.ranks * capacity.page_bytes, 0.01 * swap):
        yield (
            f"engine.swap_gb is {engine.swap_gb:g}, but only {taken / GIB:.2f} GiB are taken, a quarter of the free "
            "memory: lower it, or free memory"
        )
    wanted = capacity.pool_bytes + capacity.host_pages * capacity.page_bytes + capacity.host_adapter_bytes
    if 0 < capacity.free_bytes < wanted:
        yield (
            f"page pool, host tier and adapters may take {wanted / GIB:.1f} GiB of {capacity.free_bytes / GIB:.1f} GiB "
            "that are free: lower engine.memory_gb, engine.swap_gb or engine.host_adapter_gb"
        )


def _speed_warnings(settings: ModelSettings, capacity: Capacity) -> Iterator[str]:
    if not capacity.decode_s:
        return
    goals = settings.lanes.interactive
    if capacity.decode_s > LATE * goals.itl_s:
        yield (
            f"a full step of decodes is predicted to take {_ms(capacity.decode_s)}, more than lanes.interactive.itl_s "
            f"({_ms(goals.itl_s)}): lower engine.max_seqs ({capacity.max_seqs}), or widen the goal"
        )
    if capacity.prompt_tokens < SHORT_PROMPT:
        yield (
            f"prompts of more than {capacity.prompt_tokens} tokens are predicted to miss lanes.interactive.ttft_s "
            f"({_ms(goals.ttft_s)}) even alone: widen the goal"
        )


def _adapter_pages(capacity: Capacity, ranks: Sequence[int]) -> int:
    return sum(map(capacity.pages_of_adapter, ranks))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
