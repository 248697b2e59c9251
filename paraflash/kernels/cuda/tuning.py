"""Settings of humming's kernels: the package's own, but that every output is summed in fp32 by one block.

Where tiles are fewer than multiprocessors, or leave some idle at the end, the package shares their sums out over
several blocks ("stream-K"). The parts are rounded to bf16 and added to the output in the order in which blocks finish:
more rounding errors, and other bits from run to run. Here dense products get narrow tiles where that keeps more
multiprocessors busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

Settings = dict[str, Any]

_NARROW = 128  # outputs of the narrowest tile for bf16 inputs
# As the package estimates: expanding a tile's weights takes as long as so many rows, and wide tiles are faster.
_EXPANDING, _WIDE_GAIN = 64, 1.1


def one_block(settings: Settings) -> Settings:
    return settings | {"use_stream_k": False}


def least_work(choices: Sequence[Settings], rows: int, out: int, processors: int) -> Settings:
    """The settings under which the busiest of so many multiprocessors has least to do for [rows, out], or the first."""

    def work(settings: Settings) -> float:
        high, wide, _ = settings["block_shape"]
        tiles = -(-rows // high) * -(-out // wide)
        cost = -(-tiles // processors) * (high + _EXPANDING) * wide
        return cost / _WIDE_GAIN if wide > _NARROW else cost

    return min(choices, key=work)


def dense(config: Any, rows: int, device: torch.device) -> Settings:
    """For a product of up to `rows` rows with one weight; config: the package's LayerConfig."""
    from humming.tune import get_heuristics_config

    # The narrow ones are what the package would take for a layer of one tile of outputs.
    choices = [
        get_heuristics_config(layer, rows, gemm_type="dense", device=device)
        for layer in (dataclasses.replace(config, shape_n=_NARROW), config)
    ]
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return one_block(least_work(choices, rows, config.shape_n, processors))


def grouped(config: Any, rows: int, device: torch.device) -> Settings:
    """For products of about `rows` rows, which experts share out among them."""
    from humming.tune import get_heuristics_config

    return one_block(get_heuristics_config(config, rows, gemm_type="grouped_contiguous", device=device))
