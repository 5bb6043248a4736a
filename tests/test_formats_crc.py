"""Checksums of pieces, put together."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from wisparse.formats.safetensors_header import combine_crc32


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_pieces_give_the_checksum_of_the_whole(pieces: list[bytes]) -> None:
    found = 0
    for piece in pieces:
        found = combine_crc32(found, zlib.crc32(piece), len(piece))
    assert found == zlib.crc32(b"".join(pieces))


def test_a_long_second_piece() -> None:
    first, second = b"abc" * 1000, b"\x05\x00" * (3 << 20)
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
