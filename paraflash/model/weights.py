"""Access to a rank's weights by layer, their form for the kernels, and the numeric mode of a run."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from paraflash.checkpoint.quant import QuantTensor
from paraflash.kernels.interface import Kernels


@dataclass(frozen=True)
class Numerics:
    """dtype of activations; `trained_rounding` applies the model's cache rounding (mode R, else R0);
    `round_inputs` applies the FP8 rounding of linear inputs (part of mode Q, model.md 2.4)."""

    dtype: torch.dtype
    trained_rounding: bool
    round_inputs: bool


@dataclass(frozen=True)
class Weights:
    """A view of the loaded tensors below a name prefix: w["wq_a"] is `<prefix>wq_a.weight` or `<prefix>wq_a`."""

    tensors: MutableMapping[str, Any]
    prefix: str = ""

    def __getitem__(self, name: str) -> Any:
        full = self.prefix + name
        found = self.tensors.get(full + ".weight")
        return self.tensors[full] if found is None else found

    def take(self, name: str) -> Any:
        """The tensor, and gives it up: what is made of it may replace it."""
        return self.tensors.pop(self.prefix + name)

    def under(self, name: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{name}.")


def pack_linears(tensors: MutableMapping[str, Any], kernels: Kernels) -> None:
    """Replaces the FP8 linears that were kept as stored by what `Kernels.linear` takes, one after the other."""
    for name in tensors:
        weight = tensors[name]
        if isinstance(weight, QuantTensor) and weight.kind == "fp8":
            tensors[name] = kernels.pack_linear(weight)
