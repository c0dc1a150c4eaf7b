"""What lora_kernels/gpu/flashinfer_*.py relies on of FlashInfer's interface, read in the source of one version."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

VERSION = "0.7.2.post1"


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a method that we pass: by position, in this order after `self`, and by name."""

    positional: tuple[str, ...]
    named: tuple[str, ...] = ()


HEADS = ("num_qo_heads", "num_kv_heads")
PLANNED = ("q_data_type", "kv_data_type", "sm_scale", "window_left", "logits_soft_cap")
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
SIGNATURES: Mapping[str, Mapping[str, Signature]] = {
    DECODE: {
        "__init__": Signature(
            ("float_workspace_buffer", "kv_layout"),
            (
                "use_cuda_graph",
                "use_tensor_cores",
                "paged_kv_indptr_buffer",
                "paged_kv_indices_buffer",
                "paged_kv_last_page_len_buffer",
                "backend",
            ),
        ),
        "reset_workspace_buffer": Signature(("float_workspace_buffer", "int_workspace_buffer")),
        "plan": Signature(("indptr", "indices", "last_page_len", *HEADS, "head_dim", "page_size"), PLANNED),
        "run": Signature(("q", "paged_kv_cache"), ("out",)),
    },
    PREFILL: {
        "__init__": Signature(
            ("float_workspace_buffer", "kv_layout"),
            (
                "use_cuda_graph",
                "qo_indptr_buf",
                "paged_kv_indptr_buf",
                "paged_kv_indices_buf",
                "paged_kv_last_page_len_buf",
            ),
        ),
        "reset_workspace_buffer": Signature(("float_workspace_buffer", "int_workspace_buffer")),
        "plan": Signature(
            (
                "qo_indptr",
                "paged_kv_indptr",
                "paged_kv_indices",
                "paged_kv_last_page_len",
                *HEADS,
                "head_dim_qk",
                "page_size",
            ),
            ("causal", *PLANNED),
        ),
        "run": Signature(("q", "paged_kv_cache"), ("out",)),
    },
}


def find_differences(module: ModuleType) -> list[str]:
    """Return, in words, where the wrappers of `module` do not take what we pass. Parameters collected by `**` are taken
    to be right."""
    found = []
    for name, methods in SIGNATURES.items():
        for method, expected in methods.items():
            parameters = inspect.signature(getattr(getattr(module, name), method)).parameters
            names = tuple(parameters)[1:]
            takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
            if names[: len(expected.positional)] != expected.positional:
                found.append(f"{name}.{method} takes {names} by position, not {expected.positional}")
            missing = () if takes_any else sorted(set(expected.named) - set(names))
            found += [f"{name}.{method} takes no {one}" for one in missing]
    return found
