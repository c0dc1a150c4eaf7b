"""Main module of the engine process: `python -m engine.serve.server --config JSON --address unix:PATH`. It serves until
SIGTERM, SIGINT or, with `--until-stdin-closes`, the end of standard input, so that it never outlives a gateway."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import structlog

from engine.config import EngineConfig
from engine.core.messages.moves import PageMemory
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.base import RankDied
from engine.inbox import EngineStopped
from engine.kv.line import OwnEngine
from engine.kv.mover import KvMover, listen_address
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.process.files import in_use
from engine.process.load_attempts import LoadAttempts
from engine.process.lossy_log import log_renderers, lossy_loggers
from engine.process.pulse import Loading, write_loading
from engine.process.stopping import read_line_of_stdin, stop_with_signals, stop_with_stdin
from engine.rpc.service import MAX_GATEWAYS, EngineService
from engine.rpc.target import EngineTarget, EngineTls
from engine.rpc.transport import open_port, server_options
from engine.serve.build import (
    Progress,
    build_fake,
    build_real,
    describe_life,
    describe_predictions,
    describe_sizes,
    heart,
)
from engine.serve.step_store import StepStore, step_store

log = structlog.get_logger("engine")

SAVE_EVERY_S = 60.0
"""Seconds between two saves of the step-time model."""
SERVER_THREADS = 2 * MAX_GATEWAYS + 64
"""Maximum number of threads of the gRPC server: two for each connected gateway, for its session and its feed of load
reports (see engine/rpc/news.py), and some for adapter loads and other calls. Threads are started as they are needed."""


def await_model(config: EngineConfig, on_progress: Progress, *, fake: bool) -> EngineConfig:
    """Return `config` with the path of the model folder, a line of standard input. Unless `fake`, load the CPU kernels
    before, and report their progress. Raises SystemExit if standard input ends before."""
    if not fake:
        from engine.model.runner.kernels import load_cpu_kernels

        load_cpu_kernels(config, on_progress)
    try:
        return replace(config, model=read_line_of_stdin())
    except EOFError:
        raise SystemExit("the gateway ended before the model was prepared") from None


def serve(
    config: EngineConfig,
    target: EngineTarget,
    *,
    fake: bool,
    until_stdin_closes: bool,
    loading: Path | None = None,
    pulse: Path | None = None,
    previous: str = "",
    drain_seconds: float = 0.0,
) -> None:
    """Load the model, serve gRPC at `target` and run the step loop in this thread until told to stop. Then close all,
    and save the step-time model, which is also saved every minute, in `state_dir`.

    Args:
        config: if it names no model, a line of standard input does.
        loading, pulse: files for the progress of the start, and for beats of the step loop (`engine.process.pulse`).
        previous: the engine process before this one, a `PreviousLife` as JSON, or empty.
        drain_seconds: time that requests have after SIGTERM to end here or to move to other engines; 0 means none.
    """
    tell = _teller(loading)
    if not config.model:
        config = await_model(config, tell, fake=fake)
    try:
        core, executor, info = (build_fake if fake else build_real)(config, tell)
    except ValueError as error:  # the model or the configuration cannot be served: no traceback says more
        raise SystemExit(f"error: {error}") from error
    describe_sizes(info, core)
    describe_life(info, previous)
    engine = Engine(EngineState.create(core), executor, beat=heart(info, pulse))
    ranks = config.tensor_parallel, config.pipeline_parallel
    store = step_store(config.state_dir, config.threads, info.device, info.dtype, info.model_hash, ranks)
    if store is not None and store.load(engine.state.ledger.model):
        log.info("step_time_known", steps=engine.state.ledger.model.num_steps)
        if store.is_fit_for_advice:
            describe_predictions(info, core, engine.state.ledger.model)
    attempts = LoadAttempts(Path(config.state_dir) / "adapter_loads" if config.state_dir else None)
    mover = start_mover(engine, info, executor.page_memory, config.kv_listen, target)
    service = EngineService(engine, info, attempts)
    server = _listen(service, target.address, target.tls)
    drain = partial(service.draining.begin, stop=True, seconds=drain_seconds, final=True)
    stop_with_signals(engine.stop, drain if drain_seconds else None)
    if until_stdin_closes:
        stop_with_stdin(engine.stop)
    if store is not None:
        threading.Thread(target=_keep_saving, args=(engine, store), daemon=True).start()
    _settle_memory()
    log.info("ready", address=target.address, device=info.device, dtype=info.dtype, pages=info.num_pages)
    try:
        engine.run(service.deliver)
    finally:  # after a crash too: open sessions would keep this process alive and their requests waiting
        if mover is not None:
            mover.close()
        server.stop(grace=0.5).wait()
        executor.close()
    attempts.forget()
    if store is not None:
        store.save(engine.state.ledger.model.to_json())


def start_mover(
    engine: Engine, info: pb.EngineInfo, memory: PageMemory | None, setting: str, target: EngineTarget
) -> KvMover | None:
    """Let an engine fetch KV pages and, unless `setting` (`engine.kv_listen`) is empty, serve its own at an address
    that is entered in `info`. Return None without host pages. Raises ValueError if it cannot listen."""
    if memory is None or not engine.state.host.num_pages:
        if setting:
            raise ValueError("engine.kv_listen needs host pages, for which too little memory is free")
        info.kv_identity = ""
        return None
    try:
        own = OwnEngine(info.kv_identity, memory, engine.inbox.put, engine.clock)
        mover = KvMover(own, listen_address(setting, target), target.tls)
    except OSError as error:
        raise ValueError(f"engine.kv_listen: {error}") from error
    engine.connect(mover)
    info.kv_address = mover.address
    return mover


def _keep_saving(engine: Engine, store: StepStore) -> None:
    """Save the step-time model every minute, until the engine stops; skip a save if no step ends in time for it. Runs
    in a thread of its own."""
    while True:
        time.sleep(SAVE_EVERY_S)
        try:
            store.save(engine.inspect(lambda state: state.ledger.model.to_json()))
        except TimeoutError:
            log.info("step_time_unsaved", reason="no step ended in time")
        except EngineStopped:
            return


def _listen(service: EngineService, address: str, tls: EngineTls | None = None) -> grpc.Server:
    """Start and return the gRPC server of an engine at `address`. With `tls`, gateways must show a certificate of its
    authority. Raises ValueError if the files cannot be used, RuntimeError if the address is not free."""
    threads = ThreadPoolExecutor(SERVER_THREADS, thread_name_prefix="grpc")
    server = grpc.server(threads, options=server_options(address))
    pb_grpc.add_EngineServicer_to_server(service, server)
    open_port(server, address, tls)
    server.start()
    return server


def _settle_memory() -> None:
    """Exempt the objects that exist now from garbage collection and enable it again. They live as long as the process:
    collecting once would take 0.16 s and free 4 %."""
    gc.freeze()
    gc.enable()


def _teller(loading: Path | None) -> Progress:
    """Return a function of (what, done, total) that reports the progress of the start: it logs where a part begins and
    ends and, if `loading` is given, writes every call to that file. Errors of writing are ignored."""

    def tell(what: str, done: int, total: int) -> None:
        if done in (0, total):
            log.info("loading", what=what, done=done, total=total)
        if loading is not None:
            with suppress(OSError):  # a full disk costs the bar, and not the start
                write_loading(loading, Loading(what, done, total))

    return tell


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine.serve.server", description="Runs one loralane engine process."
    )
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--address", required=True, help="unix:/path/to/socket, or HOST:PORT")
    tls_help = "PEM files for mutual TLS, which other hosts than 127.0.0.1 need"
    parser.add_argument("--tls", nargs=3, type=Path, metavar=("CA", "CERTIFICATE", "KEY"), help=tls_help)
    parser.add_argument("--fake", action="store_true", help="run without a model: tokens are digests")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when the starting process is gone")
    parser.add_argument("--loading", type=Path, help="a file in which the start says how far it is")
    parser.add_argument("--pulse", type=Path, help="a file in which the step loop shows that it moves")
    drain_help = "time after SIGTERM in which requests may end here, or move to other engines"
    parser.add_argument("--drain-seconds", type=float, default=0.0, metavar="S", help=drain_help)
    parser.add_argument("--previous", default="", help="the engine process before this one, PreviousLife as JSON")
    args = parser.parse_args()
    tls = EngineTls(*args.tls) if args.tls else None
    try:
        target = EngineTarget(args.address, tls)
    except ValueError as error:
        parser.error(str(error))
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *log_renderers(sys.stderr),
        ],
        # On a terminal the gateway shows the progress of the start, which info lines of the engine would disturb.
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING if sys.stderr.isatty() else logging.INFO),
        logger_factory=lossy_loggers(sys.stderr),
    )
    config = EngineConfig.from_json(args.config)
    keep_compiled_kernels(config, os.environ)
    gc.disable()  # collections take 0.3 s of the imports
    with _ending_like_ranks(), in_use(Path(config.state_dir)) if config.state_dir else nullcontext():
        serve(
            config,
            target,
            fake=args.fake,
            until_stdin_closes=args.until_stdin_closes,
            loading=args.loading,
            pulse=args.pulse,
            previous=args.previous,
            drain_seconds=args.drain_seconds,
        )


@contextmanager
def _ending_like_ranks() -> Iterator[None]:
    """While the `with` block runs, if a signal ends another rank's process, end this one by the same signal, so that
    what is concluded from an engine's death holds for its ranks."""
    try:
        yield
    except RankDied as error:
        if not error.signal:
            raise
        print(f"the engine ends: {error}", file=sys.stderr, flush=True)  # the log is written later, by a thread
        if error.signal != signal.SIGKILL:
            signal.signal(error.signal, signal.SIG_DFL)
        os.kill(os.getpid(), error.signal)


def keep_compiled_kernels(config: EngineConfig, environment: MutableMapping[str, str]) -> None:
    """Make Triton, which is imported later, keep compiled kernels in the `state_dir` for the next process, unless there
    is none, or the operator's environment names another folder."""
    if config.state_dir:
        environment.setdefault("TRITON_CACHE_DIR", str(Path(config.state_dir) / "triton"))


if __name__ == "__main__":
    main()
