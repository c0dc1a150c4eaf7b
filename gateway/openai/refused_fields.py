"""Says of every field of OpenAI's, vLLM's, SGLang's, llama.cpp's and Ollama's bodies, and of some other servers', what
it does where a route's own schema does not have it: it is refused, or has no effect.

A field that would change the answer is refused by name, unless its value changes nothing. All routes use this table, so
that a field never loses its effect because a caller sent it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from gateway.core.errors import unsupported_parameter

NOTHING: tuple[Any, ...] = (None, False, [], {})


class Refused(NamedTuple):
    """A field that is not supported, the values that have no effect and are therefore accepted, and the rest of the
    sentence that refuses the others."""

    harmless: tuple[Any, ...] = NOTHING
    why: str = "is not supported"

    def allows(self, value: Any) -> bool:
        return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in self.harmless)


def _unless(*harmless: Any) -> Refused:
    return Refused((None, *harmless))


def _use(instead: str, *harmless: Any) -> Refused:
    return Refused((None, *harmless), f"is not supported; use {instead}")


REFUSED: Mapping[str, Refused] = {
    # The prompt.
    "add_bos_token": _use("add_special_tokens", True),
    "chat_template": Refused(why="is not supported; the operator sets model.chat_template"),
    "context": _use("messages", []),
    "documents": Refused(),
    "guidance_scale": _unless(1),
    "images": _unless([]),
    "input_embeds": Refused(),
    "input_ids": _use("/v1/completions with token ids as prompt", []),
    "negative_prompt": _unless(""),
    "prompt_embeds": Refused(),
    "prompt_mode": _use("reasoning_effort"),
    "prompt_truncate_len": _use("truncate_prompt_tokens"),
    "raw": _use("/v1/completions", False),
    "safe_prompt": _use("a message of the role system", False),
    "session_params": Refused(),
    "suffix": _unless(""),
    "system": _use("a message of the role system", ""),
    "template": _use("/v1/completions with the whole prompt", ""),
    "token_healing": _unless(False),
    "transforms": _use("truncate_prompt_tokens", []),
    "truncate": _use("truncate_prompt_tokens"),
    # Reasoning and tools.
    "audio": Refused(),
    "enable_search": _unless(False),
    "enable_thinking": _use("reasoning_effort or chat_template_kwargs.enable_thinking"),
    "function_call": _use("tool_choice", "none"),
    "functions": _use("tools", []),
    "include_reasoning": _unless(True),
    "modalities": _unless([], ["text"]),
    "plugins": _unless([]),
    "prediction": Refused(),
    "reasoning": _use("reasoning_effort", {}),
    "reasoning_budget": _use("thinking_token_budget", -1),
    "reasoning_format": _unless("auto", "deepseek"),
    "search_options": Refused(),
    "separate_reasoning": _unless(True),
    "think": _use("reasoning_effort"),
    "thinking": _use("reasoning_effort or chat_template_kwargs"),
    "thinking_budget": _use("thinking_token_budget", -1),
    "thinking_budget_tokens": _use("thinking_token_budget", -1),
    "tool_choice": _unless("none", "auto"),
    "tools": Refused(),
    "web_search_options": Refused(),
    # The number and length of answers, and their end.
    "ban_eos_token": _use("ignore_eos", False),
    "early_stopping": _unless(False),
    "max_length": _use("max_tokens"),
    "max_new_tokens": _use("max_tokens"),
    "min_length": _use("min_tokens", 0),
    "min_new_tokens": _use("min_tokens", 0),
    "n_cmpl": _use("n", 1),
    "n_indent": _unless(0),
    "n_predict": _use("max_tokens", -1),
    "no_stop_trim": _use("include_stop_str_in_output", False),
    "num_predict": _use("max_tokens", -1),
    "repetition_detection": Refused(),
    "stop_regex": _use("stop", "", []),
    "stop_sequences": _use("stop", []),
    "t_max_predict_ms": _use("timeout", 0),
    # The choice of a token.
    "bad_words": _use("logit_bias or structured_outputs", []),
    "banned_strings": _use("logit_bias or structured_outputs", []),
    "banned_tokens": _use("logit_bias", [], ""),
    "custom_logit_processor": Refused(),
    "custom_params": Refused(),
    "do_sample": _use("temperature: 0", True),
    "dry_multiplier": _unless(0),
    "dynatemp_range": _unless(0),
    "dynamic_temperature": _unless(False),
    "epsilon_cutoff": _unless(0),
    "eta_cutoff": _unless(0),
    "grammar_string": _use("structured_outputs.grammar", ""),
    "guided_whitespace_pattern": Refused(),
    "length_penalty": _unless(1),
    "logits_processors": Refused(),
    "lora": _use("an adapter's name as model", []),
    "max_temp": _use("temperature", 0),
    "min_keep": _unless(0),
    "min_temp": _use("temperature", 0),
    "mirostat": _unless(0),
    "mirostat_mode": _unless(0),
    "options": _use("temperature, top_p and the other fields of the body itself", {}),
    "random_seed": _use("seed"),
    "rep_pen": _use("repetition_penalty", 1),
    "repeat_last_n": Refused((None, -1, 64), "is not supported; penalties count all tokens of the prompt and answer"),
    "sampler_order": _unless([]),
    "samplers": _unless([]),
    "sampling_params": _use("temperature, top_p and the other fields of the body itself", {}),
    "skip_special_tokens": _unless(True),
    "smoothing_factor": _unless(0),
    "structural_tag": _use("structured_outputs"),
    "temp": _use("temperature"),
    "temperature_last": _unless(False),
    "tfs": _unless(1),
    "tfs_z": _unless(1),
    "top_a": _unless(0),
    "top_n_sigma": _unless(0, -1),
    "typical": _unless(1),
    "typical_p": _unless(1),
    "use_beam_search": _unless(False),
    "vllm_xargs": Refused(),
    "watermark": _unless(False),
    "watermarking": _unless(False),
    "xtc_probability": _unless(0),
    # What the answer shows.
    "decoder_input_details": _use("prompt_logprobs", False),
    "details": _use("logprobs", False),
    "logprob_start_len": _use("prompt_logprobs", -1),
    "logprob_token_ids": _use("top_logprobs", []),
    "n_probs": _use("logprobs and top_logprobs", 0),
    "post_sampling_probs": _unless(False),
    "response_fields": _unless([]),
    "return_hidden_states": _use("/v1/embeddings", False),
    "return_logprob": _use("logprobs", False),
    "return_meta_info": _unless(False),
    "return_prompt_text": _unless(False),
    "return_prompt_token_ids": _use("return_token_ids", False),
    "return_routed_experts": _unless(False),
    "return_tokens": _use("return_token_ids", False),
    "top_logprobs_num": _use("top_logprobs", 0),
    "top_n_tokens": _use("top_logprobs", 0),
    "token_ids_logprob": _use("top_logprobs", []),
}
"""Fields that are not supported. A field that the schema of a route declares is supported by that route."""

INSIDE: Mapping[str, Mapping[str, Refused]] = {
    "messages": {
        "audio": Refused(),
        "images": _unless([]),
        "partial": _use("continue_final_message", False),
        "prefix": _use("continue_final_message", False),
        "tools": _use("tools of the body itself", []),
    },
    "reasoning": {"exclude": _unless(False)},
}
"""Fields that are not supported in an object inside a body, by the object's path."""

