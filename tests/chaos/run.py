"""The long version, by hand: `make chaos ARGS="--rounds 500 --seed 1"`.

Every deployment lives through a number of rounds, each with one to three faults at once, drawn by the seed; then it is
stopped, and another one, with another number of gateways, takes its place. Then come rounds in which one engine
computes prompts and another continues the answers, and then batch jobs: one among a hundred kills, one that is
cancelled and one that expires meanwhile, and one among all faults. The first complaint ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from rich.console import Console

from engine.model.folders.prepare import prepare_model
from tests.chaos.deployment import READY_SECONDS, Deployment, Kind, KvLine, deployed
from tests.chaos.draw import faults_of, kills_of, lasting_faults_of
from tests.chaos.faults import Calm, Fault, catalogue
from tests.chaos.invariants import Auditor
from tests.chaos.job_trial import JobPlan, JobTrial
from tests.chaos.load import Mix
from tests.chaos.split_faults import ROLES, split_catalogue
from tests.chaos.trial import attempt

ROUNDS_OF_A_PLANT = 20
GATEWAYS = (2, 1, 3)
KV_LINES: tuple[KvLine, ...] = ("tcp", "memory", "mtls")
LONGEST_FAULT = 3.0
"""Seconds."""
MOST_SAID = 20
"""Complaints."""
SPLIT_SECONDS = (0.3, 1.5, 7.0)
"""How long faults of split requests last. An engine waits for the rest of a prompt's KV for 5 s, then computes it."""
SPLIT_MIX = Mix(longest_prompt=500)
LONGEST_ANSWER = 500
"""Tokens of a batch's line: a job must not be over before its faults are."""
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


class Session:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace, model_dir: Path) -> None:
        self._options = options
        self._model_dir = model_dir
        self._random = Random(options.seed)

    async def run(self) -> bool:
        """Return whether all went well."""
        return await self._online() and await self._split() and await self._jobs()

    async def _online(self) -> bool:
        options = self._options
        faults = list(faults_of(self._random, options.rounds, catalogue(), options.only))
        for number, first in enumerate(range(0, len(faults), ROUNDS_OF_A_PLANT)):
            async with self._deployed(self._gateways(number)) as deployment:
                if not await self._live(deployment, faults[first : first + ROUNDS_OF_A_PLANT], first, Mix()):
                    return self._kept(deployment)
        return True

    async def _split(self) -> bool:
        """Requests are split, and KV moves over TCP, in shared memory and over mutual TLS in turn."""
        options = self._options
        for number, first in enumerate(range(0, options.splits, ROUNDS_OF_A_PLANT)):
            rounds = min(ROUNDS_OF_A_PLANT, options.splits - first)
            kv_line = KV_LINES[number % len(KV_LINES)]
            async with self._deployed(self._gateways(number), ROLES, kv_line) as deployment:
                faults = list(faults_of(self._random, rounds, split_catalogue(deployment), options.only, most=2))
                if not await self._live(deployment, faults, first, SPLIT_MIX):
                    return self._kept(deployment)
        return True

    def _gateways(self, number: int) -> int:
        """Return the number of gateways of the deployment with this number."""
        return self._options.gateways or GATEWAYS[number % len(GATEWAYS)]

    async def _live(self, deployment: Deployment, faults: Sequence[Fault], done: int, mix: Mix) -> bool:
        auditor = Auditor(deployment)
        for number, fault in enumerate([Calm(), *faults], done):
            splits = deployment.kind.roles
            lasting = self._random.choice(SPLIT_SECONDS) if splits else self._random.uniform(0.1, LONGEST_FAULT)
            verdict = await attempt(deployment, auditor, fault, self._options.seed + number, lasting, mix)
            ready = f"ready in {verdict.ready_seconds:4.1f} s"
            complaints = list(verdict.complaints)
            if splits and isinstance(fault, Calm) and not verdict.fetches.get("done"):
                complaints.append("no KV has moved")
            say(f"{number:5} {verdict.fault:50} {ready}  {verdict.requests}  {verdict.fetches}", complaints)
            if complaints:
                return False
        return True

    async def _jobs(self) -> bool:
        """Kills, then the same with an end before the end, then everything that can be survived."""
        options, random = self._options, self._random
        some = max(1, options.kills // 5)
        plan = JobPlan(list(kills_of(random, options.kills)), options.lines, longest=LONGEST_ANSWER, seed=options.seed)
        plans = [
            plan,
            replace(plan, faults=list(kills_of(random, some)), ending="cancelled"),
            replace(plan, faults=list(kills_of(random, some)), ending="expired", window="60s", spread=0.2),
            replace(plan, faults=list(lasting_faults_of(random, some))),
        ]
        for plan in plans if options.kills else ():
            async with self._deployed(options.gateways or GATEWAYS[0]) as deployment:
                verdict = await JobTrial(deployment, Auditor(deployment), plan).run()
                say(f"{plan.ending} after {verdict.struck} faults: {verdict.told}", verdict.complaints)
                if verdict.complaints:
                    return self._kept(deployment)
        return True

    @asynccontextmanager
    async def _deployed(
        self, gateways: int, roles: tuple[str, ...] = (), kv_line: KvLine = "tcp"
    ) -> AsyncIterator[Deployment]:
        engines = f" and engines for {', '.join(roles)}, KV over {kv_line}" if roles else ""
        print(f"a deployment with {gateways} gateways{engines}", flush=True)
        options = self._options
        kind = Kind(self._model_dir, gateways, not options.model, options.ready_seconds, roles, kv_line)
        async with deployed(kind) as deployment:
            yield deployment

    def _kept(self, deployment: Deployment) -> bool:
        """Keep the logs of a failed deployment, for those who look for the cause."""
        ignore = shutil.ignore_patterns("*.sock")
        shutil.copytree(deployment.folder, self._options.keep, dirs_exist_ok=True, ignore=ignore)
        print(f"what the deployment has written is in {self._options.keep}", flush=True)
        return False


def say(line: str, complaints: Sequence[str]) -> None:
    more = [f"and {len(complaints) - MOST_SAID} more"] if len(complaints) > MOST_SAID else []
    print("\n      ".join([line, *complaints[:MOST_SAID], *more]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws the faults and the traffic")
    parser.add_argument("--rounds", type=int, default=100, help="of online traffic; 0: only jobs")
    parser.add_argument("--splits", type=int, default=60, help="rounds in which requests are split between engines")
    parser.add_argument("--only", default="", help="a part of the names of the faults of these rounds")
    parser.add_argument("--kills", type=int, default=100, help="over a batch job; 0: no jobs")
    parser.add_argument("--lines", type=int, default=2000, help="of a batch job")
    parser.add_argument("--gateways", type=int, default=0, help="of every deployment; 0: two, one and three in turn")
    parser.add_argument("--model", action="store_true", help="a real model of two layers, in place of digests")
    parser.add_argument("--ready-seconds", type=float, default=READY_SECONDS, help="bound on coming back after a fault")
    parser.add_argument(
        "--keep", type=Path, default=Path("chaos-failed"), help="folder for the logs of a failed deployment"
    )
    options = parser.parse_args()
    data_dir = Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))
    tokenizer = prepare_model("embedded", data_dir, Console(stderr=True))
    with tempfile.TemporaryDirectory(prefix="chaos-model-") as folder:
        model_dir = tiny_model(Path(folder), tokenizer) if options.model else tokenizer
        if not asyncio.run(Session(options, model_dir).run()):
            sys.exit(1)


if __name__ == "__main__":
    main()
