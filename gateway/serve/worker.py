"""Runs one of several gateway processes: `python -m gateway.serve.worker FD`, started by the fleet. A composition root.

FD is a socket to the fleet process. Over it the fleet sends what to serve, and then, line by line, orders to listen, to
print the banner and to apply another configuration. When the socket closes, for any reason, this process stops. When it
stops for another reason, it ends its side of the socket at once, so that the fleet waits for no answers.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import AsyncExitStack

import msgspec
import structlog

from gateway.config.file import ConfigError
from gateway.serve.app import BuiltGateway, built_gateway
from gateway.serve.endpoints import listening
from gateway.serve.launch import StartError
from gateway.serve.orders import ANNOUNCE, FOLLOW, FOLLOWING, LISTEN, LISTENING, READY, SEED, Orders
from gateway.serve.process import configure_logging, freeze_memory, leave_torch_out, run_loop
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import INTERRUPTED, Stop, StoppedEarly, exit_process
from gateway.terminal.console import Console
from gateway.terminal.output import print_error


async def work(channel: socket.socket) -> bool:
    """Read the orders from `channel`, the socket to the fleet process, and serve until a signal asks to stop or the
    socket closes; returns whether the stop is hurried. Raises StartError or ConfigError if it cannot start,
    StoppedEarly if the signal came before it was ready."""
    reader, writer = await asyncio.open_connection(sock=channel)
    orders = await Orders.read(reader)
    structlog.contextvars.bind_contextvars(gateway=orders.number)
    stop, console = Stop(orders.launch.config.http.drain), Console(stderr=True)
    stop.listen(hangup=False, has_parent=True)
    with stop.starting():
        async with built_gateway(orders.launch, orders.backends, StartBar.hidden()) as app:
            stop.started()
            freeze_memory()
            writer.write(READY)
            obeying = asyncio.create_task(_obey(app, stop, reader, writer, console))
            told = asyncio.create_task(stop.asked.wait())
            await asyncio.wait((obeying, told), return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if not obeying.done():
                obeying.cancel()
                await asyncio.wait((obeying,))
            if not obeying.cancelled():
                obeying.result()
    return stop.in_hurry


async def _obey(
    app: BuiltGateway, stop: Stop, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, console: Console
) -> None:
    """Carry out the fleet's orders (listen, print the banner, apply settings, seed the registries) and answer them,
    until the fleet process has ended. Then, and also when cancelled, answer no more, and drain as `stop` says."""
    async with AsyncExitStack() as stack:
        while order := await reader.readline():
            if order == LISTEN:
                ports = await stack.enter_async_context(listening(app.servers, stop, shared=True))
                stack.callback(writer.write_eof)  # before the drain
                writer.write(LISTENING)
            elif order == ANNOUNCE:
                app.banner(ports).print(console)
            elif order == FOLLOW:
                config = (await Orders.read(reader)).launch.config
                await app.reload_target.apply_settings(config)
                writer.write(FOLLOWING)
            elif order == SEED:
                writer.write(msgspec.json.encode(await app.reload_target.seed(config)) + b"\n")
        stop.orphan()


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the fleet process handles it
    leave_torch_out()
    configure_logging()
    try:
        if run_loop(work(socket.socket(fileno=int(sys.argv[1])))):
            exit_process(0)
    except (ConfigError, StartError) as error:
        print_error(str(error))
        raise SystemExit(1) from error
    except StoppedEarly:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
