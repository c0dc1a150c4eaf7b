"""An engine process without a model whose steps take STEP_SECONDS: `python -m tests.e2e.slow_engine --fake ...`."""

import time

from engine.executor.fake import FakeExecutor
from engine.serve.server import main

STEP_SECONDS = 0.05


def slowly(collect):
    def collect_slowly(self):
        time.sleep(STEP_SECONDS)
        return collect(self)

    return collect_slowly


if __name__ == "__main__":
    FakeExecutor.collect = slowly(FakeExecutor.collect)
    main()
