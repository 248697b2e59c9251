"""How many bytes a rank will hold, from the tensor table alone, and whether a machine has them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paraflash.checkpoint.tensors import BLOCK, Shard, Slices, TensorSpec, shard_slices, tensor_table
from paraflash.config.model import ModelConfig

if TYPE_CHECKING:
    import torch

FP8_LINEARS = "fp8_linears"  # a kind of `keep_quantized`: the FP8 tensors that `one_byte` names
ONE_BYTE_UNITS = (128, 64)  # outputs and inputs of a one-byte product on a GPU come in multiples of these
ONE_BYTE_OUTPUTS = 2048  # of a rank at least: fewer hold few bytes and leave most of a GPU idle (docs/performance.md)


class NotEnoughMemory(MemoryError):
    """The weights of a rank do not fit; the message has the numbers."""


@dataclass(frozen=True)
class RankBytes:
    device: int  # weights that the rank allocates
    experts: int  # of these, routed experts
    embeddings: int  # of these, embedding and head
    engram: int  # file bytes that the node maps, once for all its ranks

    @property
    def dense(self) -> int:
        """What is neither routed experts nor embedding and head."""
        return self.device - self.experts - self.embeddings


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
    """What `load_weights` allocates for a rank: `itemsize` bytes a value (2 for bfloat16), F32 tensors always 4.

    FP8_LINEARS count as the products take them, with a scale for 32 values; they are loaded with one for 32x32.
    """
    device = experts = embeddings = engram = 0
    for spec in tensor_table(model):
        if spec.split.kind == "engram":
            engram += stored_bytes(spec)
        slices = None if spec.optional else shard_slices(spec, shard)
        if slices is None:
            continue
        size = _loaded_bytes(spec, slices, itemsize, keep_quantized)
        device += size
        experts += size if spec.expert is not None else 0
        embeddings += size if spec.name in ("embed.weight", "head.weight") else 0
    return RankBytes(device, experts, embeddings, engram)


def _loaded_bytes(spec: TensorSpec, slices: Slices, itemsize: int, keep_quantized: bool | Collection[str]) -> int:
    values = math.prod(part.stop - part.start for part in slices)
    if not keeps(spec, slices, keep_quantized):
        return values * (4 if spec.dtype == "f32" else itemsize)
    if spec.dtype == "fp4":
        return values // 2 + values // BLOCK
    if not isinstance(keep_quantized, bool) and "fp8" not in keep_quantized:
        return values + values // BLOCK
    return values + math.prod(-(-part.stop // BLOCK) - part.start // BLOCK for part in slices)


def one_byte(spec: TensorSpec, slices: Slices) -> bool:
    """Whether a rank's part of a tensor is an FP8 linear that can stay in one byte (kernels/cuda/fp8_linear.py).

    Routed experts, the grouped output projection, other multiples and parts that cut a scale block cannot; parts with
    few outputs could, and do not.
    """
    if spec.dtype != "fp8" or spec.expert is not None or spec.grouped:
        return False
    if slices[0].stop - slices[0].start < ONE_BYTE_OUTPUTS:
        return False
    fits = (not (part.stop - part.start) % unit for part, unit in zip(slices, ONE_BYTE_UNITS, strict=True))
    return all(fits) and all(part.stop > part.start and not part.start % BLOCK for part in slices)


def engram_share(model: ModelConfig, tp_size: int) -> int:
    """Bytes of a rank's share of all Engram tables where they lie on the devices (engine/engram_shards.py)."""
    tables = [spec for spec in tensor_table(model) if spec.split.kind == "engram"]
    return sum((-(-spec.shape[0] // tp_size) + 1) * (stored_bytes(spec) // spec.shape[0]) for spec in tables)


def keeps(spec: TensorSpec, slices: Slices, keep_quantized: bool | Collection[str]) -> bool:
    """Whether a rank's part of a tensor stays in its stored codes: of all quantised ones, of none, or of the kinds
    named, which are dtypes of the table and FP8_LINEARS."""
    if isinstance(keep_quantized, bool):
        return keep_quantized and spec.scale_name is not None
    return spec.dtype in keep_quantized or (FP8_LINEARS in keep_quantized and one_byte(spec, slices))


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
