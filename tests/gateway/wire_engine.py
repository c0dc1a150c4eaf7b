"""Engine processes behind a gRPC channel that is not there: the gateway's real client talks to them, and a test says
what they do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine.core.messages.requests import ErrorCode, FinishReason, Refusal, TokenEvent, TokenLogprobs
from engine.pb import engine_pb2 as pb
from engine.rpc.target import EngineTarget
from engine.rpc.wire import PROTOCOL, event_to_pb

VECTOR = b"\0\0\x80?" * 8
"""Eight elements of 1.0 in fp32."""
DEVICE_SECONDS = 0.001
"""Device time of each event with tokens."""


def gone(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "the engine is gone")


@dataclass
class Work:
    """A request that an engine process has: one answer, or a part of one."""

    submit: pb.Submit
    sent: int = 0
    """Tokens that the engine has sent for it."""
    device: float = 0.0

    @property
    def id(self) -> str:
        return self.submit.request_id

    @property
    def answer(self) -> str:
        """Id of the whole answer, with which the ids of its parts in several processes begin."""
        return re.split(r"[+/]", self.id)[0]

    @property
    def left(self) -> int:
        """Tokens that the answer may still have."""
        return self.submit.params.max_tokens - len(self.submit.produced) - self.sent


class Session:
    """The call in which a gateway and an engine process exchange commands and events."""

    def __init__(self, engine: WireEngine) -> None:
        self._engine = engine
        self._messages: asyncio.Queue[pb.StepEvents | BaseException] = asyncio.Queue()

    async def write(self, commands: pb.Commands) -> None:
        for command in commands.commands:
            self._engine.obey(command)

    def send(self, message: pb.StepEvents | BaseException) -> None:
        self._messages.put_nowait(message)

    def cancel(self) -> None:
        """End the session from the gateway's side; its reader is told so as gRPC does it."""
        self._engine.leave(self)
        self.send(asyncio.CancelledError())

    def __aiter__(self) -> Session:
        return self

    async def __anext__(self) -> pb.StepEvents:
        message = await self._messages.get()
        if isinstance(message, BaseException):
            raise message
        return message


