"""The policy `learned`: which member the router chooses, what the decision computes and costs, and what replaces it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from types import SimpleNamespace

import pytest
from fakes import BASE, FakeEngine, build_gateway_app, tiny_tokenizer

from engine.core.messages.requests import Lane, Pooling, PoolingKind
from engine.executor.fake import FAKE_HIDDEN
from engine.pb import engine_pb2 as engine_pb
from engine.rpc.stream import EngineUnavailable
from gateway.config.file import ConfigError
from gateway.config.routes import check_routes, read_routes
from gateway.requests.route_runner import RouteTable
from gateway.virtual_models.features import NAMES
from gateway.virtual_models.learned import Learned
from gateway.virtual_models.policy import MemberState
from gateway.virtual_models.router import RouterFile, encode_router
from gateway.virtual_models.router_source import CHECK_SECONDS, RouterSource, router_source

SMALL, ROUTE = "small", "auto"
SHORT, LONG = "hi", "hello " * 20
SHORT_PROMPT = len(["<|user", "<|end", "<|assistant", ""]) - 1 + len(SHORT)


def write_router(path, dimensions=0, **fields):
    """Write a router for which the small member suffices if the question has less than 20 characters."""
    count, length = len(NAMES) + dimensions, NAMES.index("log_question_characters")
    mean, weights = [0.0] * count, [0.0] * count
    mean[length], weights[length] = 3.0, -50.0
    source = {"embedder": SMALL, "dimensions": dimensions} if dimensions else {}
    file = {"features": list(NAMES), "mean": mean, "scale": [1.0] * count, "weights": weights, "intercept": 0.0}
    path.write_bytes(encode_router(RouterFile(**{**source, **file, "threshold": 0.5, **fields})))
    return path


class Room:
    def __init__(self, app, small: FakeEngine, outcomes: list) -> None:
        self.app, self.small, self.outcomes = app, small, outcomes

    async def ask(self, question, **fields):
        """Return the member and the reason."""
        async with self.app.client("sk-acme") as client:
            body = {"model": ROUTE, "messages": [{"role": "user", "content": question}], **fields}
            response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        self.body = response.json()
        return self.body["x_loralane"]["model"], self.body["x_loralane"]["reason"]

    @property
    def vectors(self):
        return [request for request in self.small.requests if request.pooling is not None]

    @property
    def charged(self):
        found = Counter()
        for row in self.app.limiter.rows:
            found[row.name.adapter] += row.counts.tokens
        return dict(found)


@pytest.fixture
async def make_room(tmp_path):
    rooms = []

    async def make(policy, ttft_s=5.0):
        small, outcomes = FakeEngine(tiny_tokenizer(reverse=True)), []
        table = RouteTable({ROUTE: policy}, lambda member: MemberState(ttft_s=ttft_s), observe=outcomes.append)
        rooms.append(Room(await build_gateway_app(tmp_path, others={SMALL: small}, routes=table), small, outcomes))
        return rooms[-1]

    yield make
    for room in rooms:
        await room.app.assert_empty()


async def test_the_text_decides_without_a_vector_if_the_router_needs_none(make_room, tmp_path):
    room = await make_room(Learned(write_router(tmp_path / "r.json"), SMALL, BASE))
    assert await room.ask(SHORT) == (SMALL, "small") and await room.ask(LONG) == (BASE, "large")
    assert room.vectors == [] and set(room.charged) == {SMALL, BASE}


async def test_the_vector_leaves_its_pages_and_is_charged(make_room, tmp_path):
    room = await make_room(Learned(write_router(tmp_path / "r.json", FAKE_HIDDEN), SMALL, BASE))
    assert await room.ask(SHORT, tools=None, stop=["x"], logprobs=True) == (SMALL, "small")
    [vector] = room.vectors
    assert vector.pooling == Pooling(PoolingKind.MEAN, shares_pages=True) and vector.lane is Lane.INTERACTIVE
    assert vector.prompt_ids == room.small.requests[-1].prompt_ids
    assert await room.ask(LONG, service_tier="flex") == (BASE, "large")
    assert room.vectors[1].lane is Lane.BATCH
    assert room.body["x_loralane"]["discarded"][0]["model"] == ROUTE, "the vector's tokens are shown"
    assert room.charged[SMALL] > 2 * SHORT_PROMPT
    assert [(one.member, one.reason, len(one.runs)) for one in room.outcomes] == [
        (SMALL, "small", 2), (BASE, "large", 2)
    ]  # fmt: skip


async def test_a_caller_who_leaves_before_the_decision_is_reported_with_the_vector(make_room, tmp_path):
    room = await make_room(Learned(write_router(tmp_path / "r.json", FAKE_HIDDEN), SMALL, BASE, patience=99.0))
    room.small.admit = asyncio.Event()
    asking = asyncio.create_task(room.ask(SHORT))
    while not room.small.requests:
        await asyncio.sleep(0.002)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    [outcome] = room.outcomes
    assert (outcome.member, outcome.reason, [run.member for run in outcome.runs]) == ("", "failed", [SMALL])
    assert room.charged == {SMALL: SHORT_PROMPT} == {run.member: run.prompt for run in outcome.runs}


@pytest.mark.parametrize("undecided", ["small", "large"])
async def test_a_vector_that_is_late_is_given_up(make_room, tmp_path, undecided):
    path = write_router(tmp_path / "r.json", FAKE_HIDDEN)
    room = await make_room(Learned(path, SMALL, BASE, undecided=undecided, patience=0.001), ttft_s=1.0)
    room.small.admit = asyncio.Event()
    asking = asyncio.create_task(room.ask(SHORT))
    while not (asking.done() or room.small.ends or room.small.requests != room.vectors):
        await asyncio.sleep(0.002)  # the vector may also be late before the engine has got its request
    room.small.admit.set()
    assert await asking == ({"small": SMALL, "large": BASE}[undecided], "late")


@pytest.mark.parametrize(
    ("dimensions", "embedder", "reason"), [(FAKE_HIDDEN, "gone", "no_vector"), (FAKE_HIDDEN + 1, SMALL, "misfit")]
)
async def test_the_large_member_answers_without_a_usable_vector(make_room, tmp_path, dimensions, embedder, reason):
    path = write_router(tmp_path / "r.json", dimensions, embedder=embedder)
    room = await make_room(Learned(path, SMALL, BASE))
    assert await room.ask(SHORT) == (BASE, reason)


async def test_a_prompt_whose_vector_crashes_two_engines_gets_no_more(make_room, tmp_path):
    room = await make_room(Learned(write_router(tmp_path / "r.json", FAKE_HIDDEN), SMALL, BASE))
    small = room.small

    async def crash(request):
        small.ends[request.id] = "failed"
        raise EngineUnavailable("gone")
        yield []

    def fate(life):
        return engine_pb.PreviousLife(life=life, crashed=True, request_ids=[small.requests[-1].id])

    small._arriving, small.fate = crash, fate
    async with room.app.client("sk-acme") as client:
        body = {"model": ROUTE, "messages": [{"role": "user", "content": SHORT}]}
        response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_crashed")
    assert len(small.requests) == 2 and room.app.engine.requests == [] and room.charged == {}


async def test_the_other_member_answers_if_the_chosen_one_cannot(make_room, tmp_path):
    room = await make_room(Learned(write_router(tmp_path / "r.json"), SMALL, BASE))
    room.small.ready = False
    assert await room.ask(SHORT) == (BASE, "engine_unavailable")


async def test_a_threshold_of_the_configuration_counts(make_room, tmp_path):
    room = await make_room(Learned(write_router(tmp_path / "r.json"), SMALL, BASE, threshold=0.0))
    assert await room.ask(LONG) == (SMALL, "small")


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_used(tmp_path):
    now, path = [0.0], write_router(tmp_path / "r.json")
    source = RouterSource(path, lambda: now[0])
    first = source.current()

    def replaced(write):
        write(tmp_path / "next.json")
        os.replace(tmp_path / "next.json", path)
        soon = source.current()
        now[0] += CHECK_SECONDS
        return soon, source.current()

    assert replaced(lambda file: file.write_text("{")) == (first, first)
    soon, later = replaced(lambda file: write_router(file, intercept=1.0))
    assert soon is first and later.file.intercept == 1.0 and later.version != first.version
    path.unlink()
    now[0] += CHECK_SECONDS
    assert source.current() is later


def test_the_section_names_a_file_and_two_members(tmp_path):
    write_router(tmp_path / "r.json", FAKE_HIDDEN)
    section = {"policy": "learned", "router": "r.json", "small": SMALL, "large": BASE}
    [policy] = read_routes({ROUTE: section}, {}, tmp_path).values()
    version = router_source(tmp_path / "r.json").current().version
    assert policy == Learned(tmp_path / "r.json", SMALL, BASE)
    assert version in policy.explain() and f"vector by {SMALL}" in policy.explain()
    for upstreams in ((), (SMALL,)):
        with pytest.raises(ConfigError, match=r"routes\.auto\.router: 'small' is no base model"):
            check_routes({ROUTE: policy}, {BASE: SimpleNamespace(preload={})}, upstreams)
    for change, message in (
        ({"router": "gone.json"}, r"gone\.json: No such file"),
        ({"large": SMALL}, "two members"),
        ({"threshold": 2}, "threshold must be"),
        ({"patience": 0}, "patience must be"),
        ({"undecided": "both"}, "undecided"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_routes({ROUTE: section | change}, {}, tmp_path)
