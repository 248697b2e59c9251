"""Random weights as a function of (seed, tensor name, element index), for synthetic checkpoints and dummy loading.

Any slice of a tensor can be made alone, on any device, with the same values, so every topology sees the same model.
The spreads are chosen so that no term of the model vanishes and activations stay of order one: linears keep the size
of their input, norms lie around 1, router bias, sinks and hyper-connection bases differ enough to change decisions.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from paraflash.checkpoint.tensors import TensorSpec
from paraflash.config.model import ModelConfig

# Gain of a linear: standard deviation of an output for inputs of deviation 1. Those not listed have 1.
_GAINS = {
    "attn.wq_b.weight": 2.0,
    "attn.compressor.wgate.weight": 1.5,
    "ffn.gate.weight": 1.5,
    "engram.wkv.weight": 1.5,
    "head.weight": 2.5,
}
_FIXED = {  # suffix -> mean, deviation
    "embed.weight": (0.0, 1.0),  # tokens and Engram rows
    "norm.weight": (1.0, 0.25),
    "engram.q_weight": (1.0, 0.25),
    "engram.k_weight": (1.0, 0.25),
    "attn.attn_sink": (0.0, 1.0),
    "ffn.gate.bias": (0.0, 0.15),
    "ffn.gate.bias_vl": (0.0, 0.15),
    "_base": (0.0, 0.5),
    "_scale": (0.8, 0.2),
}
_COMB_DIAGONAL = 1.6  # added to the base of the comb mix, so that each stream mostly keeps itself
LIMIT = 2 * 3**0.5  # the largest |deviate|, in standard deviations


def distribution(spec: TensorSpec) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's values."""
    for suffix, moments in _FIXED.items():
        if spec.name.endswith(suffix):
            return moments
    indexer = ".indexer." in spec.name
    gain = next((g for suffix, g in _GAINS.items() if spec.name.endswith(suffix) and not indexer), 1.0)
    return 0.0, gain * spec.shape[-1] ** -0.5


def random_values(spec: TensorSpec, model: ModelConfig, seed: int, index: Tensor) -> Tensor:
    """fp32 values of the elements with flat int64 index `index` (any shape, any device)."""
    mean, deviation = distribution(spec)
    values = deviates(tensor_seed(seed, spec.name), index) * deviation + mean
    if spec.name.endswith("_base"):
        place = index - 2 * model.hc_mult  # pre and post come first, then the comb matrix row by row
        values += _COMB_DIAGONAL * ((place >= 0) & (place % (model.hc_mult + 1) == 0))
    return values


def flat_index(spec: TensorSpec, rows: slice, cols: slice, device: torch.device | str = "cpu") -> Tensor:
    """Flat int64 index [rows, cols] of a part of a 2-d tensor."""
    row = torch.arange(rows.start, rows.stop, device=device)
    return row[:, None] * spec.shape[1] + torch.arange(cols.start, cols.stop, device=device)


def random_tensor(spec: TensorSpec, model: ModelConfig, seed: int) -> Tensor:
    """A whole tensor in fp32."""
    size = 1
    for n in spec.shape:
        size *= n
    result = torch.empty(size)
    step = 1 << 20
    for start in range(0, size, step):
        index = torch.arange(start, min(start + step, size))
        result[start : start + step] = random_values(spec, model, seed, index)
    return result.view(spec.shape)


def tensor_seed(seed: int, name: str) -> int:
    """A signed 64-bit number for one tensor."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def deviates(seed: int, index: Tensor) -> Tensor:
    """fp32 deviates of mean 0 and deviation 1, bell-shaped and bounded by LIMIT: the sum of four uniform numbers.

    They are the 16-bit fields of a mixed counter (the splitmix64 finaliser), in integers that wrap alike everywhere.
    """
    x = index * _signed(0x9E3779B97F4A7C15) + seed
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    total = (x & 0xFFFF) + ((x >> 16) & 0xFFFF) + ((x >> 32) & 0xFFFF) + ((x >> 48) & 0xFFFF)
    return (total - 2 * 0xFFFF).float() * (3**0.5 / 65536)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
