"""A gateway whose engine says what a test tells it to."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "gateway"))  # makes `fakes` and `served` importable

from served import Served, served

from tests.e2e.behaviour.clients import CLIENTS, Client
from tests.e2e.behaviour.grpc_client import Grpc


@dataclass
class ClientUnderTest:
    """Where a test's client meets the gateway."""

    gateway: Served
    kind: type[Client]
    answered: list[int]
    """Statuses of all that clients asked for, retries included."""

    def client(self, key: str = "sk-acme", retries: int = 0) -> Client:
        if self.kind is not Grpc:
            return self.kind(f"{self.gateway.url}/v1", key, retries)
        client = Grpc(self.gateway.grpc_target, key, retries)
        client.answered = self.answered  # over HTTP the gateway's side counts
        return client


@pytest.fixture(params=[name for name, kind in CLIENTS.items() if find_spec(kind.module)])
def kind(request) -> type[Client]:
    """Return each client whose library is installed; `make test-clients` installs the others, and tests them alone."""
    return CLIENTS[request.param]


@pytest.fixture
def setup(kind, tmp_path) -> Iterator[ClientUnderTest]:
    answered: list[int] = []

    def counting(app: Callable) -> Callable:
        async def counted(scope, receive, send):
            async def noted(message):
                if message["type"] == "http.response.start":
                    answered.append(message["status"])
                await send(message)

            await app(scope, receive, noted)

        return counted

    with served(tmp_path, counting) as gateway:
        gateway.gateway_app.engine.info.max_model_len = 2048
        yield ClientUnderTest(gateway, kind, answered)
        gateway.run(gateway.gateway_app.assert_empty())
