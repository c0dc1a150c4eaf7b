"""/v1/embeddings with OpenAI's own client, /v1/rerank and /v1/score, and what they refuse."""

import asyncio
import base64

import numpy as np
import openai
import pytest
from fakes import BASE, CONTEXT, ENGINE_WAIT_SECONDS, GatewayApp, build_gateway_app, ids_of
from grpc_app import as_key, open_grpc_app
from grpc_app import refused as grpc_refused

from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Pooling, PoolingKind, Refusal, TokenEvent
from engine.executor.fake import FAKE_HIDDEN, fake_vector
from gateway.core.json_bounds import MOST_VALUES
from gateway.pb import generation_pb2 as pb
from gateway.requests.settings import ServiceSettings

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
BODIES = {
    EMBEDDINGS: {"model": BASE, "input": ["sea", "sky"]},
    RERANK: {"model": BASE, "query": "sea", "documents": ["sky", "wave"]},
    SCORE: {"model": BASE, "text_1": "sea", "text_2": ["sky", "wave"]},
}
UNIT = Pooling()
every_path = pytest.mark.parametrize("path", BODIES)


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def post(gateway_app, path=EMBEDDINGS, key="sk-acme", headers=None, **fields):
    async with gateway_app.client(key) as client:
        return await client.post(path, json=BODIES[path] | fields, headers=headers)


async def refused(gateway_app, path=EMBEDDINGS, status=400, **fields):
    response = await post(gateway_app, path, **fields)
    assert response.status_code == status, response.text
    await gateway_app.assert_empty()
    return response.json()["error"]


