import pytest
from local_engines import Engines


@pytest.fixture
async def engines(tmp_path):
    engines = Engines(tmp_path)
    yield engines
    await engines.close()
