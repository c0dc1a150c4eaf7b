"""All answers follow their schemas, for the client libraries that are installed here alone."""

import pytest

from gateway.config.models import EMBEDDED_NAME
from lab.demo.characters import CHARACTERS
from tests.e2e.behaviour.clients import LangChain, LiteLlm
from tests.e2e.behaviour.schema_answers import assert_answers_follow_schemas


@pytest.mark.parametrize("kind", [LangChain, LiteLlm])
@pytest.mark.asyncio(loop_scope="session")
async def test_all_answers_are_valid(url, kind):
    await assert_answers_follow_schemas(kind, url, [EMBEDDED_NAME, *CHARACTERS])
