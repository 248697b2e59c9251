"""How many bytes a rank will hold, from the tensor table alone, and whether a machine has them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paraflash.checkpoint.tensors import BLOCK, Shard, TensorSpec, shard_slices, tensor_table
from paraflash.config.model import ModelConfig

if TYPE_CHECKING:
    import torch


class NotEnoughMemory(MemoryError):
    """The weights of a rank do not fit; the message has the numbers."""


@dataclass(frozen=True)
class RankBytes:
    device: int  # weights that the rank allocates
    experts: int  # of these, routed experts
    engram: int  # file bytes that the node maps, once for all its ranks


def stored_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor in the file, its scales included."""
    width = {"bf16": 2, "f32": 4, "fp8": 1, "fp4": 1, "engram": 1}[spec.dtype]
    return math.prod(spec.stored_shape) * width + (math.prod(spec.scale_shape) if spec.scale_name else 0)


def rank_bytes(
    model: ModelConfig,
    shard: Shard,
    itemsize: int,
    keep_quantized: bool | Collection[str] = False,
) -> RankBytes:
    """What `load_weights` allocates for a rank: `itemsize` bytes a value (2 for bfloat16), F32 tensors always 4."""
    device = experts = engram = 0
    for spec in tensor_table(model):
        if spec.split.kind == "engram":
            engram += stored_bytes(spec)
        slices = None if spec.optional else shard_slices(spec, shard)
        if slices is None:
            continue
        shape = [part.stop - part.start for part in slices]
        values = math.prod(shape)
        if keeps(spec, keep_quantized) and spec.dtype == "fp4":
            size = values // 2 + values // BLOCK
        elif keeps(spec, keep_quantized) and spec.dtype == "fp8":
            size = values + math.prod(-(-part.stop // BLOCK) - part.start // BLOCK for part in slices)
        else:
            size = values * (4 if spec.dtype == "f32" else itemsize)
        device += size
        experts += size if spec.expert is not None else 0
    return RankBytes(device, experts, engram)


def keeps(spec: TensorSpec, keep_quantized: bool | Collection[str]) -> bool:
    """Whether a tensor stays in its stored codes: all quantised ones, none, or those of the kinds named."""
    if isinstance(keep_quantized, bool):
        return keep_quantized and spec.scale_name is not None
    return spec.dtype in keep_quantized


def available_memory(device: torch.device | str) -> int | None:
    """Free bytes of a CUDA device, or what this process may still take of the machine's memory; None if unknown."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [n for n in (_meminfo(Path("/proc/meminfo")), _cgroup(Path("/sys/fs/cgroup"))) if n is not None]
    return min(limits, default=None)


def check_memory(needed: int, device: torch.device | str, what: str = "the weights of this rank") -> None:
    """Raises NotEnoughMemory if `needed` bytes do not fit on `device` now; `what` needs them."""
    free = available_memory(device)
    if free is not None and needed > free:
        raise NotEnoughMemory(
            f"{what}: {needed / 2**30:.2f} GiB are needed, but {device} has {free / 2**30:.2f} GiB free; "
            "use more ranks (--tensor-parallel-size, --prefill-context-parallel-size), a smaller cache "
            "(--num-gpu-blocks-override, --max-num-seqs) or a machine with more memory"
        )


def _meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup(folder: Path) -> int | None:
    """Room below a container's limit (cgroup v2); file pages can be dropped and do not count as used."""
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):
        return None