@dataclass
class WireEngine:
    """One place with an engine: a process, and after its loss the next one."""

    name: str
    model: str = "tiny"
    up: bool = True
    lives: int = 1
    draining: bool = False
    hangs: bool = False
    """True means that the process sends no news, although it is connected."""
    previous: pb.PreviousLife | None = None
    works: dict[str, Work] = field(default_factory=dict)
    fetches: set[str] = field(default_factory=set)
    """Requests whose KV is being fetched, and which are yet to be submitted."""
    submitted: list[str] = field(default_factory=list)
    """Ids of all requests that any process had."""
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens of each whole answer so far, by its id, with those that other processes have sent before."""
    failed: set[str] = field(default_factory=set)
    """Ids of whole answers that a process has refused, given up or taken with it."""
    cancelled: set[str] = field(default_factory=set)
    """Ids of whole answers that an administrator has cancelled."""
    session: Session | None = None
    news: asyncio.Queue[pb.EngineNews | BaseException] | None = None

    @property
    def life(self) -> str:
        return f"{self.name}.{self.lives}"

    def obey(self, command: pb.Command) -> None:
        """Do what the gateway says. A process that is gone hears nothing."""
        kind = command.WhichOneof("command")
        if not self.up:
            return
        if kind == "submit":
            self.works[command.submit.request_id] = Work(command.submit)
            self.submitted.append(command.submit.request_id)
            self.fetches.discard(command.submit.request_id)
        elif kind == "fetch_kv":
            self.fetches.add(command.fetch_kv.request_id)
        else:
            self.works.pop(command.abort.request_id, None)
            self.fetches.discard(command.abort.request_id)

    def leave(self, session: Session) -> None:
        """End everything of a gateway whose session has ended."""
        if self.session is session:
            self.session, self.news = None, None
            self.works.clear()
            self.fetches.clear()

    def admit(self, work: Work) -> None:
        self._say(TokenEvent(work.id, num_cached=0, wait=0.01))

    def tokens(self, work: Work, count: int, token: int, *, stop: bool = False) -> None:
        """Send so many tokens, and with them the end: if the answer may have no more, or if the model stops."""
        count = max(1, min(count, work.left))
        work.sent += count
        work.device += DEVICE_SECONDS
        self.computed[work.answer] = len(work.submit.produced) + work.sent
        wanted = work.submit.params.HasField("logprobs")
        logprobs = (TokenLogprobs(-0.5, ((token, -0.5),)),) * count if wanted else ()
        finish = FinishReason.LENGTH if not work.left else FinishReason.STOP if stop else None
        self._say(TokenEvent(work.id, (token,) * count, logprobs, finish, device_seconds=work.device))

    def pool(self, work: Work) -> None:
        self._say(TokenEvent(work.id, finish_reason=FinishReason.POOLED, vector=VECTOR))

    def refuse(self, work: Work, code: ErrorCode) -> None:
        (self.cancelled if code is ErrorCode.CANCELLED else self.failed).add(work.answer)
        self._say(TokenEvent(work.id, finish_reason=FinishReason.ERROR, refusal=Refusal(code, "no")))

    def abort(self, work: Work) -> None:
        self.failed.add(work.answer)
        self._say(TokenEvent(work.id, finish_reason=FinishReason.ABORT))

    def lose(self, *, crashed: bool, during: tuple[str, ...] = ()) -> None:
        """End the process. Its successor will tell that it has `crashed`, if so, with the requests in its last step."""
        self.previous = pb.PreviousLife(life=self.life, crashed=crashed, request_ids=during)
        self.up = self.draining = self.hangs = False
        session, news = self.session, self.news
        self.session, self.news = None, None
        self.failed |= {work.answer for work in self.works.values()}
        self.works.clear()
        self.fetches.clear()
        for ended in (session, news):
            if isinstance(ended, Session):
                ended.send(gone())
            elif ended is not None:
                ended.put_nowait(gone())

    def restart(self) -> None:
        self.up, self.lives = True, self.lives + 1

    def tell(self) -> None:
        """Send news to the gateway, unless the process hangs."""
        if self.news is not None and not self.hangs:
            self.news.put_nowait(pb.EngineNews(draining=self.draining, decode_step_seconds=0.01, free_pages=900))

    def describe(self) -> pb.EngineInfo:
        sizes = {"max_model_len": 256, "vocab_size": 260, "num_pages": 1000, "block_size": 16, "max_seqs": 16}
        kv = {"kv_address": f"{self.name}:1", "kv_identity": "fake", "page_bytes": 64}
        facts = {"model": self.model, "model_hash": "a", "weights": "bf16", "dtype": "bf16", "protocol": PROTOCOL}
        return pb.EngineInfo(life=self.life, previous=self.previous, hidden_size=8, **sizes, **kv, **facts)

    async def answer(self, method: str, request: Any) -> Any:
        """Answer a unary call."""
        if not self.up:
            raise gone()
        if method == "Drain":
            self.draining = request.draining
            self.tell()
        if method == "LoadAdapter":
            return pb.AdapterInfo(adapter=request.path.rpartition("/")[2], rank=8, pages=3, bytes=1000)
        answers = {"Describe": self.describe, "Drain": pb.DrainResponse, "UnloadAdapter": pb.UnloadAdapterResponse}
        return answers.get(method, pb.EngineStats)()

    def _say(self, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            del self.works[event.request_id]
        if self.session is not None:
            self.session.send(pb.StepEvents(events=[event_to_pb(event)]))


class WireChannels:
    """Takes the place of `ChannelFactory`: opens channels to the engines that are known by address."""

    engines: dict[str, WireEngine]

    def __init__(self, target: EngineTarget) -> None:
        self._engine = self.engines[target.address]

    def open(self) -> WireChannel:
        return WireChannel(self._engine)


class WireChannel:
    """The part of `grpc.aio.Channel` from which the generated stub makes its methods."""

    def __init__(self, engine: WireEngine) -> None:
        self._engine = engine

    def unary_unary(self, path: str, **codecs: Any) -> Callable[..., Any]:
        method = path.rpartition("/")[2]
        return lambda request, timeout=None, metadata=None: self._engine.answer(method, request)

    def stream_stream(self, path: str, **codecs: Any) -> Callable[..., Session]:
        return self._begin

    def unary_stream(self, path: str, **codecs: Any) -> Callable[..., AsyncIterator[pb.EngineNews]]:
        return self._watch

    def _begin(self, metadata: Any = None) -> Session:
        session = Session(self._engine)
        if self._engine.up:
            self._engine.session = session
        else:
            session.send(gone())
        return session

    async def _watch(self, request: pb.WatchRequest, metadata: Any = None) -> AsyncIterator[pb.EngineNews]:
        news = self._engine.news = asyncio.Queue()
        self._engine.tell()
        while True:
            message = await news.get()
            if isinstance(message, BaseException):
                raise message
            yield message

    async def close(self) -> None:
        """There is nothing to close."""
