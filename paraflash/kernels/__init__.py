"""Which implementation of the kernel interface a device gets."""

from __future__ import annotations

import torch

from paraflash.kernels.interface import Kernels


def make_kernels(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, moe_backend: str = "auto", trained: bool = True
) -> Kernels:
    """The cuda kernels on a GPU, the reference elsewhere. trained: whether caches hold trained rounding."""
    if device.type == "cuda":
        from paraflash.kernels.cuda import cuda_kernels

        return cuda_kernels(dtype, moe_backend, trained)
    from paraflash.kernels.reference import reference_kernels

    return reference_kernels()