NO_EFFECT = frozenset(
    [
        "request_id",
        "session_id",
        "rid",
        "extra_key",
        "custom_labels",
        "ngram_corpus_id",
        "user",
        "task",
        "spaces_between_special_tokens",
        "",
        "guided_decoding_backend",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_mm_kwargs",
        "images_config",
        "max_dynamic_patch",
        "min_dynamic_patch",
        "use_audio_in_video",
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
        "return_token_offsets",
        "return_cached_tokens_details",
        "return_text_in_logprobs",
        "stream_interval",
        "stream_reasoning",
        "sse_ping_interval",
        "timings_per_token",
        "return_progress",
        "reasoning_control",
        "cache_prompt",
        "id_slot",
        "n_keep",
        "n_cache_reuse",
        "num_keep",
        "num_ctx",
        "keep_alive",
        "penalize_nl",
        "penalize_newline",
        "dynatemp_exponent",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "xtc_threshold",
        "mirostat_tau",
        "mirostat_eta",
        "smoothing_curve",
        "rep_pen_range",
        "models",
        "provider",
        "route",
    ]
)
"""Fields of other servers that change no answer: names of requests, the placement of work, the pace of a stream, the
treatment of images, and parameters of samplers that are off unless another field, which is refused, turns them on."""


DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "tool_choice": ("none", "auto"),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}
"""Values of the gateway's own fields that say what is the case without them."""


def fields_of(kind: type[Struct], why: str) -> dict[str, Refused]:
    """Return a refusal of each field of a body, for routes whose own bodies lack the field."""
    return {name: Refused((*NOTHING, *DEFAULTS.get(name, ())), why) for name in kind.__struct_fields__}


def refuse_unsupported(document: Mapping[str, Any], kind: type[Struct], own: Mapping[str, Refused] = {}) -> None:
    """Raise ApiError (UNSUPPORTED_PARAMETER) if a body sets a field that its struct `kind` lacks, and that is listed in
    `own`, the route's own table, or in REFUSED, to a value that would have an effect."""
    for name, value in document.items():
        rule = own.get(name) or REFUSED.get(name)
        if rule is not None and name not in kind.__struct_fields__ and not rule.allows(value):
            raise unsupported_parameter(name, rule.why)
    for place, rules in INSIDE.items():
        if place in kind.__struct_fields__:
            _refuse_inside(document.get(place), place, rules)


def _refuse_inside(value: Any, place: str, rules: Mapping[str, Refused]) -> None:
    members = enumerate(value) if isinstance(value, list) else ((None, value),)
    for index, member in members:
        for name in rules.keys() & member.keys() if isinstance(member, dict) else ():
            if not rules[name].allows(member[name]):
                inner = place if index is None else f"{place}[{index}]"
                raise unsupported_parameter(f"{inner}.{name}", rules[name].why)
