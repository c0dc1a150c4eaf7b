"""Which tensors a GGUF file has, and where, from its header."""

import struct

import pytest

from engine.model.gguf.header import read_tensors
from tests.model.tiny_gguf import UINT32, VALUES, header, text

SHAPES = [(64, 32), (7,), (2, 3, 5)]


def written(folder, data):
    file = folder / "model.gguf"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_found_whatever_metadata_there_is(tmp_path, version):
    whole = header(SHAPES, version)
    tensors = read_tensors(written(tmp_path, whole + b"data"))
    assert [tensors[f"t{number}"].shape for number in range(3)] == [shape[::-1] for shape in SHAPES]
    assert {(stored.kind, stored.place) for stored in tensors.values()} == {(2, len(whole) + -len(whole) % 32)}


def test_the_alignment_of_the_file_counts(tmp_path):
    wide = [*VALUES, text("general.alignment") + struct.pack("<II", UINT32, 512)]
    [stored] = read_tensors(written(tmp_path, header([(2, 2)], values=wide))).values()
    assert stored.place % 512 == 0


@pytest.mark.parametrize("data", [b"", b"GG", b"not a model at all", b"GGUF" + struct.pack("<I", 1)])
def test_another_file_is_refused_by_name(tmp_path, data):
    with pytest.raises(ValueError, match=r"model\.gguf is no GGUF file of version 2 or 3"):
        read_tensors(written(tmp_path, data))


def test_a_file_that_was_cut_off_is_damaged_wherever_that_is(tmp_path):
    whole = header(SHAPES)
    for length in range(8, len(whole), 3):
        with pytest.raises(ValueError, match="damaged"):
            read_tensors(written(tmp_path, whole[:length]))


def test_lengths_beyond_the_file_are_damage(tmp_path):
    for count in (2**32, 2**63, 2**64 - 1):
        for data in (struct.pack("<QQ", count, 0), struct.pack("<QQ", 0, count), struct.pack("<QQQ", 0, 1, count)):
            with pytest.raises(ValueError, match="damaged"):
                read_tensors(written(tmp_path, b"GGUF" + struct.pack("<I", 3) + data))
    unknown = struct.pack("<QQQIQ", 0, 1, 0, 99, 0)
    with pytest.raises(ValueError, match="damaged"):
        read_tensors(written(tmp_path, b"GGUF" + struct.pack("<I", 3) + unknown))
