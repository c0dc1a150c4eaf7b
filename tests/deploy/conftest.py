"""Makes helper modules of this folder and of tests/gateway importable."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "gateway")]
