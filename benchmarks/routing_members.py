"""Makes the two members of benchmarks/routing.py: adapters of SmolLM2-135M-Instruct that differ in what they learnt.

The small member is trained with EASY tasks. The large one continues from it with all tasks: one base model with two
prices stands for two sizes of model, which this machine could not train.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.routing_task import Task, tasks
from engine.model.memory.allocation import pick_dtype
from lab.demo.packed import PackedRow, pack, packed_loss
from lab.demo.tools.conversations import Conversation, Tree
from lab.demo.train import optimise, save, show

RANK, ALPHA = 16, 32
LAYERS = list(range(10, 30))
"""Layers with LoRA weights: without the first ten, a step takes two thirds of the time."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BRANCHES = 10
"""Conversations of one step."""
RATE, MAX_GRADIENT = 1e-3, 1.0
PHASES = {"small": (60, 0.0, 101), "large": (170, 0.65, 202)}
"""Steps, share of hard tasks, and the seed of the tasks, by member in the order of training."""


def make_members(model: Path, out: Path) -> dict[str, Path]:
    """Train the members that `out` lacks, with a progress bar, and return their folders by name."""
    folders = {name: out / name for name in PHASES}
    if all((folder / "adapter_model.safetensors").is_file() for folder in folders.values()):
        return folders
    torch.manual_seed(0)
    tokenizer, adapted = AutoTokenizer.from_pretrained(model), _wrap(model)
    for name, (steps, hard, seed) in PHASES.items():
        rows = _rows(tokenizer, tasks(steps * BRANCHES, seed, hard))
        show(_train(adapted, rows), name, steps)
        save(adapted, folders[name])
    return folders


def _wrap(model: Path) -> PeftModel:
    # A CPU without arithmetic in bf16 takes 34 times as long for the gradient of a layer's input in bf16 as in fp32.
    dtype = pick_dtype("auto", torch.device("cpu"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, layers_to_transform=LAYERS, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def _train(model: PeftModel, rows: list[PackedRow]) -> Iterator[float]:
    losses = (packed_loss(model, [row]) for row in rows)
    return optimise(model, losses, len(rows) * 5 // 4, RATE, MAX_GRADIENT)


def _rows(tokenizer: PreTrainedTokenizerBase, taught: list[Task]) -> list[PackedRow]:
    chats = [
        Conversation(({"role": "user", "content": task.prompt}, {"role": "assistant", "content": task.answer}))
        for task in taught
    ]
    groups = [chats[start : start + BRANCHES] for start in range(0, len(chats), BRANCHES)]
    return [pack(tokenizer, Tree(None, (), tuple(group))) for group in groups]
