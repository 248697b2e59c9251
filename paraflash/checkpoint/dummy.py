"""Weights without a checkpoint (`--load-format dummy`): the same keys, shapes and formats as a loaded model.

Values follow random_weights.py, so every topology and device gets the same model; quantised tensors are rounded with
one scale a tensor. Engram rows are made when they are looked up, so no table is ever stored.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paraflash.checkpoint.engram_table import check_ids
from paraflash.checkpoint.load import Progress, Weights, assemble, row_chunks
from paraflash.checkpoint.quant import QuantTensor, fp4_dequant, fp8_block_dequant
from paraflash.checkpoint.random_weights import LIMIT, distribution, flat_index, random_values
from paraflash.checkpoint.tensors import BLOCK, Shard, Slices, TensorSpec, tensor_table
from paraflash.config.model import ModelConfig
from paraflash.formats import E4M3_MAX, e2m1_codes, exp2_int, pow2_ceil_exponent

_CPU_VALUES, _GPU_VALUES = 1 << 19, 1 << 25  # made at a time; a GPU needs large pieces to be fast


def dummy_weights(
    model: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    keep_quantized: bool | Collection[str] = False,
    progress: Progress | None = None,
) -> Weights:
    """What `load_weights` would return, with random values. Raises NotEnoughMemory before anything is made."""

    def fill(target: Tensor | QuantTensor, spec: TensorSpec, slices: Slices) -> None:
        _fill(target, spec, slices, model, seed)

    return assemble(model, shard, dtype, device, keep_quantized, progress, fill)


class DummyEngramTable:
    """Stands in for an EngramTable: row r always has the same random values."""

    row_bytes, scale_bytes = 8, 0

    def __init__(self, spec: TensorSpec, model: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device | str):
        self.rows, self.dim = spec.shape
        self.dtype = dtype
        self._spec, self._model, self._seed, self._device = spec, model, seed, device

    def lookup(self, ids: NDArray[np.integer]) -> Tensor:
        """Rows [.., D] in `dtype`. Raises IndexError for an id outside the table."""
        return self._values(torch.from_numpy(check_ids(ids, self.rows)).to(self._device))

    def gather(self, ids: NDArray[np.int64], raw: NDArray[np.uint8], scale: NDArray[np.uint8]) -> None:
        """The stored bytes of a row are those of its id: raw [.., 8]. There are no scales."""
        raw.view(np.int64)[..., 0] = ids

    def decode(self, raw: Tensor, scale: Tensor) -> Tensor:
        """Gathered bytes -> values [.., D] in `dtype`, on the bytes' device."""
        return self._values(raw.view(torch.int64)[..., 0])

    def _values(self, ids: Tensor) -> Tensor:
        index = ids[..., None] * self.dim + torch.arange(self.dim, device=ids.device)
        return random_values(self._spec, self._model, self._seed, index).to(self.dtype)


def dummy_engram_tables(
    model: ModelConfig, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> list[DummyEngramTable]:
    """One table per Engram layer, in the order of model.engram_layers."""
    return [DummyEngramTable(s, model, dtype, seed, device) for s in tensor_table(model) if s.split.kind == "engram"]


def _fill(target: Tensor | QuantTensor, spec: TensorSpec, slices: Slices, model: ModelConfig, seed: int) -> None:
    device = target.data.device
    if len(slices) == 1:
        assert isinstance(target, Tensor)
        target.copy_(random_values(spec, model, seed, torch.arange(slices[0].start, slices[0].stop, device=device)))
        return
    rows, cols = slices
    exponent = _exponent(spec)
    if isinstance(target, QuantTensor):
        target.scale.fill_(exponent + 127)
    size = _GPU_VALUES if device.type == "cuda" else _CPU_VALUES
    for start, end in row_chunks(rows, cols.stop - cols.start, size):
        here = slice(start - rows.start, end - rows.start)
        values = random_values(spec, model, seed, flat_index(spec, slice(start, end), cols, device))
        if spec.scale_name is None:
            assert isinstance(target, Tensor)
            target[here].copy_(values)
            continue
        codes = _codes(spec, values / exp2_int(torch.tensor(exponent, device=device)))
        if isinstance(target, QuantTensor):
            target.data[here].copy_(codes)
        else:
            scale = torch.full((1, 1), exponent + 127, dtype=torch.uint8, device=device)
            if spec.dtype == "fp4":
                decoded = fp4_dequant(codes, scale.expand(len(codes), values.shape[1] // BLOCK))
            else:
                decoded = fp8_block_dequant(codes, scale.expand(*(-(-n // BLOCK) for n in codes.shape)))
            target[here].copy_(decoded)


def _exponent(spec: TensorSpec) -> int:
    """Exponent of the tensor's one scale: the largest possible value still has a code."""
    largest = LIMIT * distribution(spec)[1] / (6.0 if spec.dtype == "fp4" else E4M3_MAX)
    return int(pow2_ceil_exponent(torch.tensor(largest)))


def _codes(spec: TensorSpec, scaled: Tensor) -> Tensor:
    if spec.dtype == "fp8":
        return scaled.to(torch.float8_e4m3fn)
    nibbles = e2m1_codes(scaled)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
