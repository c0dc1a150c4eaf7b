"""What is checked before minutes are spent on loading a model: everything that is known to be needed later."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from gateway.config.file import ConfigError
from gateway.config.whole import Config
from gateway.serve.addresses import fronts
from gateway.serve.launch import StartError
from gateway.serve.sockets import bound
from gateway.store import StoreStartError, exclusive, prepared

MIN_FREE_BYTES = 128 * 2**20
"""For the store's append-only file and tenants' files. A model that has to be converted needs more, and says so."""


def check_start(config: Config, data_dir: Path) -> None:
    """Create the data directory, and check it, the place of temporary folders, the ports, certificates and adapters.

    Raises:
        StartError: the message names everything that is wrong, one problem a line.
    """
    folders = [*_directory_problems(config, data_dir), *_temporary_problems()]
    problems = [*folders, *_port_problems(config), *_adapter_problems(config)]
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
    """Make a temporary folder, as the engine's socket and the metrics of several processes need them."""
    try:
        with tempfile.TemporaryDirectory(prefix="loralane-"):
            return
    except OSError as error:
        yield f"no temporary folder can be made: {error}; have TMPDIR name a folder that can be written"


def _store_problems(data_dir: Path) -> Iterator[str]:
    """Look whether another gateway embeds its store there."""
    try:
        with exclusive(prepared(data_dir / "valkey")):
            return
    except StoreStartError as error:
        yield str(error)
    except OSError as error:
        yield f"the data directory {data_dir} cannot be used: {error}; use --data-dir"


def _port_problems(config: Config) -> Iterator[str]:
    """Take every port for a moment, all at the same time, so that two that are the same are noticed too."""
    with ExitStack() as stack:
        for front in fronts(config):
            for address in (front.http, front.grpc):
                try:
                    address.certificate()
                    taken = stack.enter_context(closing(bound(address.host, address.port)))
                    taken.listen()  # or a second socket of this process could be bound to it
                except (ConfigError, StartError) as error:
                    yield str(error)
                except OSError as error:
                    yield f"cannot listen on {address.host}:{address.port}: {error.strerror}; use another port"


def _adapter_problems(config: Config) -> Iterator[str]:
    for name, folder in config.adapters.preload.items():
        if not (folder / "adapter_config.json").is_file():
            what = "has no adapter_config.json" if folder.is_dir() else "is no folder"
            yield f"adapter {name}: {folder} {what}"
