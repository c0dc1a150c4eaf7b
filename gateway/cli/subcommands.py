"""The table of `loralane`'s subcommands: where each is found, and what `loralane --help` says of it.

Modules are named by strings and imported when their command is called: to import all takes seconds, and a server would
import packages that it does not need, such as `lab`, on which nothing in this package may depend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Subcommand(NamedTuple):
    """A subcommand of `loralane`, not yet imported."""

    module: str
    name: str
    """Name in that module of a function, or of a typer app with further commands."""
    summary: str
    """The first paragraph of the command's own help."""


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "serve": Subcommand("gateway.cli.serve", "serve", "Serve a base model and its adapters over HTTP and gRPC."),
    "engine": Subcommand(
        "gateway.cli.engine",
        "engine",
        "Run one engine alone, with the sections model, engine and lanes of a gateway's file. Gateways name it in "
        "`engine.addresses`. An address that other machines can reach needs `engine.tls`. After SIGTERM, requests have "
        "`http.drain_seconds` of the file to move to other engines, or to end here.",
    ),
    "check": Subcommand(
        "gateway.cli.check",
        "check",
        "Validate a configuration file, and report all errors at once. Environment variables that it names must "
        "be set.",
    ),
    "chat": Subcommand("gateway.cli.chat", "chat", "Chat with the base model or an adapter in the terminal."),
    "simulate": Subcommand(
        "lab.commands.simulate",
        "simulate",
        "Run recorded or random traffic on the real scheduler, with a cost model in the device's place, and "
        "compare the policies and schedulers or, with --replicas or --router, the routers.",
    ),
    "analyze": Subcommand(
        "lab.commands.analyze",
        "analyze",
        "Print what recorded traffic looks like: arrivals, lengths, shared prefixes, adapters, lanes and tenants; "
        "and the settings that follow for a device.",
    ),
    "plan": Subcommand(
        "lab.commands.plan",
        "plan",
        "Find the devices that serve a model's traffic within its goals: the cheapest if prices are given, and "
        "otherwise the fewest. Candidates are computed from data sheets or from what --measure found with this "
        "model, and the best one is simulated on the real scheduler.",
    ),
    "usage": Subcommand(
        "gateway.cli.usage",
        "usage",
        "Report tokens, device time, amounts and costs by tenant, key, adapter, lane and day.",
    ),
    "adapters": Subcommand("gateway.cli.adapters", "app", "Show and change which adapters a running gateway serves."),
    "limits": Subcommand("gateway.cli.limits", "app", "Show and change the limits of tenants on a running gateway."),
    "engines": Subcommand(
        "gateway.cli.engines", "app", "Show running gateways' engines; drain, restart, add or remove them."
    ),
    "gateways": Subcommand("gateway.cli.gateways", "app", "Show running gateways, and drain them."),
    "lanes": Subcommand("gateway.cli.operations", "lanes", "Show a running gateway's lanes, and pause or drain them."),
    "requests": Subcommand(
        "gateway.cli.operations", "requests", "Show a running gateway's live requests, and cancel them."
    ),
    "tenants": Subcommand("gateway.cli.tenants", "tenants", "Show and change the tenants of a running gateway."),
    "keys": Subcommand("gateway.cli.keys", "keys", "Show and change tenants' API keys on a running gateway."),
    "admins": Subcommand("gateway.cli.admins", "admins", "Show and change the administrators of a running gateway."),
    "audit": Subcommand("gateway.cli.admins", "audit", "Show what administrators changed on a running gateway."),
    "batch": Subcommand(
        "gateway.cli.batch",
        "app",
        "Submit files of requests as jobs of the batch lane, follow them, and fetch their answers.",
    ),
    "bench": Subcommand("lab.commands.bench", "app", "Measure a server: throughput and latency, lane by lane."),
    "eval": Subcommand("lab.commands.eval", "app", "Evaluate the base model and its adapters."),
    "route": Subcommand("lab.commands.route", "app", "Train routers of virtual models."),
}
