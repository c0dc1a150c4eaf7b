"""`benchmarks.instant_engine` with a short context, so that no answer of a hostile request takes long."""

from __future__ import annotations

from benchmarks import instant_engine

if __name__ == "__main__":
    instant_engine.MAX_MODEL_LEN = 256
    instant_engine.main()
