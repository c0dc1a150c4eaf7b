"""Files that others bring are read up to a size, and only where reading them ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.process.small_files import read_small, read_small_text


def test_a_file_is_read_up_to_its_bound(tmp_path):
    file = tmp_path / "file"
    file.write_text("größe")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_small_text(link, 7) == "größe"
    with pytest.raises(OSError, match="more than 0 MiB"):
        read_small(file, 6)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/tty"])
def test_devices_are_not_read(device):
    with pytest.raises(OSError, match=r"no regular file|No such device"):
        read_small(Path(device))


def test_a_pipe_does_not_block_and_a_folder_says_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_small(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "absent")
