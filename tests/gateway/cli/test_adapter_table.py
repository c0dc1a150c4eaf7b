import io
from typing import Any

import pytest
from rich.console import Console

from gateway.api_schema.adapters import AdapterStatus
from gateway.cli.adapters import TIERS, SortKey, adapter_facts, adapter_json, adapter_table, matching_adapters

EMPTY_OF = {"str": "", "int": 0, "float": 0.0, "float | None": None, "bool": False, "tuple[str, ...]": ()}
EMPTY: dict[str, Any] = {name: EMPTY_OF[kind] for name, kind in AdapterStatus.__annotations__.items()}


def adapter(**fields: Any) -> AdapterStatus:
    return AdapterStatus(**{**EMPTY, **fields})


POET = adapter(
    name="poet",
    aliases=("team/bard",),
    tier="resident",
    version="0123456789abcdef",
    rank=8,
    bytes=2_500_000,
    pages=12,
    running=1,
    hits=40,
    loads=2,
    last_load_seconds=0.0125,
    idle_seconds=90.0,
    pinned=True,
)
PIRATE = adapter(name="pirate", tier="disk", rank=16, waiting=3, loads=5, error="its files are gone")
COOK = adapter(name="cook", tier="host", rank=4, bytes=1, idle_seconds=4000.0)


def printed(thing) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(thing)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        (SortKey.name, "cook pirate poet"),
        (SortKey.tier, "pirate cook poet"),
        (SortKey.rank, "pirate poet cook"),
        (SortKey.bytes, "poet cook pirate"),
        (SortKey.pages, "poet cook pirate"),
        (SortKey.running, "poet cook pirate"),
        (SortKey.waiting, "pirate cook poet"),
        (SortKey.hits, "poet cook pirate"),
        (SortKey.loads, "pirate poet cook"),
        (SortKey.load_ms, "poet cook pirate"),
        (SortKey.last_use, "poet cook pirate"),
    ],
)
def test_sorting(sort, names):
    assert [adapter.name for adapter in matching_adapters([POET, PIRATE, COOK], "*", None, sort)] == names.split()


@pytest.mark.parametrize(
    ("pattern", "tier", "names"),
    [("*", "host", ["cook"]), ("p*", None, ["pirate", "poet"]), ("team/*", None, ["poet"]), ("p*", "host", [])],
)
def test_filtering(pattern, tier, names):
    assert [adapter.name for adapter in matching_adapters([POET, PIRATE, COOK], pattern, tier, SortKey.name)] == names


def test_a_row_has_what_an_operator_looks_for():
    [_, poet, pirate] = printed(adapter_table([POET, PIRATE])).splitlines()
    assert poet.split("  ")[0].strip() == "poet"
    for cell in ("team/bard", "resident, pinned", "0123456789ab ", "2.5", "12.5", "2 min ago"):
        assert cell in poet
    assert "never" in pirate


def test_json_has_every_field():
    document = adapter_json(PIRATE)
    assert set(document) == set(AdapterStatus.__struct_fields__)
    assert (document["bytes"], document["idle_seconds"], document["aliases"]) == (0, None, [])
    assert adapter_json(POET)["idle_seconds"] == 90.0


def test_facts_tell_why_an_adapter_is_not_served():
    assert "its files are gone" in printed(adapter_facts(PIRATE))


def test_every_tier_can_be_sorted_by():
    adapters = [adapter(name="a", tier=tier) for tier in reversed(TIERS)]
    assert [adapter.tier for adapter in matching_adapters(adapters, "*", None, SortKey.tier)] == list(TIERS)
