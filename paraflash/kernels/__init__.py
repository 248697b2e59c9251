"""Which implementation of the kernel interface a device gets."""

from __future__ import annotations

import torch

from paraflash.kernels.interface import Kernels


def make_kernels(device: torch.device) -> Kernels:
    """The cuda kernels on a GPU, the reference elsewhere."""
    if device.type == "cuda":
        from paraflash.kernels.cuda import cuda_kernels

        return cuda_kernels()
    from paraflash.kernels.reference import reference_kernels

    return reference_kernels()
