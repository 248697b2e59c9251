"""Rotary frequencies and the cos/sin tables of a step's positions (model.md 3.4)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from paraflash.config.model import RopeSpec
from paraflash.kernels.interface import Rotary


@lru_cache
def _frequencies_on(device: torch.device, spec: RopeSpec, rope_dim: int) -> Tensor:
    return frequencies(spec, rope_dim).to(device)


@lru_cache
def frequencies(spec: RopeSpec, rope_dim: int) -> Tensor:
    """[rope_dim / 2] fp32. YaRN blends the slow channels' frequencies towards 1/factor; no scaling of cos and sin."""
    i = torch.arange(rope_dim // 2, dtype=torch.float64)
    plain = spec.theta ** (-2 * i / rope_dim)
    if spec.factor == 1.0:
        return plain.float()

    def turns(rotations: float) -> float:
        return rope_dim * math.log(spec.original_positions / (2 * math.pi * rotations)) / (2 * math.log(spec.theta))

    low = max(math.floor(turns(spec.beta_fast)), 0)
    high: float = min(math.ceil(turns(spec.beta_slow)), rope_dim - 1)
    if high == low:
        high += 0.001
    ramp = ((i - low) / (high - low)).clamp(0, 1)
    return (plain / spec.factor * ramp + plain * (1 - ramp)).float()


def rotary(positions: Tensor, spec: RopeSpec, rope_dim: int) -> Rotary:
    """Tables of positions [n], in fp32 (bf16 tables are wrong beyond a few hundred positions)."""
    angle = positions.float()[:, None] * _frequencies_on(positions.device, spec, rope_dim)
    return Rotary(angle.cos(), angle.sin())