def expected(text, pooling=UNIT, version=None) -> np.ndarray:
    ids = list(ids_of(text)) if isinstance(text, str) else text
    return np.frombuffer(fake_vector(version, pooling, ids), "<f4")


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_vectors_come_in_the_order_of_the_input(gateway_app, encoding):
    texts = [f"text {number}" for number in range(20)]
    async with gateway_app.openai() as client:
        given = {} if encoding is None else {"encoding_format": encoding}
        answer = await client.embeddings.create(model=BASE, input=texts, **given)
    assert (answer.object, answer.model, len(answer.data)) == ("list", BASE, 20)
    for index, (entry, text) in enumerate(zip(answer.data, texts, strict=True)):
        vector = entry.embedding
        if encoding == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        assert (entry.index, entry.object) == (index, "embedding")
        np.testing.assert_array_equal(np.asarray(vector, np.float32), expected(text))
    tokens = sum(len(ids_of(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    await gateway_app.assert_empty()


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("sea", ["sea"]), (["sea"], ["sea"]), ([9, 10, 11], [[9, 10, 11]]), ([[9, 10], [11]], [[9, 10], [11]])],
)
async def test_the_input_may_be_texts_or_token_ids(gateway_app, given, prompts):
    data = (await post(gateway_app, input=given)).json()["data"]
    for entry, prompt in zip(data, prompts, strict=True):
        np.testing.assert_array_equal(np.asarray(entry["embedding"], np.float32), expected(prompt))


async def test_pooling_dimensions_length_and_adapter_reach_the_engine(gateway_app):
    fields = {"pooling": "mean", "dimensions": 3, "normalize": False, "model": "pirate", "input": "sea"}
    [entry] = (await post(gateway_app, **fields)).json()["data"]
    [sent] = gateway_app.engine.requests
    pooling, version = Pooling(PoolingKind.MEAN, 3, normalize=False), gateway_app.adapters.records["pirate"].version
    assert (sent.pooling, sent.adapter_hash, sent.params.max_tokens) == (pooling, version, 0)
    np.testing.assert_array_equal(np.asarray(entry["embedding"], np.float32), expected("sea", pooling, version))
    record = gateway_app.watcher.records[0]
    assert (record.outcome.finish, record.served.adapter, record.work.completion_tokens) == ("pooled", "pirate", 0)


@every_path
async def test_the_prompts_alone_are_reserved_and_charged(gateway_app, path):
    response = await post(gateway_app, path, service_tier="flex")
    tokens = sum(len(sent.prompt_ids) for sent in gateway_app.engine.requests)
    assert response.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert response.headers["x-loralane-lane"] == "batch"
    assert {sent.lane for sent in gateway_app.engine.requests} == {Lane.BATCH}
    await gateway_app.assert_empty()
    [reserved], [ends] = gateway_app.limiter.reserved, gateway_app.limiter.ends.values()
    assert (reserved.tokens, ends) == (tokens, [tokens])
    [row] = gateway_app.limiter.rows
    counts = row.counts
    assert (counts.requests, counts.prompt_tokens, counts.completion_tokens) == (1, tokens, 0)
    assert counts.device_us > 0


@every_path
async def test_a_tenants_limits_hold(gateway_app, path):
    statuses = [(await post(gateway_app, path, "sk-globex")).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429], "three requests a minute, whatever the number of texts"
    await gateway_app.assert_empty()


@every_path
async def test_one_failure_ends_the_request_once_and_charges_nothing(gateway_app, path):
    events = gateway_app.engine._events
    refusal = Refusal(ErrorCode.LANE_QUEUE_FULL, "it is full", 2.0)

    def failing(request):
        if request.id.endswith("-1"):
            return [TokenEvent(request.id, finish_reason=FinishReason.ERROR, refusal=refusal)]
        return events(request)

    gateway_app.engine._events = failing
    assert (await refused(gateway_app, path, 503))["code"] == "lane_queue_full"
    assert list(gateway_app.limiter.ends.values()) == [[0]]
    assert len(gateway_app.watcher.records) == 1


@every_path
async def test_a_limit_of_time_ends_every_text(gateway_app, path):
    gateway_app.engine.admit = asyncio.Event()
    assert (await refused(gateway_app, path, 504, timeout=0.2))["code"] == "deadline_exceeded"
    assert set(gateway_app.engine.ends.values()) == {"aborted"}


@pytest.mark.parametrize("adapter", [None, "pirate"])
@every_path
async def test_every_route_serves_adapters(gateway_app, path, adapter):
    assert (await post(gateway_app, path, model=adapter or BASE)).status_code == 200
    version = gateway_app.adapters.records["pirate"].version if adapter else None
    assert {sent.adapter_hash for sent in gateway_app.engine.requests} == {version}


async def test_many_texts_are_in_the_engine_a_few_at_a_time(tmp_path):
    settings = ServiceSettings(engine_wait=ENGINE_WAIT_SECONDS, max_choices=5, max_pooled=50)
    gateway_app = await build_gateway_app(tmp_path, settings)
    most, generate = 0, gateway_app.engine.generate

    def counted(request, session="", handover=None):
        nonlocal most
        stream = generate(request, session)
        most = max(most, gateway_app.engine.open)
        return stream

    gateway_app.engine.generate = counted
    texts = [f"text {number}" for number in range(50)]
    data = (await post(gateway_app, input=texts)).json()["data"]
    for entry, text in zip(data, texts, strict=True):
        np.testing.assert_array_equal(np.asarray(entry["embedding"], np.float32), expected(text))
    assert most == 5
    await gateway_app.assert_empty()
    error = await refused(gateway_app, input=[*texts, "one more"])
    assert (error["param"], error["message"]) == ("input", "a request may have at most 50 texts")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (EMBEDDINGS, "input"),
        (RERANK, "documents"),
        *((SCORE, name) for name in ("text_1", "text_2", "queries", "documents")),
        ("/v1/completions", "prompt"),
    ],
)
async def test_giant_lists_are_refused_before_they_are_converted(gateway_app, path, field):
    for members in ([""] * (MOST_VALUES + 1), [1, *[[]] * MOST_VALUES]):
        body = BODIES.get(path, {"model": BASE}) | {field: members}
        async with gateway_app.client("sk-acme") as client:
            response = await client.post(path, json=body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["message"].startswith(f"the body has more than {MOST_VALUES} lists, objects and members")


async def test_a_long_text_as_token_ids_is_no_giant_list(gateway_app):
    error = await refused(gateway_app, input=[5] * (MOST_VALUES + 1))
    assert error["message"].startswith("a request may have ") or error["code"] == "context_length_exceeded"


async def test_leaving_aborts_texts_that_run_and_begins_no_others(tmp_path):
    settings = ServiceSettings(engine_wait=ENGINE_WAIT_SECONDS, max_choices=3)
    gateway_app = await build_gateway_app(tmp_path, settings)
    gateway_app.engine.admit = asyncio.Event()
    task = asyncio.create_task(post(gateway_app, input=["a", "b", "c", "d", "e"]))
    while len(gateway_app.engine.requests) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(gateway_app.engine.requests) == 3
    await gateway_app.assert_empty()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input[1]"),
        (EMBEDDINGS, {"input": [[5], []]}, "input[1]"),
        (EMBEDDINGS, {"input": [[5], [260]]}, "input[1]"),
        (EMBEDDINGS, {"input": [5, 260]}, "input"),
        (EMBEDDINGS, {"input": ["a", [5]]}, "input"),
        (EMBEDDINGS, {"input": ["a", "b" * (CONTEXT + 1)]}, "input[1]"),
        (EMBEDDINGS, {"dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"dimensions": FAKE_HIDDEN + 1}, "dimensions"),
        (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format"),
        (EMBEDDINGS, {"pooling": "max"}, "pooling"),
        (EMBEDDINGS, {"stream": True}, "stream"),
        (EMBEDDINGS, {"dimension": 2}, "dimension"),
        (EMBEDDINGS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"service_tier": "gold"}, "service_tier"),
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"query": ""}, "query"),
        (RERANK, {"documents": ["a", {"text": ""}]}, "documents[1]"),
        (RERANK, {"documents": ["a", {"title": "b"}]}, "documents[1].text"),
        (RERANK, {"top_n": 0}, "top_n"),
        (SCORE, {"text_2": None}, "text_2"),
        (SCORE, {"text_2": []}, "text_2"),
        (SCORE, {"text_1": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"queries": "a"}, "text_1"),
        (SCORE, {"text_2": ["a", ""]}, "text_2[1]"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(gateway_app, path, fields, param):
    error = await refused(gateway_app, path, **fields)
    assert error["param"] == param
    assert gateway_app.engine.requests == []
    assert gateway_app.limiter.reserved_tokens == 0


async def test_a_text_may_fill_the_context(gateway_app):
    assert (await post(gateway_app, input="b" * CONTEXT)).status_code == 200
    error = await refused(gateway_app, input="b" * (CONTEXT + 1))
    assert error["code"] == "context_length_exceeded"
    assert f"needs {CONTEXT + 1}" in error["message"]


async def test_all_texts_together_are_bounded(tmp_path):
    settings = ServiceSettings(engine_wait=ENGINE_WAIT_SECONDS, max_pooled_tokens=CONTEXT)
    gateway_app = await build_gateway_app(tmp_path, settings)
    assert (await post(gateway_app, input=["b" * 128] * 2)).status_code == 200
    error = await refused(gateway_app, input=["b" * 128] * 3)
    assert (error["param"], error["message"]) == (
        "input[2]",
        f"a request may have {CONTEXT} tokens; up to input[2] it has 384",
    )


@pytest.mark.parametrize("key", ["return_documents", None])
async def test_rerank_orders_documents_by_similarity_to_the_query(gateway_app, key):
    documents = ["sky", "wave", {"text": "sea"}, "stone"]
    fields = {"documents": documents, "top_n": 3} | ({key: False} if key else {})
    answer = (await post(gateway_app, RERANK, **fields)).json()
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    scores = [float(expected("sea") @ expected(text)) for text in texts]
    best = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [result["index"] for result in answer["results"]] == best
    assert best[0] == 2 and answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-6)
        assert result.get("document") == (None if key else {"text": texts[result["index"]]})
    assert answer["id"].startswith("rerank-") and answer["model"] == BASE


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({}, [("sea", "sky"), ("sea", "wave")]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ({"text_1": ["a"], "text_2": "b"}, [("a", "b")]),
        ({"text_1": None, "text_2": None, "queries": "q", "documents": ["d", "e"]}, [("q", "d"), ("q", "e")]),
    ],
)
@pytest.mark.parametrize("path", [SCORE, "/score"])
async def test_scores_are_cosine_similarities(gateway_app, path, fields, pairs):
    async with gateway_app.client() as client:
        answer = (await client.post(path, json=BODIES[SCORE] | fields)).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(len(pairs)))
    for entry, (one, other) in zip(answer["data"], pairs, strict=True):
        assert entry["object"] == "score"
        assert entry["score"] == pytest.approx(float(expected(one) @ expected(other)), abs=1e-6)


