"""Chooses the attention kernels of a GPU: ours in Triton, or FlashInfer's for the steps in which they are faster."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from lora_kernels.tuning import Config, Tunings

AUTO, TRITON, FLASHINFER = ATTENTIONS = ("auto", "triton", "flashinfer")
STEP_CLASSES = FEW_DECODES, MANY_DECODES, PROMPTS = "few decodes", "many decodes", "prompts"
"""Steps for which the choice is made separately: decode-only ones by their number of rows, and steps with prompts."""
MOST_FEW = 32
"""Maximum rows of a step of `FEW_DECODES`."""
LIBRARY = "attention library"
"""Name under which the tuner stores which library is faster."""
OURS: Config = {"flashinfer": 0}
PACKAGE = "flashinfer-python"
HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which FlashInfer's kernels of every GPU are compiled."""


@dataclass(frozen=True, slots=True)
class AttentionWish:
    """What an engine asks of its attention kernels.

    Attributes:
        setting: `engine.attention`, one of `ATTENTIONS`.
        has_fp8_kv: whether K and V are stored in FP8.
        windows: the sliding windows of the model's layers; None is full attention.
        cap: bound of the model's attention scores (`Scores.cap`). None means that they are not bounded.
        sinks: whether the model's heads have sinks.
    """

    setting: str = AUTO
    has_fp8_kv: bool = False
    windows: frozenset[int | None] = frozenset({None})
    cap: float | None = None
    sinks: bool = False

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which K and V of a model of `dtype` are stored."""
        return torch.float8_e4m3fn if self.has_fp8_kv else dtype


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Says which library computes attention on a GPU: FlashInfer in the classes of steps in `steps`, our Triton kernels
    in all others. `reason` says in words why, for the log."""

    steps: frozenset[str]
    reason: str

    @property
    def name(self) -> str:
        return f"flashinfer for {', '.join(sorted(self.steps))}" if self.steps else TRITON


def step_class(rows: int, has_prompts: bool) -> str:
    """Returns the class of a step with `rows` query rows, which are all decodes unless it has prompts."""
    if has_prompts:
        return PROMPTS
    return FEW_DECODES if rows <= MOST_FEW else MANY_DECODES


def record_key(shape: str, steps: str, flashinfer: str) -> str:
    """Returns the key under which the tuner stores which attention library is faster: the shape (`attention_shape`),
    the class of steps and FlashInfer's version."""
    return f"{shape} {steps}, {PACKAGE} {flashinfer}"


def installed_flashinfer() -> str | None:
    """Returns the version of FlashInfer that is installed, without importing it. None means that it is not."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def find_obstacle(wish: AttentionWish, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns, in words, why FlashInfer cannot compute a model's attention on a device. None means that it can."""
    if device.type != "cuda":
        return f"it needs a GPU, not {device.type}"
    if wish.has_fp8_kv:
        return "it has one scale of FP8 for all heads, and engine.kv_dtype fp8 stores one for each"
    if wish.sinks:
        return "it knows no sinks, which the model's heads have"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it needs engine.dtype bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"it needs heads of {', '.join(map(str, HEAD_DIMS))}, and the model has {head_dim}"
    if installed_flashinfer() is None:
        return "it is not installed: pip install 'loralane[flashinfer]'"
    return None


def require_attention(wish: AttentionWish, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raises ValueError, whose message says what to do, if the setting cannot be served. `auto` always can."""
    if wish.setting == TRITON and device.type != "cuda":
        raise ValueError(f"engine.attention triton needs a GPU, not {device.type}: use auto")
    obstacle = find_obstacle(wish, device, dtype, head_dim) if wish.setting == FLASHINFER else None
    if obstacle is not None:
        raise ValueError(f"engine.attention flashinfer cannot be served: {obstacle}; auto or triton can")


def choose_attention(
    wish: AttentionWish, device: torch.device, dtype: torch.dtype, head_dim: int, tunings: Tunings, shape: str
) -> AttentionChoice:
    """Returns what computes attention on a GPU. `auto` takes FlashInfer for the classes of steps in which `tunings`
    say that it is faster at this `shape` (`attention_shape`), and ours for those without a measurement.

    Raises:
        ValueError: The setting is `flashinfer`, which cannot be served; the message says what to do.
    """
    require_attention(wish, device, dtype, head_dim)
    if wish.setting != AUTO:
        return AttentionChoice(
            frozenset(STEP_CLASSES if wish.setting == FLASHINFER else ()), "engine.attention says so"
        )
    obstacle = find_obstacle(wish, device, dtype, head_dim)
    if obstacle is not None:
        return AttentionChoice(frozenset(), f"flashinfer is left out: {obstacle}")
    keys = {steps: record_key(shape, steps, installed_flashinfer() or "") for steps in STEP_CLASSES}
    if not set(keys.values()) & tunings.choices.get(LIBRARY, {}).keys():
        return AttentionChoice(frozenset(), "nothing was measured here: python -m benchmarks.gpu.tune")
    faster = frozenset(steps for steps, key in keys.items() if tunings.find(LIBRARY, key, OURS)["flashinfer"])
    return AttentionChoice(faster, "measured on this device")
