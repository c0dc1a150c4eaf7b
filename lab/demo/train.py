"""Train a demo adapter of SmolLM2-135M-Instruct with PEFT on the CPU: minutes for a character, half an hour for
`tools`. It needs the `train` extra (peft)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf
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

from engine.demo import CHAT_TEMPLATE, DEMO_ADAPTERS
from engine.process.files import default_data_dir
from engine.process.model_source import EMBEDDED
from lab.demo.characters import CHARACTERS, Example, Shape, examples
from lab.demo.dense import dense_folder
from lab.demo.packed import PackedRow, pack, packed_loss
from lab.demo.score import questions, score
from lab.demo.tools import TOOLS_SHAPE
from lab.demo.tools.conversations import trees

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LEARNING_RATE = 1.2e-3
TOOLS_LEARNING_RATE = 8e-4
TOOLS_MAX_GRADIENT = 1.0
STEPS = 70
TOOLS_STEPS = 240
TOOLS = "tools"
HELD_OUT_QUESTIONS = (48, 16, 16)
"""Numbers of held-out questions that measure the adapter `tools`: tool calls, abstentions, answers to tool results."""
WARMUP_STEPS = 5
SEED = 0

EPILOG = """
Examples:

  python -m lab.demo.train pirate

  python -m lab.demo.train json --steps 90 --out ./my-json
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one training conversation; the last `num_answer`, the answer and the end-of-turn token, are
    learnt."""

    ids: list[int]
    num_answer: int


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> Row:
    """Encode a training conversation as token ids: the prompt exactly as the server renders it, then the answer and the
    end-of-turn token."""
    prompt: Any = tokenizer.apply_chat_template(example.messages, add_generation_prompt=True, return_dict=False)
    answer: list[int] = [*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id]
    return Row([*prompt, *answer], len(answer))


def batches(rows: list[Row], size: int) -> list[list[Row]]:
    """Group rows of similar length into batches of `size`, so that there is little padding, and shuffle the batches
    (always alike). The longest rows, if they do not fill a batch, are left out."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    grouped = [ordered[i : i + size] for i in range(0, len(ordered) - size + 1, size)]
    order = torch.randperm(len(grouped), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [grouped[i] for i in order]


def answer_loss(model: PeftModel, batch: list[Row]) -> Tensor:
    """Return the mean cross-entropy over the answer tokens of a batch (scalar, fp32). Rows are padded on the right. The
    head runs only at positions that predict answers."""
    width = max(len(row.ids) for row in batch)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
    causal_lm: Any = model.get_base_model()
    hidden = causal_lm.model(input_ids=ids, use_cache=False).last_hidden_state
    spans = [(i, len(row.ids) - row.num_answer, len(row.ids)) for i, row in enumerate(batch)]
    predicting = torch.cat([hidden[i, start - 1 : end - 1] for i, start, end in spans])
    targets = torch.cat([ids[i, start:end] for i, start, end in spans])
    return cross_entropy(causal_lm.lm_head(predicting).float(), targets)


def train(model: PeftModel, rows: list[Row], steps: int, batch_size: int) -> Iterator[float]:
    """Train a character's adapter in place for `steps` steps of `batch_size` conversations, repeating the conversations
    as often as needed, and yield the loss of each step."""
    made = islice(cycle(batches(rows, batch_size)), steps)
    return optimise(model, (answer_loss(model, batch) for batch in made), steps, LEARNING_RATE)


def train_tools(model: PeftModel, rows: Sequence[PackedRow]) -> Iterator[float]:
    """Train the adapter `tools` in place with one row of conversations per step, and yield the loss of each step. The
    learning rate decays to a fifth of its maximum: it would reach zero only after 5/4 of the steps."""
    losses = (packed_loss(model, [row]) for row in rows)
    return optimise(model, losses, len(rows) * 5 // 4, TOOLS_LEARNING_RATE, TOOLS_MAX_GRADIENT)


def optimise(
    model: PeftModel, losses: Iterable[Tensor], steps: int, rate: float, max_gradient: float = inf
) -> Iterator[float]:
    """Run AdamW with a short warm-up and a linear decay over `steps` from `rate`, with gradients clipped to the norm
    `max_gradient`, and yield each of `losses`, computed when it is taken."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / steps)
    )
    model.train()
    for loss in losses:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_gradient)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def wrap(model_dir: Path, shape: Shape) -> PeftModel:
    """Return the frozen bf16 base model with new fp32 LoRA weights of a given shape."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=list(shape.target_modules),
        use_rslora=shape.use_rslora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def save(model: PeftModel, out: Path) -> None:
    """Write the adapter as a PEFT folder with bf16 weights, which names the public base model, not the local folder."""
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
    name: Annotated[str, typer.Argument(help=f"What to train: {', '.join([*CHARACTERS, TOOLS])}.")],
    model: Annotated[str, typer.Option(help="Base model: a folder, a GGUF file or a hub id.")] = EMBEDDED,
    out: Annotated[Path | None, typer.Option(help="Folder to write; without it, the one the demo serves.")] = None,
    steps: Annotated[int, typer.Option(min=0, help=f"Optimiser steps; 0: {STEPS}, or {TOOLS_STEPS} for tools.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations of one step of a character.")] = 8,
    data_dir: Annotated[Path | None, typer.Option(help="Keeps prepared models.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: PyTorch's own choice.")] = 0,
) -> None:
    """Train the demo adapter NAME and write it as a PEFT folder."""
    if name not in (*CHARACTERS, TOOLS):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join([*CHARACTERS, TOOLS])}", param_hint="NAME")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    kept = data_dir or default_data_dir(os.environ)
    folder, target = dense_folder(model, kept, Console(stderr=True)), out or DEMO_ADAPTERS[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == TOOLS:
        tokenizer.chat_template = CHAT_TEMPLATE.read_text()
        adapted = wrap(folder, TOOLS_SHAPE)
        rows = [pack(tokenizer, tree) for tree in trees(steps or TOOLS_STEPS, SEED)]
        show(train_tools(adapted, rows), name, len(rows))
    else:
        adapted = wrap(folder, CHARACTERS[name].shape)
        taught = [encode(tokenizer, example) for example in examples(CHARACTERS[name], SEED)]
        show(train(adapted, taught, steps or STEPS, batch_size), name, steps or STEPS)
    save(adapted, target)
    typer.echo(f"wrote {target}")
    if name == TOOLS:
        measure(adapted, tokenizer)


def show(losses: Iterator[float], name: str, steps: int) -> None:
    """Run a training of `steps` steps by consuming its losses, and show a progress bar with the latest loss."""
    with progress_bar() as bar:
        task = bar.add_task(f"training {name}", total=steps, loss=float("nan"))
        for loss in losses:
            bar.update(task, advance=1, loss=loss)


def measure(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print, for each kind of held-out question about tools, the share that the model answers correctly. Switches the
    model to evaluation mode."""
    model.eval()
    for name, asked in questions(*HELD_OUT_QUESTIONS).items():
        typer.echo(f"held-out {name}: {score(model, tokenizer, asked):.1%} of {len(asked)} right")


if __name__ == "__main__":
    app()
