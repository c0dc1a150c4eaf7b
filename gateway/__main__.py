"""Entry point of the command `loralane`, which `python -m gateway` also runs."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the `loralane` subcommand that the command line names. Ctrl-C ends the process without a traceback also while
    the command's modules are imported, which takes a second, and while Python exits."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # no child of a fork uses gRPC, which would warn of each
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gateway.cli.main import main as command

    signal.signal(signal.SIGINT, before)
    try:
        command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
