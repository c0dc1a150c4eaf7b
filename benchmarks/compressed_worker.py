"""Scores a text with compressed-tensors' W8A8, in a process of a Python that has it, transformers, and none of this
project's packages.

Reads `{"model": FOLDER, "pieces": [TEXT, ...], "out": FOLDER}` from standard input, and answers with the
log-probabilities of the tokens, but the first of each piece, by form: `{"fp32": [...], ...}`. Weights of linears other
than the head are rounded to 8 bits with a scale for each output, and activations with one for each token, as
llm-compressor's scheme W8A8 without calibration does. The checkpoint is written to `out`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BITS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
WEIGHTS = BITS | {"strategy": "channel"}
ACTIVATIONS = BITS | {"strategy": "token", "dynamic": True}
FORM = "int-quantized"


def load(folder: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def score(model: Any, pieces: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability of each token of the pieces but their first ones."""
    found: list[float] = []
    for ids in pieces:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        found += logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def quantise(model: Any) -> dict[str, Tensor]:
    """Have a model compute in W8A8, and return the scales of its weights, [out_features, 1], by module."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**WEIGHTS),
        input_activations=QuantizationArgs(**ACTIVATIONS),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    scales = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            weight = module.weight.detach().float()
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            scales[name], _ = calculate_qparams(low, high, module.quantization_scheme.weights)
            module.weight_scale.data.copy_(scales[name])
            module.quantization_status = QuantizationStatus.FROZEN
    return scales


def write(folder: Path, scales: Mapping[str, Tensor], out: Path) -> None:
    """Write the checkpoint of the weights of `folder`, rounded to 8 bits with these scales."""
    tensors = load_file(folder / "model.safetensors")
    for name, scale in scales.items():
        weight = tensors[f"{name}.weight"].float()
        tensors[f"{name}.weight"] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}.weight_scale"] = scale.float()
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
    section = {"quant_method": "compressed-tensors", "format": FORM, "config_groups": {"group_0": group}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = section | {"ignore": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))


def main() -> None:
    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    pieces = [tokenizer(piece).input_ids for piece in job["pieces"]]
    found = {"fp32": score(load(job["model"], torch.float32), pieces)}
    for dtype in (torch.bfloat16, torch.float32):
        model = load(job["model"], dtype)
        scales = quantise(model)
        found[f"W8A8 in {str(dtype).removeprefix('torch.')}"] = score(model, pieces)
    write(Path(job["model"]), scales, Path(job["out"]))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
