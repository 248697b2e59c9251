"""Sizes that kernels and the shapes of recorded passes come in."""

from __future__ import annotations


def power_of_2(n: int) -> int:
    """The least power of two that is at least n (1 for n < 1)."""
    return 1 << max(0, n - 1).bit_length()
