"""Makes `bench_server`, and the doubles of the gateway's own tests, importable by the tests in all rooms below."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "gateway")]
