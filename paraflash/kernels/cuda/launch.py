"""Launching Triton kernels with little host time.

Triton binds, specialises and looks up its cache in Python at each launch, which takes longer than many of these
kernels run. Here a compiled kernel is found again by a small key (constants, dtypes, alignment and divisibility of the
arguments: what Triton specialises on) and started directly. In Triton's interpreter everything takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

INT32_MAX = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    """As triton.cdiv, which takes microseconds on the host."""
    return -(-a // b)


class Launch:
    """Wraps a JIT function whose run-time parameters come first and whose constants are given by name, always in the
    same order: `kernel[grid](*args, NAME=constant, ...)`."""

    def __init__(self, function: Any):
        self._function = function
        self._known: dict[Any, tuple[Callable[..., None], Any, Any, tuple[Any, ...]]] = {}
        self._direct = hasattr(function, "device_caches")  # not in the interpreter

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not self._direct:
            self._function[grid](*args, **constants)
            return
        kinds: list[Any] = []
        for a in args:
            if isinstance(a, Tensor):
                kinds.append(a.dtype)
                kinds.append(a.data_ptr() & 15 == 0)
            elif isinstance(a, int):
                kinds.append((a & 15 == 0) + 2 * (a == 1) + 4 * (a > INT32_MAX))
        device = args[0].get_device()
        key = (device, *constants.values(), *kinds)
        found = self._known.get(key)
        if found is None:
            kernel = self._function[grid](*args, **constants)
            if 0 in grid:
                return  # compiled, but not yet loaded
            values = tuple(constants[name] for name in self._function.arg_names[len(args) :])
            self._known[key] = (kernel.run, kernel.function, kernel.packed_metadata, values)
            return
        run, function, metadata, values = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        x, y = grid[0], grid[1] if len(grid) > 1 else 1
        run(x, y, 1, stream, function, metadata, None, None, None, *args, *values)


def kernel(function: Any = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """`triton.jit` for a kernel that the host launches. `do_not_specialize`: integers that change from step to step."""
    if function is None:
        return partial(kernel, do_not_specialize=do_not_specialize)
    return Launch(triton.jit(function, do_not_specialize=list(do_not_specialize)))
