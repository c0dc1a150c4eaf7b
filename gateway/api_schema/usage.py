"""Usage reports: their structs, and the operation."""

from __future__ import annotations

from typing import Any, Literal, get_args

from msgspec import UNSET, Struct, UnsetType, field

from gateway.api_schema.common import OF_TENANT
from gateway.api_schema.operation import Operation, admin
from gateway.core.errors import Fault
from gateway.core.lanes import LaneName

USAGE = "/admin/v1/usage"
CSV = "text/csv"
FORMATS = ("json", "csv")
Dimension = Literal["tenant", "key", "adapter", "lane", "day"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
DEFAULT_GROUPS: tuple[Dimension, ...] = ("tenant", "adapter", "lane")
NO_GROUPS = "none"
"""Value of `group_by` that asks for one line."""


class UsageFigures(Struct, kw_only=True):
    """Usage figures. Money is decimal text. `amount` is null without configured prices, `cost` without a configured
    `device_hour`, and `cost_per_million_tokens` without a `cost` or any tokens."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    """The part of prompt_tokens that was found in the prefix cache."""
    completion_tokens: int
    device_seconds: float
    amount: str | None
    """Price of the tokens."""
    cost: str | None
    """Cost of the device time."""
    cost_per_million_tokens: str | None


class UsageLine(UsageFigures, kw_only=True):
    """Usage figures of one group. Fields among tenant, key, adapter, lane and day are absent unless `group_by` names
    them."""

    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    lane: LaneName | UnsetType = UNSET
    day: str | UnsetType = UNSET


class UsageReport(Struct):
    since: str = field(name="from")
    until: str = field(name="to")
    group_by: list[str]
    currency: str
    usage: list[UsageLine]
    total: UsageFigures


DAY = {"type": "string", "format": "date"}
QUERY = {
    **OF_TENANT,
    "key": {"type": "string", "description": "Id of an API key."},
    "adapter": {"type": "string", "description": "Pattern of adapter names, such as support-*."},
    "lane": {"enum": list(get_args(LaneName))},
    "from": {**DAY, "description": "First day (UTC). The default is the first day of the month of `to`."},
    "to": {**DAY, "description": "Last day (UTC), included. The default is today."},
    "group_by": {
        "type": "string",
        "description": f"Any of {','.join(DIMENSIONS)}, or empty. The default is {','.join(DEFAULT_GROUPS)}.",
    },
    "format": {"enum": list(FORMATS)},
}
FAULTS = frozenset({Fault.INVALID_REQUEST, Fault.LIMITER_UNAVAILABLE})
REPORT = admin("GET", USAGE, "Report usage, prices and costs.", UsageReport, FAULTS, query=QUERY, text=CSV)

OPERATIONS: tuple[Operation[Any], ...] = (REPORT,)
