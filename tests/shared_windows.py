"""Memory that ranks which are threads write for each other, with flags as those of GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from paraflash.parallel.copies import Window

NBYTES = 4096


class Flags:
    """Binary flags between ranks, as those of the GPUs: raising one that nobody took waits."""

    def __init__(self, size: int):
        self._raised: dict[tuple[int, int, int], bool] = {}
        self._changed = threading.Condition()

    def _turn(self, key: tuple[int, int, int], to: bool) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._raised.get(key, False) is not to, timeout=20), key
            self._raised[key] = to
            self._changed.notify_all()

    def of(self, rank: int) -> tuple[Callable[[int, int], None], Callable[[int, int], None]]:
        """What raises a flag at another rank, and what takes one of another rank."""
        return lambda to, flag: self._turn((rank, to, flag), True), lambda of, flag: self._turn((of, rank, flag), False)


def windows(size: int, nbytes: int = NBYTES) -> list[Window]:
    flags, buffers = Flags(size), [torch.zeros(2 * size * nbytes, dtype=torch.uint8) for _ in range(size)]
    return [Window(rank, size, nbytes, buffers, *flags.of(rank)) for rank in range(size)]
