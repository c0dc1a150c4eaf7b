"""How large a GGUF file's tensors are, from its header."""

import struct

import pytest

from engine.model.gguf_header import num_weights
from tests.model.tiny_gguf import header

SHAPES = [(64, 32), (7,), (2, 3, 5)]


def written(folder, data):
    file = folder / "model.gguf"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_all_weights_are_counted_whatever_metadata_there_is(tmp_path, version):
    assert num_weights(written(tmp_path, header(SHAPES, version) + b"data")) == 64 * 32 + 7 + 30


@pytest.mark.parametrize("data", [b"", b"GG", b"not a model at all", b"GGUF" + struct.pack("<I", 1)])
def test_another_file_is_refused_by_name(tmp_path, data):
    with pytest.raises(ValueError, match=r"model\.gguf is no GGUF file of version 2 or 3"):
        num_weights(written(tmp_path, data))


def test_a_file_that_was_cut_off_is_damaged_wherever_that_is(tmp_path):
    whole = header(SHAPES)
    for length in range(8, len(whole), 3):
        with pytest.raises(ValueError, match="damaged"):
            num_weights(written(tmp_path, whole[:length]))


def test_lengths_beyond_the_file_are_damage(tmp_path):
    for count in (2**32, 2**63, 2**64 - 1):
        for data in (struct.pack("<QQ", count, 0), struct.pack("<QQ", 0, count), struct.pack("<QQQ", 0, 1, count)):
            with pytest.raises(ValueError, match="damaged"):
                num_weights(written(tmp_path, b"GGUF" + struct.pack("<I", 3) + data))
    unknown = struct.pack("<QQQIQ", 0, 1, 0, 99, 0)
    with pytest.raises(ValueError, match="damaged"):
        num_weights(written(tmp_path, b"GGUF" + struct.pack("<I", 3) + unknown))
