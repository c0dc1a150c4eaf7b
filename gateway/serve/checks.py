"""Checks data directory, ports, certificates, models' sources and adapters before a start spends minutes on loading a
model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from engine.process.model_source import ModelNotFound, check_source
from gateway.config.file import ConfigError
from gateway.config.whole import Config
from gateway.redis.server import StoreStartError, created_folder, locked_folder
from gateway.serve.addresses import bind_socket, endpoints
from gateway.serve.launch import StartError

MIN_FREE_BYTES = 128 * 2**20
"""Minimum free disk for the store's append-only file and tenants' files. The preparation of a model separately checks
that there is enough for the model."""


def check_start(config: Config, data_dir: Path) -> None:
    """Create the data directory, and check it (also its free disk and lock), the place for temporary folders, the ports
    (by binding them for a moment), the certificates, and the models' sources, without asking a hub. Raises StartError,
    whose message lists all problems, one per line."""
    folders = [*_directory_problems(config, data_dir), *_temporary_problems()]
    problems = [*folders, *_port_problems(config), *_model_problems(config)]
    if problems:
        raise StartError("\n".join(problems))


def _directory_problems(config: Config, data_dir: Path) -> Iterator[str]:
    try:
        (data_dir / "adapters").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"the data directory {data_dir} cannot be created: {error.strerror}; use --data-dir"
        return
    if not os.access(data_dir, os.W_OK | os.X_OK):
        yield f"the data directory {data_dir} cannot be written; use --data-dir"
        return
    free = shutil.disk_usage(data_dir).free
    if free < MIN_FREE_BYTES:
        yield (
            f"the data directory {data_dir} has {free / 2**20:.0f} MiB of free disk, and at least "
            f"{MIN_FREE_BYTES / 2**20:.0f} are needed; free some, or use --data-dir"
        )
    if not config.redis.url:
        yield from _store_problems(data_dir)


def _temporary_problems() -> Iterator[str]:
    """Yield a problem if no temporary folder can be made. The engine's socket and the metrics of several processes need
    one."""
    try:
        with tempfile.TemporaryDirectory(prefix="loralane-"):
            return
    except OSError as error:
        yield f"no temporary folder can be made: {error}; have TMPDIR name a folder that can be written"


def _store_problems(data_dir: Path) -> Iterator[str]:
    """Yield a problem if the embedded store cannot use the data directory, or another gateway's store uses it."""
    try:
        with locked_folder(created_folder(data_dir / "valkey")):
            return
    except StoreStartError as error:
        yield str(error)
    except OSError as error:
        yield f"the data directory {data_dir} cannot be used: {error}; use --data-dir"


def _port_problems(config: Config) -> Iterator[str]:
    """Yield a problem for each certificate that cannot be used and each port that is not free. All ports are bound at
    the same time, so that a port that is configured twice is found, too."""
    with ExitStack() as stack:
        for endpoint in endpoints(config):
            for address in (endpoint.http, endpoint.grpc):
                try:
                    address.certificate()
                    taken = stack.enter_context(closing(bind_socket(address.host, address.port)))
                    taken.listen()  # otherwise this process could bind a second socket to it
                except (ConfigError, StartError) as error:
                    yield str(error)
                except OSError as error:
                    yield f"cannot listen on {address.host}:{address.port}: {error.strerror}; use another port"


def _model_problems(config: Config) -> Iterator[str]:
    for settings in config.served.values():
        try:
            check_source(settings.model.source)
        except (OSError, ModelNotFound) as error:
            yield f"the model {settings.model.source} cannot be served: {error}"
