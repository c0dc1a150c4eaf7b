"""Configuration of one engine process: frozen, validated once, sent to it as JSON by whoever starts it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals, Scheduling

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "dummy")
ADAPTER_DTYPES = ("auto", "fp8")
KV_DTYPES = ("auto", "fp8")
NESTED = {"interactive": LaneGoals, "batch": LaneGoals, "scheduling": Scheduling}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to serve and how much memory to give it.

    Raises:
        ValueError: a value is out of range; the message names it and the values allowed.
    """

    model: str
    """A prepared model folder: config.json, safetensors (unless load_format is dummy), tokenizer."""
    load_format: str = "auto"
    """auto: safetensors. dummy: random weights of the shape config.json gives."""
    dtype: str = "auto"
    """auto: bfloat16 where the device computes in it, else float32."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    adapter_dtype: str = "auto"
    """auto: adapters are stored in dtype. fp8: in e4m3 with a scale for each rank, in half the pages; on a GPU only."""
    kv_dtype: str = "auto"
    """auto: the KV cache is in dtype. fp8: in e4m3, twice as many tokens to a page pool; GPUs of 8.9 and above only."""
    graphs: bool = True
    """On a GPU, steps of decodes alone are captured as CUDA graphs when the engine starts."""
    overlap: bool = True
    """On a GPU, each step is planned while the one before it is computed."""
    memory_gb: float = 0.0
    """Size of the page pool in GiB; 0: a quarter of free memory, at most 4, on the CPU, and 90 % of it on a GPU."""
    num_pages: int = 0
    """Size of the page pool in pages, taking precedence over memory_gb; 0: from memory_gb."""
    block_size: int = 16
    max_seqs: int = 32
    max_model_len: int = 0
    """Tokens of one sequence; 0: what the model was made for, at most 8192."""
    token_budget: int = 256
    """Tokens computed a step, over all sequences."""
    max_resident_adapters: int = 1024
    min_kv_pages: int = 0
    """Pages that adapters may never take."""
    max_adapter_pages: int = 0
    """Pages that adapters may take at most; 0: all but min_kv_pages."""
    adapter_half_life_s: float = 300.0
    """A start counts half as much for keeping an adapter when it is so long ago."""
    host_adapter_gb: float = 2.0
    """Bound on packed adapters in host memory, in GiB; those beyond it are read from disk when they are wanted. On a
    CPU address space for all of it is taken at the start, memory as it is used."""
    fetch_threads: int = 2
    """Threads that read adapters from disk and pack them."""
    swap_gb: float = 1.0
    """Host memory for the KV of preempted sequences, in GiB, of at most a quarter of what is free; 0: none."""
    prefix_caching: bool = True
    share_prefixes: bool = False
    """Tenants reuse each other's prefixes, and may find out by cached_tokens and times what others have asked."""
    threads: int = 0
    """CPU threads of one operation; 0: every core this process may use."""
    seed: int = 0
    """Of dummy weights."""
    state_dir: str = ""
    """Folder for what outlives the process: the step-time model, so that a restart is warm, and loads of adapters that
    never ended. Empty means that neither is kept."""
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
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"engine.{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("block_size", "max_seqs", "token_budget", "max_resident_adapters", "fetch_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        sizes = ("memory_gb", "num_pages", "max_model_len", "host_adapter_gb", "swap_gb", "threads")
        for name in (*sizes, "min_kv_pages", "max_adapter_pages"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"engine.{name} must be finite and not negative, not {getattr(self, name)}")
        if not 0 < self.adapter_half_life_s < inf:
            raise ValueError(f"engine.adapter_half_life_s must be positive, not {self.adapter_half_life_s}")
        if self.token_budget < self.max_seqs:
            raise ValueError(f"engine.token_budget ({self.token_budget}) must be at least max_seqs ({self.max_seqs})")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """The inverse of `to_json`. Raises ValueError or TypeError where a value or a name is none of ours."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {name: kind(**values[name]) for name, kind in NESTED.items() if name in values})