async def test_unknown_models_are_no_ones(gateway_app):
    async with gateway_app.openai("sk-globex") as client:
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="poet", input="sea")


@pytest.mark.parametrize("ids", [False, True])
async def test_the_same_over_grpc(tmp_path, ids):
    texts = ["sea", "sky"]
    given = {"input_ids": [{"ids": ids_of(text)} for text in texts]} if ids else {"input": texts}
    async with open_grpc_app(tmp_path) as grpc_app:
        call = grpc_app.generation.Embed(
            pb.EmbedRequest(model="pirate", pooling="POOLING_MEAN", dimensions=3, lane="LANE_BATCH", **given),
            metadata=as_key("acme"),
        )
        answer = await call
        headers = dict(await call.initial_metadata())
        version = grpc_app.gateway_app.adapters.records["pirate"].version
        for vector, text in zip(answer.vectors, texts, strict=True):
            np.testing.assert_array_equal(
                np.asarray(vector.values, np.float32), expected(text, Pooling(PoolingKind.MEAN, 3), version)
            )
        assert (answer.lane, headers["x-loralane-lane"]) == (pb.LANE_BATCH, "batch")
        assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in texts)
        await grpc_app.assert_empty()


def grpc_request(method, **fields):
    """A request of one of the three methods that is the same as the body in BODIES."""
    same = {
        "Embed": (pb.EmbedRequest, {"input": ["sea", "sky"]}),
        "Rerank": (pb.RerankRequest, {"query": "sea", "documents": ["sky", "wave"]}),
        "Score": (pb.ScoreRequest, {"queries": ["sea"], "documents": ["sky", "wave"]}),
    }
    kind, given = same[method]
    return kind(**{"model": BASE, **given, **fields})


