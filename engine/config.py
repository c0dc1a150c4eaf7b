"""Configuration of one engine process: frozen, validated once, and sent to the engine as JSON by its parent process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, CoreConfig, LaneGoals, Scheduling
from engine.sizing import GIB

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
ADAPTER_DTYPES = ("auto", "fp8")
KV_DTYPES = ("auto", "fp8")
SPECULATIONS = ("off", "auto")
WEIGHTS = ("auto", "int8", "int4", "fp8")
GRAMMAR_BYTES_OF_A_SEQUENCE = 8 << 20
"""Memory in bytes for compiled grammars, for each sequence that may run at once: each may follow a grammar of its own,
and as many more grammars may be ready for the requests that start next."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Value of `EngineConfig.speculation` by which a draft model guesses tokens, too."""

    draft_model: Path
    """A folder of a smaller model with the same vocabulary, which also guesses tokens; prepared like `model`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_model", Path(self.draft_model))  # a string, where it comes from JSON


NESTED = {"interactive": LaneGoals, "batch": LaneGoals, "scheduling": Scheduling, "speculation": Speculation}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration of one engine process: its model, number formats, limits of memory and concurrency, caches, lanes'
    goals and scheduling. `auto`, and 0 in most sizes, lets the engine choose. Raises ValueError, which names the value,
    if one is out of range or token_budget is below max_seqs."""

    model: str
    """A prepared model folder with config.json, safetensors (unless load_format is dummy) and the tokenizer. Empty
    means that the engine process reads it from a line of its standard input, once the model is prepared."""
    load_format: str = "auto"
    """`auto` reads safetensors; `dummy` makes random weights of the shapes that config.json gives."""
    dtype: str = "auto"
    """`auto` is bfloat16 if the device computes in it, otherwise float32."""
    device: str = "auto"
    """`auto` is cuda if the machine has a GPU, otherwise cpu."""
    weights: str = "auto"
    """`auto` keeps weights as the checkpoint has them; `int8` and `int4` quantise those of one in 16 or 32 bits when
    it is loaded, in groups of 32 inputs. With `int4`, the embedding and the head have 8 bits. `fp8` quantises linear
    layers but the head and multiplies in FP8, on a GPU of compute capability 8.9 or above."""
    adapter_dtype: str = "auto"
    """`auto` stores adapters in dtype; `fp8` stores them in e4m3 with a scale for each rank, which takes half the pages
    and needs a GPU."""
    kv_dtype: str = "auto"
    """`auto` keeps the KV cache in dtype; `fp8` keeps it in e4m3, so that a page pool holds twice as many tokens, and
    needs a GPU of compute capability 8.9 or above."""
    graphs: bool = True
    """On a GPU, steps in which all rows decode, and others of up to 1,024 rows, are captured as CUDA graphs when the
    engine starts."""
    overlap: bool = True
    """On a GPU, each step is planned while the one before it is computed."""
    memory_gb: float = 0.0
    """Size of the page pool in GiB. 0 means a quarter of free memory, at most 4 GiB, on the CPU, and 90 % of free
    memory on a GPU."""
    machine_share: float = 1.0
    """Part of this machine's memory, for several engines on one CPU, that the defaults of memory_gb, swap_gb and
    host_adapter_gb are measured by."""
    num_pages: int = 0
    """Size of the page pool in pages, which takes precedence over memory_gb. 0 means that memory_gb decides."""
    block_size: int = 16
    max_seqs: int = 0
    """Maximum number of sequences that run at once. 0 means 32 on a CPU, and on a GPU what its speed and memory allow
    (`engine.sizing`)."""
    max_model_len: int = 0
    """Maximum length of a sequence in tokens. 0 means the length that the model was made for, at most 8192."""
    token_budget: int = 0
    """Maximum number of tokens that one step computes, over all sequences. 0 means 256 on a CPU, and on a GPU what its
    speed and memory and the ITL goal allow."""
    max_resident_adapters: int = 1024
    min_kv_pages: int = 0
    """Number of pages of the pool that are reserved for the KV cache: adapters never take them."""
    max_adapter_pages: int = 0
    """Maximum number of pages that adapters may take together. 0 means all but min_kv_pages."""
    adapter_half_life_s: float = 300.0
    """Half-life in seconds of an adapter's popularity: when adapters are evicted, a request that started this long ago
    counts half as much as one that starts now."""
    host_adapter_gb: float = 0.0
    """Maximum size of the packed adapters in host memory, in GiB; adapters beyond it are read from disk when a request
    needs them. 0 means a quarter of the host memory that is left, at most 2 GiB on a CPU and 64 GiB on a GPU. On a CPU,
    address space for the maximum is reserved at the start, but memory only as it is used."""
    fetch_threads: int = 2
    """Number of threads that read adapters from disk and pack them."""
    swap_gb: float = 1.0
    """Host memory for the KV cache of preempted sequences, of prefixes evicted from the device, and of pages that move
    between engines, in GiB, at most a quarter of free memory. 0 disables it."""
    kv_listen: str = ""
    """Where this engine gives KV pages to other engines of the operator: `unix:PATH`, which passes them in shared
    memory, or `HOST:PORT`, with the TLS files of the engine's own address. `auto` is beside that address. Empty means
    nowhere; fetching from others needs no setting."""
    prefix_caching: bool = True
    share_prefixes: bool = False
    """Tenants reuse each other's cached prefixes. A tenant may then find out from cached_tokens and latencies what
    other tenants have sent."""
    speculation: Literal["off", "auto"] | Speculation = "auto"
    """`auto` lets steps verify several proposed tokens of a request where that is predicted to yield more tokens per
    second. On a GPU nothing is proposed. `off` computes one token of a request per step. A `Speculation` is `auto` with
    a draft model, for a CPU."""
    tensor_parallel: int = 1
    """Number of ranks, each a process with a part of every large weight and of the KV heads, that compute the model
    together on this machine: each on a GPU of its own or, on a CPU, on its part of the threads."""
    pipeline_parallel: int = 1
    """Number of stages, each with some consecutive layers, their KV and their part of adapters, that compute the model
    one after the other on this machine. Each stage has `tensor_parallel` ranks."""
    threads: int = 0
    """Number of CPU threads that compute one operation. 0 means every core that this process may use."""
    seed: int = 0
    """Seed of dummy weights."""
    state_dir: str = ""
    """Folder for state that outlives the process: the step-time model, so that a restart is warm, and the record of
    adapter loads that never ended. Empty means that neither is kept."""
    interactive: LaneGoals = INTERACTIVE_GOALS
    batch: LaneGoals = BATCH_GOALS
    scheduling: Scheduling = field(default_factory=Scheduling)

    def __post_init__(self) -> None:
        choices = {
            "dtype": DTYPES,
            "device": DEVICES,
            "load_format": LOAD_FORMATS,
            "adapter_dtype": ADAPTER_DTYPES,
            "kv_dtype": KV_DTYPES,
            "weights": WEIGHTS,
        }
        if not isinstance(self.speculation, Speculation):
            choices["speculation"] = SPECULATIONS
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"engine.{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("block_size", "max_resident_adapters", "fetch_threads", "tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        sizes = ("max_seqs", "token_budget", "memory_gb", "num_pages", "max_model_len", "host_adapter_gb", "swap_gb")
        for name in (*sizes, "threads", "min_kv_pages", "max_adapter_pages"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"engine.{name} must be finite and not negative, not {getattr(self, name)}")
        if not 0 < self.machine_share <= 1:
            raise ValueError(f"engine.machine_share must be above 0 and at most 1, not {self.machine_share}")
        if not 0 < self.adapter_half_life_s < inf:
            raise ValueError(f"engine.adapter_half_life_s must be positive, not {self.adapter_half_life_s}")
        if self.ranks > 1 and (self.draft_config or self.kv_dtype == "fp8"):
            what = "kv_dtype fp8" if self.kv_dtype == "fp8" else "a draft model"
            name = "tensor_parallel" if self.tensor_parallel > 1 else "pipeline_parallel"
            raise ValueError(f"engine.{name} {getattr(self, name)} does not work with {what}")
        if self.kv_listen and (why := self._why_no_export()):
            raise ValueError(f"engine.kv_listen does not work with {why}")
        if 0 < self.token_budget < self.max_seqs:
            raise ValueError(f"engine.token_budget ({self.token_budget}) must be at least max_seqs ({self.max_seqs})")

    def sized(self, seqs: int, tokens: int) -> EngineConfig:
        """Return a copy whose `max_seqs` and `token_budget` are set. Values that are 0 here become `seqs` and `tokens`,
        changed as far as needed so that the token budget is at least `max_seqs`."""
        seqs = self.max_seqs or min(seqs, self.token_budget or seqs)
        return replace(self, max_seqs=seqs, token_budget=self.token_budget or max(tokens, seqs))

    def _why_no_export(self) -> str:
        """Return the name of a setting that keeps this engine from giving KV pages to others, with the reason; empty if
        none does."""
        if self.ranks > 1:
            return "tensor_parallel or pipeline_parallel: each rank has only a part of each page"
        if not self.swap_gb or self.scheduling.preemption == "recompute":
            return "swap_gb 0 or preemption recompute: pages pass through the host tier"
        return "" if self.prefix_caching else "prefix_caching false"

    @property
    def ranks(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel * self.pipeline_parallel

    def of_rank(self) -> EngineConfig:
        """Return a copy with one rank's part of the host's memory: page ids are the same on all ranks, but each rank's
        pages hold its own layers and KV heads, and its part of adapters. `memory_gb` and `num_pages` are each rank's
        already."""
        return replace(
            self,
            machine_share=self.machine_share / self.ranks,
            host_adapter_gb=self.host_adapter_gb / self.ranks,
            swap_gb=self.swap_gb / self.ranks,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @property
    def draft_config(self) -> EngineConfig | None:
        """The configuration by which the draft model is loaded; None means that there is none."""
        if not isinstance(self.speculation, Speculation):
            return None
        return replace(self, model=str(self.speculation.draft_model), speculation="off")

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Return the configuration that `to_json` wrote. Raises ValueError for malformed JSON or a value out of range,
        TypeError for an unknown or missing name or a value of another type."""
        values: dict[str, Any] = json.loads(text)
        nested = {name: kind for name, kind in NESTED.items() if isinstance(values.get(name), dict)}
        return cls(**values | {name: kind(**values[name]) for name, kind in nested.items()})


def core_config(
    config: EngineConfig, num_pages: int, host_pages: int, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> CoreConfig:
    """Return the scheduler's configuration, made from `config` and the given sizes. `config` must leave no size to the
    engine (see `EngineConfig.sized`). `max_model_len` is cut to what the page pool can hold."""
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
