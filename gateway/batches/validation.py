"""Performs the first task of a batch: check its input in a separate process, and write its index."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from gateway.batches.cpu_budget import MAX_CPU_SECONDS
from gateway.batches.input import CheckParameters, CheckResult, too_slow
from gateway.batches.lease import Lease
from gateway.batches.record import BatchError
from gateway.batches.store import BatchStore
from gateway.batches.validate import STORAGE_STATUS
from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.key_rules import NO_RULES, KeyRules
from gateway.core.routing import Catalog
from gateway.core.space import SpaceUse
from gateway.core.tenants import Tenant
from gateway.files.record import FileRecord
from gateway.files.service import Files
from gateway.requests.served_model import ServedModels

UNHEARD_SECONDS = 2.0
"""Age of a batch in seconds up to which an unknown model is not an error, because this gateway may not have learned yet
of an adapter that another gateway loaded for the batch."""
RETRY_SECONDS = 2.0
FULL_SECONDS = 30.0
"""Seconds until an input whose index the disk has no room for is checked again, which takes a process."""
SHOWN_BYTES = 2000
"""Maximum number of bytes at the end of a failed process's standard error that are logged."""

log = structlog.get_logger("batches")


class ValidationDied(Exception):
    """The process that checked an input died, or failed for another reason than the storage."""


@dataclass(frozen=True, slots=True)
class Validator:
    """Performs `validate` tasks, for one gateway process."""

    store: BatchStore
    files: Files
    tenant: Callable[[str], Tenant]
    """Returns the tenant of a name. Raises ApiError: TENANT_NOT_FOUND."""
    models: ServedModels
    max_lines: int
    max_line_bytes: int
    max_cpu_seconds: float = MAX_CPU_SECONDS
    rules: Callable[[str], KeyRules] = lambda _: NO_RULES
    """Returns the rules of the key with an id."""

    async def run(self, lease: Lease) -> None:
        """Validate the batch of a lease: on return it is validated, has failed, or was released to be tried again
        because Redis or the storage is away or a model may be too new. A cancellation kills the checking process.

        Raises ValidationDied if that process died. The task is not released then, so that the attempt counts.
        """
        try:
            result, index = await self._result(lease)
            if result.errors and self._may_be_unheard(lease, result):
                await self.store.release(lease, RETRY_SECONDS)
            elif result.errors:
                await self.store.invalid(lease, result.errors)
            else:
                name = lease.batch.index_name(lease.fence)
                await self.files.storage.write(name, _once(index), SpaceUse.RESULT, len(index))
                await self.store.validated(lease, result.total, result.model, result.model_lines)
        except ApiError as error:
            log.warning("batch_not_validated", batch=lease.batch_id, reason=error.reason)
            is_full = error.fault is Fault.INSUFFICIENT_STORAGE
            with suppress(ApiError):  # else the lease runs out
                await self.store.release(lease, FULL_SECONDS if is_full else RETRY_SECONDS)

    async def _result(self, lease: Lease) -> tuple[CheckResult, bytes]:
        """Pin and check the input. Return the result and the packed index, which is empty if there are errors. Raises
        ApiError only if a later attempt may succeed (others become errors in the result), and ValidationDied."""
        batch = lease.batch
        try:  # pin again: the gateway that created the batch may have died before it did
            source = await self.files.pin(batch.tenant, batch.input_file_id, batch.id)
            tenant = self.tenant(batch.tenant)
        except ApiError as error:
            if error.http_status >= 500:
                raise
            return CheckResult(errors=[BatchError(error.code or "invalid_request", error.message, error.param)]), b""
        return await check_in_process(self._parameters(lease, source, tenant))

    def _parameters(self, lease: Lease, source: FileRecord, tenant: Tenant) -> CheckParameters:
        return CheckParameters(
            url=self.files.url(source),
            endpoint=lease.batch.endpoint,
            tenant=tenant,
            rules=self.rules(lease.batch.key_id),
            catalogs=tuple(map(_encodable, self.models.catalogs)),
            max_lines=self.max_lines,
            max_line_bytes=self.max_line_bytes,
            max_cpu_seconds=self.max_cpu_seconds,
        )

    def _may_be_unheard(self, lease: Lease, result: CheckResult) -> bool:
        age = lease.batch.window_s - lease.seconds_left
        return age < UNHEARD_SECONDS and any(error.code == Fault.MODEL_NOT_FOUND.row.code for error in result.errors)


def _encodable(catalog: Catalog) -> Catalog:
    """Return a copy of a catalog that JSON can express: its live views of the registry become plain sets and
    dictionaries."""
    return Catalog(
        catalog.bases, frozenset(catalog.adapters), dict(catalog.aliases), dict(catalog.tenants), catalog.virtual
    )


async def check_in_process(parameters: CheckParameters) -> tuple[CheckResult, bytes]:
    """Check an input file in a separate process, which is killed if the caller is cancelled. Return the result and the
    packed index. Raises ApiError (STORAGE_UNAVAILABLE), or ValidationDied if the process fails otherwise."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.batches.validate"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        answer, complaint = await _exchange(process, msgspec.json.encode(parameters) + b"\n")
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status == -signal.SIGXCPU:
        return CheckResult(errors=[too_slow(parameters.max_cpu_seconds)]), b""
    if status:
        log.error("batch_validation_failed", status=status, error=complaint[-SHOWN_BYTES:].decode(errors="replace"))
        if status == STORAGE_STATUS:
            raise unavailable(Fault.STORAGE_UNAVAILABLE, "the input could not be read")
        raise ValidationDied(f"the process that checked the input ended with status {status}")
    result, _, index = answer.partition(b"\n")
    return msgspec.json.decode(result, type=CheckResult), index


async def _exchange(process: asyncio.subprocess.Process, question: bytes) -> tuple[bytes, bytes]:
    """Send `question` to the process and return its whole standard output and standard error. Standard input stays
    open, because the process exits when it is closed."""
    to, answer, complaint = process.stdin, process.stdout, process.stderr
    assert to is not None, "all are pipes"
    assert answer is not None, "all are pipes"
    assert complaint is not None, "all are pipes"
    with suppress(ConnectionError):  # the process has died, and its exit status says so
        to.write(question)
        await to.drain()
    said, complained = await asyncio.gather(answer.read(), complaint.read())
    return said, complained


async def _once(text: bytes) -> AsyncIterator[bytes]:
    yield text
