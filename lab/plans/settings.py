"""Turns a plan into settings of its engines, as sections of a configuration file."""

from __future__ import annotations

from typing import Any

from engine.model.runner.sizes import DEFAULT_MAX_MODEL_LEN
from engine.sizing import GIB
from lab.devices.accelerators import served_form
from lab.plans.advice import round_length, round_up
from lab.plans.planning import AS_MEASURED, Candidate, Wish


def settings_of(candidate: Candidate, wish: Wish, split: str) -> dict[str, Any]:
    """Return the sections of a configuration file with which the engines of a plan are to be run. `split` is the value
    of the setting `engine.split`."""
    engine: dict[str, Any] = {"max_seqs": candidate.core.max_seqs, "token_budget": candidate.core.token_budget}
    engine |= {"replicas": candidate.engines}
    if candidate.form != AS_MEASURED:
        engine |= _by_data_sheet(candidate, wish)
    if candidate.prefill:
        prefill, decode = candidate.prefill, candidate.engines - candidate.prefill
        swap_gb = candidate.core.host_pages * candidate.device.page_bytes / GIB
        engine |= {"kv_listen": "auto", "swap_gb": round_up(swap_gb), "split": split}
        engine |= {"roles": ["prefill"] * prefill + ["decode"] * decode}
    goals = {"ttft_s": wish.goals.ttft_s, "itl_s": wish.goals.itl_s, "attainment": wish.goals.attainment}
    return {"engine": engine, "lanes": {"interactive": goals}}


def _by_data_sheet(candidate: Candidate, wish: Wish) -> dict[str, Any]:
    """Return the settings of an engine that was planned by data sheets: formats, ranks, and the length of sequences, if
    some are longer than the engine serves by itself."""
    form, longest = served_form(candidate.form, wish.shape, candidate.ranks, candidate.stages), wish.traffic.whole.most
    engine: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    engine |= {"tensor_parallel": candidate.ranks} if candidate.ranks > 1 else {}
    engine |= {"pipeline_parallel": candidate.stages} if candidate.stages > 1 else {}
    engine |= {"weights": form.name} if form.is_fp8 or form.coding else {}
    engine |= {"kv_dtype": "fp8"} if form.kv_bytes == 1 else {}
    if longest > DEFAULT_MAX_MODEL_LEN:
        engine |= {"max_model_len": min(round_length(longest), wish.shape.max_position)}
    return engine
