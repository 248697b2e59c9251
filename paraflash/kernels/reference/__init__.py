"""Plain PyTorch kernels: correct on any device, the yardstick of the cuda ones, and what the CPU runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from paraflash.kernels.interface import Kernels
from paraflash.kernels.reference import attention, hyper, moe


def reference_kernels() -> Kernels:
    """All operations of the interface, gathered from the modules that define them."""
    operations = {
        name: getattr(module, name)
        for module in (hyper, attention, moe)
        for name in vars(Kernels)
        if not name.startswith("_") and hasattr(module, name)
    }
    why = "the reference kernels multiply with expanded weights"
    return cast(Kernels, SimpleNamespace(name="reference", stored=(), why_no_fp8_linears=why, info={}, **operations))
