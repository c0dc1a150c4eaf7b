"""The services of one gateway, which its HTTP and gRPC ports expose."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.accounts.registry import AccountRegistry
from gateway.audit.log import AuditLog
from gateway.batches.eta import EtaEstimator
from gateway.batches.service import Batches
from gateway.files.service import Files
from gateway.observe.metrics import Metrics
from gateway.observe.operations import Operations
from gateway.registry.gateways import GatewayDirectory
from gateway.requests.service import Gateway
from gateway.responses.service import Responses
from gateway.usage.report import UsageAdmin


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that the HTTP and gRPC APIs expose to tenants and operators."""

    gateway: Gateway
    accounts: AccountRegistry
    """The tenants and keys, which also authenticate callers."""
    metrics: Metrics
    operations: Operations
    """The lanes, the live and recent requests, and history."""
    gateways: GatewayDirectory
    """The gateways that share one Redis."""
    usage: UsageAdmin
    files: Files
    batches: Batches
    etas: EtaEstimator
    """Estimates when batches end."""
    audit: AuditLog
    """What administrators changed."""
    responses: Responses
    """Stores and reads responses."""
