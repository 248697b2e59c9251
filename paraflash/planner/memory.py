"""Bytes of a rank: weights by the checkpoint's tensor table, caches by their records, and what is left for KV.

Weights and windows are exact counts; the workspace is an estimate of the live activations of one step. KV caches are
replicated on every rank, so the tokens they hold are those of the fullest rank, rank 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from paraflash.checkpoint.tensors import Shard, TensorSpec, shard_slices, tensor_table
from paraflash.config.engine import BLOCK_SIZE
from paraflash.config.model import ModelConfig
from paraflash.planner.cost import BF16, HEAD_TILE, RecordBytes
from paraflash.planner.hardware import Hardware
from paraflash.topology import Topology

_VALUE_BYTES = {"bf16": 2.0, "f32": 4.0, "fp8": 1.0, "fp4": 0.5, "engram": 1.0}
DENSE_WEIGHTS = ("bf16", "fp8")
INDEX_SCORE_LIMIT = 512 * 2**20  # scores are made for as many queries at a time as this holds


@dataclass(frozen=True)
class MemoryOptions:
    kv_cache_dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int = 256
    dense_weights: str = "bf16"  # fp8 matrices: kept as stored, or expanded to bf16 at load
    engram_on_gpu: bool = False  # else one copy a node in host memory


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank, and the KV tokens that fit beside them."""

    experts: float
    dense: float
    engram: float
    windows: float
    workspace: float
    kv_bytes_per_token: float
    kv_tokens: int
    host_node: float  # Engram tables in host memory, one copy a node

    @property
    def fixed(self) -> float:
        return self.experts + self.dense + self.engram + self.windows + self.workspace


def cache_records(model: ModelConfig, kv_cache_dtype: str) -> RecordBytes:
    """Record sizes of a KV cache dtype. Raises ValueError for a dtype that the model cannot use."""
    from paraflash.cache.records import kv_format  # imports torch

    layout = kv_format(kv_cache_dtype, model.head_dim, model.rope_dim, model.index_head_dim)
    return RecordBytes(layout.window.nbytes, layout.latent.nbytes, layout.index.nbytes)


def tensor_bytes(spec: TensorSpec, shape: tuple[int, ...], expand: bool = False) -> float:
    """Bytes of a tensor, or of a rank's part of `shape`, scales included; `expand`: fp8 kept as bf16."""
    count = math.prod(shape)
    if expand and spec.dtype == "fp8":
        return count * BF16
    scales = {"fp8": 32 * 32, "fp4": 32, "engram": 32}.get(spec.dtype) if spec.scale_name else None
    if scales is None:
        return count * _VALUE_BYTES[spec.dtype]
    if shape == spec.shape:
        return count * _VALUE_BYTES[spec.dtype] + math.prod(spec.scale_shape)
    return count * (_VALUE_BYTES[spec.dtype] + 1 / scales)


@lru_cache(maxsize=64)
def weight_bytes(model: ModelConfig, topology: Topology, expand: bool) -> tuple[float, float, float]:
    """(routed experts, all else, whole Engram tables) of rank 0 in bytes."""
    experts = dense = engram = 0.0
    for spec in tensor_table(model):
        if spec.split.kind == "engram":
            engram += tensor_bytes(spec, spec.shape)
            continue
        part = shard_slices(spec, Shard(0, topology.tp, topology.world))
        if part is None:
            continue
        nbytes = tensor_bytes(spec, tuple(s.stop - s.start for s in part), expand and spec.expert is None)
        if spec.expert is not None:
            experts += nbytes
        else:
            dense += nbytes
    return experts, dense, engram


def kv_bytes_per_token(model: ModelConfig, records: RecordBytes) -> float:
    """Compressed latents and index keys of one token over all KV owners (model.md 4.2)."""
    return sum((records.latent + records.index) / layer.ratio for layer in model.kv_owners)


def window_bytes(model: ModelConfig, records: RecordBytes, sequences: int) -> float:
    """Sliding windows of all layers and open ratio-2 rows, for `sequences` requests (model.md 4.1)."""
    ring = sum(2 * 4 * model.head_dim for layer in model.kv_owners if layer.ratio == 2)
    return sequences * (model.num_layers * model.window * records.window + ring)


def workspace_bytes(model: ModelConfig, topology: Topology, batch_budget: int, max_len: int) -> float:
    """Estimate of a step's live activations: streams, padded heads, the rows of the MoE, index scores."""
    local = -(-batch_budget // topology.pcp)
    heads = -(-model.num_heads // topology.tp // HEAD_TILE) * HEAD_TILE
    streams = 3 * BF16 * local * model.hc_mult * model.hidden_size
    attention = 2 * BF16 * local * heads * model.head_dim
    pairs = batch_budget * model.experts_per_token / topology.world
    moe = BF16 * (
        2 * batch_budget * model.hidden_size + pairs * (2 * model.hidden_size + 3 * model.moe_intermediate_size)
    )
    scores = min(4.0 * local * max_len, INDEX_SCORE_LIMIT)
    return streams + attention + moe + scores


def rank_memory(
    model: ModelConfig, topology: Topology, hardware: Hardware, options: MemoryOptions, batch_budget: int, max_len: int
) -> RankMemory:
    """The memory plan of one rank; `kv_tokens` is 0 where the fixed part alone does not fit."""
    if options.dense_weights not in DENSE_WEIGHTS:
        raise ValueError(f"dense_weights is {options.dense_weights!r}; one of {', '.join(DENSE_WEIGHTS)} is needed")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {options.gpu_memory_utilization}; above 0 and at most 1 is needed")
    records = cache_records(model, options.kv_cache_dtype)
    experts, dense, engram = weight_bytes(model, topology, options.dense_weights == "bf16")
    windows = window_bytes(model, records, options.max_num_seqs)
    workspace = workspace_bytes(model, topology, batch_budget, max_len)
    on_gpu = engram / topology.tp if options.engram_on_gpu else 0.0
    per_token = kv_bytes_per_token(model, records)
    free = hardware.memory_bytes * options.gpu_memory_utilization - experts - dense - on_gpu - windows - workspace
    tokens = max(0, int(free / per_token)) // BLOCK_SIZE * BLOCK_SIZE if per_token else 0
    return RankMemory(
        experts, dense, on_gpu, windows, workspace, per_token, tokens, 0.0 if options.engram_on_gpu else engram
    )
