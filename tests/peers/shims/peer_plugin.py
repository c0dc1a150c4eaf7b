"""A pytest plugin in the process that runs a peer's tests: installs the suite's shim, leaves out tests that ask no
server, and writes what became of each test to the file `PEERS_RESULTS`, a JSON object on each line.

It runs without loralane's packages, because both projects have one called `tests`.
"""

import importlib
import json
import os
import re
from pathlib import Path

SHIM = importlib.import_module(os.environ["PEERS_SHIM"])
RESULTS = Path(os.environ["PEERS_RESULTS"])
MOST_TOLD = 1500
SHIM.install()


def pytest_collection_modifyitems(config, items):
    kept = [item for item in items if SHIM.asks_server(item)]
    left_out = [item for item in items if not SHIM.asks_server(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collectreport(report):
    if report.failed:
        write(report.nodeid, "not collected", told(str(report.longrepr)))


def pytest_runtest_logreport(report):
    if report.skipped:
        write(report.nodeid, "skipped", str(report.longrepr))
    elif report.failed or report.when == "call":
        write(report.nodeid, report.outcome, told(str(report.longrepr or "")))


def told(text):
    """Return the lines of a failure's text that say what went wrong."""
    lines = [line for line in text.splitlines() if re.match(r"E\s", line)]
    return "\n".join(lines or text.splitlines()[-5:])


def write(test, outcome, text):
    with RESULTS.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text[:MOST_TOLD]}) + "\n")
