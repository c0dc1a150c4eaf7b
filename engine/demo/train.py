"""Train a demo adapter of SmolLM2-135M-Instruct with PEFT on the CPU, in a minute or two.

Needs the `train` extra (peft); nothing that serves imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from engine.demo import DEMO_ADAPTERS
from engine.demo.characters import CHARACTERS, Character, Example, examples
from engine.model.prepare import EMBEDDED, prepare_model
from engine.paths import default_data_dir

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LEARNING_RATE = 1.2e-3
WARMUP_STEPS = 5
SEED = 0

EPILOG = """
Examples:

  python -m engine.demo.train pirate

  python -m engine.demo.train json --steps 90 --out ./my-json
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one conversation; the last `num_answer` of them are learnt."""

    ids: list[int]
    num_answer: int


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> Row:
    """The prompt exactly as the server renders it, then the answer and the end-of-turn token."""
    prompt: Any = tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, return_dict=False)
    answer: list[int] = [*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id]
    return Row([*prompt, *answer], len(answer))


def batches(rows: list[Row], size: int) -> list[list[Row]]:
    """Batches of rows of similar length, so that little is padding, in an order that mixes lengths."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    grouped = [ordered[i : i + size] for i in range(0, len(ordered) - size + 1, size)]
    order = torch.randperm(len(grouped), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [grouped[i] for i in order]


def answer_loss(model: PeftModel, batch: list[Row]) -> Tensor:
    """Mean cross-entropy over the answer tokens of a batch; scalar, fp32.

    Rows are padded on the right, where a causal model never looks, so no mask is needed; the vocabulary projection runs
    at the positions that are learnt and nowhere else.
    """
    width = max(len(row.ids) for row in batch)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
    causal_lm: Any = model.get_base_model()
    hidden = causal_lm.model(input_ids=ids, use_cache=False).last_hidden_state
    spans = [(i, len(row.ids) - row.num_answer, len(row.ids)) for i, row in enumerate(batch)]
    predicting = torch.cat([hidden[i, start - 1 : end - 1] for i, start, end in spans])
    targets = torch.cat([ids[i, start:end] for i, start, end in spans])
    return cross_entropy(causal_lm.lm_head(predicting).float(), targets)


def train(model: PeftModel, rows: list[Row], steps: int, batch_size: int) -> Iterator[float]:
    """AdamW with a short warm-up and a linear decay; yields the loss of every step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / steps)
    )
    model.train()
    for batch in islice(cycle(batches(rows, batch_size)), steps):
        loss = answer_loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def wrap(model_dir: Path, character: Character) -> PeftModel:
    """The frozen bf16 base with fresh fp32 LoRA weights of the character's shape."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    config = LoraConfig(
        r=character.rank,
        lora_alpha=character.alpha,
        target_modules=list(character.target_modules),
        use_rslora=character.use_rslora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def save(model: PeftModel, out: Path) -> None:
    """Write a PEFT folder with bf16 weights that names the public base model, whatever folder it was trained from."""
    out.mkdir(parents=True, exist_ok=True)
    config: Any = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set, whose order changes with every run
    config.save_pretrained(str(out))
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )


app = typer.Typer(add_completion=False)


@app.command(epilog=EPILOG)
def main(
    name: Annotated[str, typer.Argument(help=f"Which character to train: {', '.join(CHARACTERS)}.")],
    model: Annotated[str, typer.Option(help="Base model: a folder, a GGUF file or a hub id.")] = EMBEDDED,
    out: Annotated[Path | None, typer.Option(help="Folder to write; without it, the one the demo serves.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 70,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations of one step.")] = 8,
    data_dir: Annotated[Path | None, typer.Option(help="Keeps converted models.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: PyTorch's own choice.")] = 0,
) -> None:
    """Train the demo adapter NAME and write it as a PEFT folder."""
    if name not in CHARACTERS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(CHARACTERS)}", param_hint="NAME")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    kept = data_dir or default_data_dir(os.environ)
    folder, target = prepare_model(model, kept, Console(stderr=True)), out or DEMO_ADAPTERS[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [encode(tokenizer, example) for example in examples(CHARACTERS[name], SEED)]
    adapted = wrap(folder, CHARACTERS[name])
    with progress_bar() as bar:
        task = bar.add_task(f"training {name}", total=steps, loss=float("nan"))
        for loss in train(adapted, rows, steps, batch_size):
            bar.update(task, advance=1, loss=loss)
    save(adapted, target)
    typer.echo(f"wrote {target}")


if __name__ == "__main__":
    app()
