"""The crc32 of two pieces one after the other, from each piece's own: pieces can then be read side by side.

A crc32 is a remainder of polynomials over GF(2). Appending n bytes multiplies the first piece's by x**(8 n); the
second's is added. Bit 31 stands for x**0, as in zlib's crc32.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["combine_crc32"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """crc32 of A + B from those of A and of B, and B's length in bytes."""
    return _multiply(_appended(second_bytes), first) ^ second


@lru_cache(maxsize=64)
def _appended(count: int) -> int:
    """x**(8 count) modulo the polynomial."""
    power, factor = _ONE, 1 << 23  # x**8
    while count:
        if count & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        count >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)  # times x
    return product
