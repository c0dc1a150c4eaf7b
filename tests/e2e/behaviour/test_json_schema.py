"""All answers follow their schemas, for clients over HTTP and gRPC. Other libraries: tests/clients/test_schemas.py."""

import pytest

from tests.e2e.behaviour.clients import OpenAi, OpenAiResponses
from tests.e2e.behaviour.grpc_client import Grpc
from tests.e2e.behaviour.schema_answers import assert_answers_follow_schemas


@pytest.mark.parametrize("kind", [OpenAi, OpenAiResponses, Grpc])
@pytest.mark.asyncio(loop_scope="session")
async def test_all_answers_are_valid(server, models, kind):
    address = f"127.0.0.1:{server.grpc_port}" if kind is Grpc else f"http://127.0.0.1:{server.http_port}/v1"
    await assert_answers_follow_schemas(kind, address, models)
