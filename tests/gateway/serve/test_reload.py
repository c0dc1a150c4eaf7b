"""SIGHUP, from the signal on: what is read, told and taken up, by one gateway and by several."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from engine.config import EngineConfig
from gateway.config.file import ConfigError
from gateway.config.lanes import InteractiveLane, LanesConfig
from gateway.config.models import ModelConfig, ModelSettings
from gateway.config.whole import Config
from gateway.serve.reload import reload, reloading

SLOWER = Config(lanes=LanesConfig(InteractiveLane(ttft_s=2.0)))


class Taken:
    """Stands in for a running gateway: it records the configurations that it gets, and has a console to print on."""

    def __init__(self, failed=None):
        self.configs, self.failed, self.text = [], failed or {}, io.StringIO()
        self.console = Console(file=self.text, width=40)

    async def apply(self, config):
        self.configs.append(config)
        return self.failed


async def test_what_has_changed_is_told_and_taken_up():
    taken = Taken({"tone": "no such folder"})
    assert await reload(lambda: SLOWER, Config(), taken.apply, taken.console) == SLOWER
    assert taken.configs == [SLOWER]
    assert taken.text.getvalue().splitlines() == [
        "  lanes.interactive.ttft_s: 0.5 -> 2.0",
        "! adapters.preload.tone: no such folder",
        "reloaded",
    ]


async def test_an_adapter_of_one_of_several_models_that_cannot_be_served_is_told_at_its_place():
    tone = ModelSettings(ModelConfig("x", "small"), EngineConfig(model=""), preload={"tone": Path("/tone")})
    read = Config(models={"large": replace(tone, preload={}), "small": tone})
    taken = Taken({"tone": "no such folder"})
    await reload(lambda: read, read, taken.apply, taken.console)
    assert "! models.small.adapters.preload.tone: no such folder" in taken.text.getvalue().splitlines()


async def test_what_needs_a_restart_is_named_and_left():
    taken = Taken()
    read = replace(SLOWER, gateways=2)
    assert await reload(lambda: read, Config(), taken.apply, taken.console) == SLOWER
    assert taken.configs == [SLOWER]
    assert "! gateways: differs, and needs a restart" in taken.text.getvalue()


async def test_a_file_that_cannot_be_used_changes_nothing():
    def read():
        raise ConfigError("lanes.fast: unknown key")

    taken = Taken()
    assert await reload(read, SLOWER, taken.apply, taken.console) is SLOWER
    assert taken.configs == []
    assert taken.text.getvalue() == "not reloaded: lanes.fast: unknown key\n"


async def test_a_file_that_says_the_same_is_taken_up_again():
    """An adapter's folder that was missing may be there by now."""
    taken = Taken()
    await reload(lambda: SLOWER, SLOWER, taken.apply, taken.console)
    assert taken.configs == [SLOWER]
    assert taken.text.getvalue() == "reloaded: the file says what it said before\n"


async def test_each_time_it_is_asked_and_after_a_bug_too():
    taken, asked, reads = Taken(), asyncio.Event(), iter([RuntimeError("a bug"), SLOWER])

    def read():
        found = next(reads)
        if isinstance(found, Exception):
            raise found
        return found

    async with reloading(asked, read, Config(), taken.apply, taken.console):
        for _ in range(2):
            asked.set()
            async with asyncio.timeout(10):
                while asked.is_set():
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            while not taken.configs:
                await asyncio.sleep(0.01)
    assert taken.configs == [SLOWER]


async def test_without_a_file_nothing_waits():
    taken, before = Taken(), len(asyncio.all_tasks())
    async with reloading(asyncio.Event(), None, Config(), taken.apply, taken.console):
        assert len(asyncio.all_tasks()) == before
