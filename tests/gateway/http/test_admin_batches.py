"""The HTTP API for batches of every tenant, which administrators alone reach."""

from __future__ import annotations

import pytest
from batch_fakes import batch_options, claimed, wanted
from fakes import build_gateway_app

from gateway.batches.store import BatchStore

PATH = "/admin/v1/batches"


@pytest.fixture
async def gateway_app(valkey, tmp_path):
    gateway_app = await build_gateway_app(tmp_path, **batch_options(valkey, tmp_path / "stored"))
    yield gateway_app
    await gateway_app.assert_empty()


@pytest.fixture
def store(valkey) -> BatchStore:
    return BatchStore(valkey, timeout=30.0)


async def test_unfinished_ones_by_their_deadline_and_all_of_them_if_asked(gateway_app, store):
    refused = await store.create(wanted("globex", "1h"), 9)
    await store.invalid(await claimed(store, "validate"), [])
    late, soon = [await store.create(wanted("acme", window), 9) for window in ("2h", "30m")]
    await store.validated(await claimed(store, "validate"), 40, "pirate")
    async with gateway_app.client("sk-admin") as client:

        async def listed(query: str) -> list[str]:
            return [batch["id"] for batch in (await client.get(f"{PATH}{query}")).json()["batches"]]

        assert await listed("") == await listed("?which=unfinished") == [soon.id, late.id]
        assert set(await listed("?which=all")) == {refused.id, late.id, soon.id}
        assert await listed("?tenant=globex") == await listed("?tenant=globex&which=all") == [refused.id]
        assert await listed("?tenant=globex&which=unfinished") == await listed("?tenant=hooli") == []
        assert await listed("?tenant=acme&which=unfinished") == [soon.id, late.id]
        [shown] = (await client.get(f"{PATH}?tenant=globex")).json()["batches"]
        assert (shown["tenant"], shown["status"], shown["eta_seconds"]) == ("globex", "failed", None)


async def test_the_batch_of_any_tenant_is_cancelled(gateway_app, store):
    batch = await store.create(wanted("globex"), 9)
    async with gateway_app.client("sk-admin") as client:
        for path in (f"{PATH}/acme/{batch.id}/cancel", f"{PATH}/globex/nonsense/cancel"):
            answer = await client.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")
        for _ in range(2):
            answer = await client.post(f"{PATH}/globex/{batch.id}/cancel")
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
    assert (await store.get("globex", batch.id)).status == "cancelling"


async def test_what_is_asked_for_in_other_words_is_refused(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        for query, field in (("which=some", "which"), ("state=all", "state")):
            answer = await client.get(f"{PATH}?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_tenant_reaches_none_of_it(gateway_app):
    async with gateway_app.client() as client:
        assert (await client.get(PATH)).status_code == 403
        assert (await client.post(f"{PATH}/acme/batch_{'0' * 24}/cancel")).status_code == 403
