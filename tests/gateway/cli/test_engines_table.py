"""`loralane engines ls`."""

import pytest

from gateway.cli.engines import engines_table
from gateway.pb import operations_pb2 as pb


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
    engine = pb.EngineOverview(device="cuda", pipeline_parallel=stages, tensor_parallel=ranks)
    table = engines_table([engine])
    assert [str(cell) for column in table.columns if column.header == "device" for cell in column.cells] == [shown]
