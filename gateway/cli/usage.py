"""`loralane usage`: reports tokens, device time, amounts and costs of tenants, keys, adapters and lanes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from gateway.api_schema.usage import DIMENSIONS, NO_GROUPS, UsageFigures
from gateway.cli.http import admin
from gateway.cli.options import DEMO_KEY, LOCAL_URL, AdminKey, AsJson, ServerUrl
from gateway.terminal.output import print_wide
from gateway.usage.render import FIGURES, MONEY, csv_text

TITLES = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "completion",
    "device_seconds": "device s",
    "amount": "amount",
    "cost": "cost",
    "cost_per_million_tokens": "cost / million",
}
MONEY_PLACES = 4

Line = Mapping[str, Any]


def usage(
    tenant: Annotated[str, typer.Option(help="Only usage of this tenant.")] = "",
    key_id: Annotated[str, typer.Option("--key-id", help="Only usage of the API key with this id.")] = "",
    adapter: Annotated[str, typer.Option(help="Only these adapters (or the base model), as in 'support-*'.")] = "",
    lane: Annotated[str, typer.Option(help="Only usage of this lane: interactive or batch.")] = "",
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="First day, UTC; default: the month's 1st.")] = "",
    until: Annotated[str, typer.Option("--to", metavar="DAY", help="Last day (UTC), included; default: today.")] = "",
    group_by: Annotated[
        str, typer.Option("--by", help=f"Columns to group by, of {','.join(DIMENSIONS)}; none: the total only.")
    ] = "tenant,adapter,lane",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, without the total.")] = False,
    as_json: AsJson = False,
    url: ServerUrl = LOCAL_URL,
    key: AdminKey = DEMO_KEY,
) -> None:
    """Report tokens, device time, amounts and costs by tenant, key, adapter, lane and day.

    - `loralane usage` reports this month, by tenant, adapter and lane
    - `loralane usage --tenant acme --by key,day --from 2026-07-01 --to 2026-07-31 --csv > july.csv`
    - `loralane usage --by lane` shows what a million tokens of each lane cost
    """
    if as_csv and as_json:
        raise typer.BadParameter("choose one of --csv and --json")
    groups = [] if group_by == NO_GROUPS else group_by.split(",") if group_by else None
    filters = {"tenant": tenant, "key": key_id, "adapter": adapter, "lane": lane}
    with admin(url, key) as client:
        report = client.usage(**filters, since=since, until=until, group_by=groups)
    lines = [_fields(line, report.group_by) for line in report.usage]
    if as_csv:
        print(csv_text(report.group_by, [{**line, "currency": report.currency} for line in lines]), end="")
    elif as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        print_wide(usage_table(lines, _fields(report.total, ()), report.group_by, report.currency))


def usage_table(lines: Sequence[Line], total: Line, group_by: Sequence[str], currency: str) -> Table:
    """Return a table with a row for each line and the total as its footer; with an empty `group_by`, the total is the
    only row. Money columns without a total are left out."""
    columns = [*FIGURES, *(name for name in MONEY if total[name] is not None)]
    table = Table(box=None, show_footer=bool(group_by))
    for number, name in enumerate(group_by):
        table.add_column(name, "" if number else "total", no_wrap=True)
    for name in columns:
        title = f"{TITLES[name]}, {currency}" if name in MONEY else TITLES[name]
        table.add_column(title, _cell(total, name), justify="right", no_wrap=True)
    for line in lines if group_by else [total]:
        table.add_row(*(line[name] for name in group_by), *(_cell(line, name) for name in columns))
    return table


def _cell(line: Line, name: str) -> str:
    value = line[name]
    if value is None:
        return "-"
    if name in MONEY:
        return f"{Decimal(value):,.{MONEY_PLACES}f}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _fields(line: UsageFigures, group_by: Sequence[str]) -> Line:
    fields = msgspec.to_builtins(line)
    return {name: fields[name] for name in (*group_by, *FIGURES, *MONEY)}
