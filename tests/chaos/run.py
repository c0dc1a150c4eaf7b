"""The long version, by hand: `make chaos ARGS="--rounds 500 --seed 1"`.

Every plant lives through a number of rounds, each with one to three faults at once, drawn by the seed; then it is
stopped, and another one, with another number of gateways, takes its place. The first complaint ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

from rich.console import Console

from engine.model.prepare import prepare_model
from tests.chaos.faults import Calm, Fault, Together, catalogue
from tests.chaos.invariants import Auditor
from tests.chaos.load import Mix
from tests.chaos.plant import Kind, Plant, planted
from tests.chaos.trial import attempt

ROUNDS_OF_A_PLANT = 20
GATEWAYS = (2, 1, 3)
LONGEST_FAULT = 3.0
"""Seconds."""
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def tiny_model(folder: Path, tokenizer: Path) -> Path:
    """Two layers of random weights behind a real tokenizer."""
    for file in tokenizer.glob("*.json"):
        shutil.copy(file, folder)
    for file in tokenizer.glob("*.jinja"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def drawn(random: Random, only: str) -> Fault:
    """One to three faults of different kinds."""
    kinds: dict[type[Fault], list[Fault]] = {}
    for fault in [fault for fault in catalogue() if only in str(fault)]:
        kinds.setdefault(type(fault), []).append(fault)
    number = min(len(kinds), random.choice((1, 1, 2, 3)))
    chosen = random.sample(sorted(kinds, key=lambda kind: kind.__name__), number)
    faults = [random.choice(kinds[kind]) for kind in chosen]
    return faults[0] if len(faults) == 1 else Together(faults)


def compatible(fault: Fault) -> bool:
    """Two faults of the store undo each other."""
    of_the_store = [each for each in getattr(fault, "faults", ()) if each.strikes_store]
    return len(of_the_store) < 2


def plan(random: Random, rounds: int, only: str) -> Iterator[Fault]:
    while rounds:
        fault = drawn(random, only)
        if compatible(fault):
            rounds -= 1
            yield fault


async def live(plant: Plant, faults: list[Fault], seed: int, done: int) -> bool:
    """Whether all went well."""
    auditor, random = Auditor(plant), Random(seed)
    for number, fault in enumerate([Calm(), *faults], done):
        verdict = await attempt(plant, auditor, fault, seed + number, random.uniform(0.1, LONGEST_FAULT), Mix())
        print(f"{number:5} {verdict.fault:50} ready in {verdict.ready_seconds:4.1f} s  {verdict.requests}", flush=True)
        for complaint in verdict.complaints:
            print(f"      {complaint}", flush=True)
        if verdict.complaints:
            return False
    return True


async def run(arguments: argparse.Namespace, model_dir: Path) -> bool:
    faults = list(plan(Random(arguments.seed), arguments.rounds, arguments.only))
    for number, first in enumerate(range(0, len(faults), ROUNDS_OF_A_PLANT)):
        gateways = arguments.gateways or GATEWAYS[number % len(GATEWAYS)]
        kind = Kind(model_dir, gateways, fake=not arguments.model)
        print(f"a plant with {gateways} gateways", flush=True)
        async with planted(kind) as plant:
            if not await live(plant, faults[first : first + ROUNDS_OF_A_PLANT], arguments.seed, first):
                shutil.copytree(
                    plant.folder, arguments.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock")
                )
                print(f"what the plant has written is in {arguments.keep}", flush=True)
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws the faults and the traffic")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="", help="a part of the names of faults to choose from")
    parser.add_argument("--gateways", type=int, default=0, help="of every plant; 0: two, one and three in turn")
    parser.add_argument("--model", action="store_true", help="a real model of two layers, in place of digests")
    parser.add_argument("--keep", type=Path, default=Path("chaos-failed"), help="folder for the logs of a failed plant")
    arguments = parser.parse_args()
    data_dir = Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))
    tokenizer = prepare_model("embedded", data_dir, Console(stderr=True))
    with tempfile.TemporaryDirectory(prefix="chaos-model-") as folder:
        model_dir = tiny_model(Path(folder), tokenizer) if arguments.model else tokenizer
        if not asyncio.run(run(arguments, model_dir)):
            sys.exit(1)


if __name__ == "__main__":
    main()