every_method = pytest.mark.parametrize("method", ["Embed", "Rerank", "Score"])


async def test_ranks_and_scores_over_grpc_are_those_of_http(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        for fields in ({}, {"top_n": 1, "return_documents": False}):
            http = (await post(grpc_app.gateway_app, RERANK, **fields)).json()["results"]
            answer = await grpc_app.generation.Rerank(grpc_request("Rerank", **fields), metadata=as_key())
            assert [result.index for result in answer.results] == [result["index"] for result in http]
            scores = [result["relevance_score"] for result in http]
            assert [result.relevance_score for result in answer.results] == pytest.approx(scores, abs=1e-6)
            texts = [result["document"]["text"] if "document" in result else "" for result in http]
            assert [result.document for result in answer.results] == texts
        http = (await post(grpc_app.gateway_app, SCORE)).json()["data"]
        answer = await grpc_app.generation.Score(grpc_request("Score"), metadata=as_key())
        assert list(answer.scores) == pytest.approx([entry["score"] for entry in http], abs=1e-6)
        await grpc_app.assert_empty()


@every_method
async def test_lane_goals_usage_and_limits_hold_over_grpc(tmp_path, method):
    async with open_grpc_app(tmp_path) as grpc_app:
        gateway_app, run = grpc_app.gateway_app, getattr(grpc_app.generation, method)
        request = grpc_request(method, lane="LANE_BATCH", slo={"ttft_ms": 5000}, model="pirate")
        call = run(request, metadata=as_key())
        answer = await call
        tokens = sum(len(sent.prompt_ids) for sent in gateway_app.engine.requests)
        assert {(sent.lane, sent.ttft) for sent in gateway_app.engine.requests} == {(Lane.BATCH, 5.0)}
        assert (answer.lane, answer.usage.prompt_tokens, answer.model) == (pb.LANE_BATCH, tokens, "pirate")
        assert dict(await call.initial_metadata())["x-loralane-lane"] == "batch"
        assert dict(await call.trailing_metadata())["x-loralane-prompt-tokens"] == str(tokens)
        [record] = gateway_app.watcher.records
        assert (record.ingress.route, record.outcome.finish) == (f"/loralane.v1.Generation/{method}", "pooled")
        await grpc_app.assert_empty()
        [row] = gateway_app.limiter.rows
        assert (row.counts.requests, row.counts.prompt_tokens) == (1, tokens)
        for _ in range(3):
            await run(grpc_request(method), metadata=as_key("globex"))
        refusal = await grpc_refused(run(grpc_request(method), metadata=as_key("globex")))
        assert refusal.code == "RESOURCE_EXHAUSTED"
        await grpc_app.assert_empty()


@every_method
async def test_a_deadline_over_grpc_ends_every_text(tmp_path, method):
    async with open_grpc_app(tmp_path) as grpc_app:
        grpc_app.gateway_app.engine.admit = asyncio.Event()
        run = getattr(grpc_app.generation, method)
        refusal = await grpc_refused(run(grpc_request(method), metadata=as_key(), timeout=1.0))
        assert refusal.code == "DEADLINE_EXCEEDED"
        await grpc_app.assert_empty()
        assert set(grpc_app.gateway_app.engine.ends.values()) == {"aborted"}


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        ("Embed", {"input": []}, "input"),
        ("Embed", {"input_ids": [{"ids": [5]}]}, "input"),
        ("Embed", {"input": ["a", ""]}, "input[1]"),
        ("Embed", {"input": ["a"] * (ServiceSettings().max_pooled + 1)}, "input"),
        ("Embed", {"dimensions": 0}, "dimensions"),
        ("Embed", {"lane": 7}, "lane"),
        ("Embed", {"pooling": 7}, "pooling"),
        ("Embed", {"model": ""}, "model"),
        ("Rerank", {"query": ""}, "query"),
        ("Rerank", {"documents": []}, "documents"),
        ("Rerank", {"documents": ["a", ""]}, "documents[1]"),
        ("Rerank", {"documents": ["a"] * (ServiceSettings().max_pooled + 1)}, "documents"),
        ("Rerank", {"top_n": 0}, "top_n"),
        ("Rerank", {"slo": {"ttft_ms": -1}}, "slo.ttft_ms"),
        ("Score", {"queries": []}, "queries"),
        ("Score", {"queries": ["a", "b", "c"]}, "queries"),
        ("Score", {"documents": []}, "documents"),
        ("Score", {"documents": ["a"] * (ServiceSettings().max_pooled + 1)}, "documents"),
        ("Score", {"lane": 7}, "lane"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_is_wrong_is_named_over_grpc(tmp_path, method, fields, field):
    async with open_grpc_app(tmp_path) as grpc_app:
        call = getattr(grpc_app.generation, method)(grpc_request(method, **fields), metadata=as_key("acme"))
        refusal = await grpc_refused(call)
        assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", [field])
        assert grpc_app.gateway_app.engine.requests == []
        await grpc_app.assert_empty()


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
async def test_rankings_have_the_paths_of_vllm_and_cohere(gateway_app, path):
    async with gateway_app.client() as client:
        found, own = [(await client.post(each, json=BODIES[RERANK])).json() for each in (path, RERANK)]
    assert found["results"] == own["results"] and found["results"]


@pytest.mark.parametrize("path", BODIES)
async def test_invocations_are_what_their_fields_say(gateway_app, path):
    async with gateway_app.client() as client:
        found, own = [(await client.post(each, json=BODIES[path])).json() for each in ("/invocations", path)]
    same = ("data", "results", "object", "usage", "model")
    assert [found.get(name) for name in same] == [own.get(name) for name in same]


async def test_invocations_may_be_chats_and_completions(gateway_app):
    chat = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
    async with gateway_app.client() as client:
        whole = (await client.post("/invocations", json=chat)).json()
        streamed = await client.post("/invocations", json=chat | {"stream": True})
        text = (await client.post("/invocations", json={"model": BASE, "prompt": "hi"})).json()
        neither = await client.post("/invocations", json={"model": BASE})
    assert (whole["object"], text["object"]) == ("chat.completion", "text_completion")
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert (neither.status_code, neither.json()["error"]["code"]) == (400, "missing_required_parameter")


async def test_texts_are_cut_where_that_is_asked_for(gateway_app):
    for fields, kept in (({}, ids_of("sea")[:2]), ({"truncation_side": "left"}, ids_of("sea")[-2:])):
        data = (await post(gateway_app, input="sea", truncate_prompt_tokens=2, **fields)).json()["data"]
        np.testing.assert_array_equal(np.asarray(data[0]["embedding"], np.float32), expected(list(kept)))
