"""A tokenizer that knows a token which the model has no row for, as after adding `[PAD]` to a model of 32,000 rows."""

import pytest
from fakes import TEMPLATE, FakeEngine, build_gateway_app, byte_tokenizer

NEW = "<|new|>"
MESSAGES = [{"role": "user", "content": f"hi {NEW}"}]
CASES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": f"hi {NEW}"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": f"hi {NEW}"},
    "/v1/embeddings": {"input": f"hi {NEW}"},
}


@pytest.fixture
async def gateway_app(tmp_path):
    return await build_gateway_app(tmp_path, others={"wide": FakeEngine(byte_tokenizer(TEMPLATE, special=(NEW,)))})


@pytest.mark.parametrize("path", CASES)
async def test_a_prompt_with_the_token_is_refused_by_the_gateway(gateway_app, path):
    async with gateway_app.client() as client:
        answer = await client.post(path, json={"model": "wide", **CASES[path]})
    assert answer.status_code == 400, answer.text
    assert "must be from 0 to 259" in answer.text
    await gateway_app.assert_empty()


async def test_a_prediction_with_the_token_is_refused_too(gateway_app):
    prediction = {"type": "content", "content": NEW}
    body = {"model": "wide", "messages": [{"role": "user", "content": "hi"}], "prediction": prediction}
    async with gateway_app.client() as client:
        answer = await client.post(
            "/v1/chat/completions", json={**body, "prediction": {"type": "content", "content": NEW}}
        )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prediction"


def test_the_tokenizer_tells_which_tokens_have_no_row():
    tokenizer = byte_tokenizer(TEMPLATE, special=(NEW,))
    assert tokenizer.beyond(260) == {NEW: 260}
    assert tokenizer.beyond(261) == {}
