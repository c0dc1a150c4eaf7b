"""llama.cpp's tests of its server (`tools/server/tests`), which ask any server where `DEBUG_EXTERNAL` is set."""

import os
from urllib.parse import urlsplit

import peer_stubs


def install():
    os.environ |= {"DEBUG_EXTERNAL": "1", "PORT": str(urlsplit(peer_stubs.URL).port)}
    peer_stubs.stub("wget")


def asks_server(item):
    return True
