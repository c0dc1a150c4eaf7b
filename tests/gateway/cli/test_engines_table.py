"""`loralane engines ls`."""

import pytest

from gateway.api_schema.engines import EngineOverview
from gateway.cli.engines import engines_table


@pytest.mark.parametrize(
    ("stages", "ranks", "shown"),
    [
        (0, 0, "cuda"),
        (1, 1, "cuda"),
        (1, 4, "cuda, 4 ranks"),
        (2, 1, "cuda, 2 stages"),
        (2, 4, "cuda, 2 stages x 4 ranks"),
    ],
)
def test_an_engine_of_several_devices_says_how_many(stages, ranks, shown):
    fields = dict.fromkeys(("name", "address", "state", "problem", "model", "life"), "")
    fields |= dict.fromkeys(("running", "waiting", "streams", "free_pages", "total_pages", "adapters_on_device"), 0)
    fields |= {"predicted_wait_seconds": 0.0}
    engine = EngineOverview(**fields, device="cuda", pipeline_parallel=stages, tensor_parallel=ranks)
    table = engines_table([engine])
    assert [str(cell) for column in table.columns if column.header == "device" for cell in column.cells] == [shown]
