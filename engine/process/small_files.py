"""Reads files that an operator or an adapter brings, such as a configuration: regular ones, up to a size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 4 * 2**20
"""Maximum size of a file that is read as a whole: a hundred times the largest configurations. /dev/zero and the like
have no end."""


def read_small(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises OSError, whose `strerror` says why, if it cannot be read, is no regular file
    (a pipe could block, a device be endless) or has more than `most` bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return content


def read_small_text(path: Path, most: int = MOST_BYTES) -> str:
    """Return the content of a text file, as `read_small` does. Raises OSError, and UnicodeDecodeError if it is not
    UTF-8."""
    return read_small(path, most).decode()
