"""Bytes of a rank: weights by the checkpoint's tensor table, caches by their records, and what is left for KV.

Weights and windows are exact counts; the workspace is an estimate of the live activations of one step. KV caches are
replicated on every rank, so the tokens they hold are those of the fullest rank, rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from paraflash.checkpoint.memory import FP8_LINEARS, rank_bytes
from paraflash.checkpoint.tensors import Shard
from paraflash.config.engine import BLOCK_SIZE, DENSE_WEIGHTS
from paraflash.config.model import ModelConfig
from paraflash.planner.cost import BF16, HEAD_TILE, RecordBytes
from paraflash.planner.hardware import Hardware
from paraflash.topology import Topology

INDEX_SCORE_LIMIT = 512 * 2**20  # scores are made for as many queries at a time as this holds


@dataclass(frozen=True)
class MemoryOptions:
    kv_cache_dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int = 256
    dense_weights: str = "auto"  # FP8 linears: bf16: expanded at load; fp8: one byte; auto: fp8 where it has to be
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
    dense_weights: str  # "bf16" or "fp8"

    @property
    def fixed(self) -> float:
        return self.experts + self.dense + self.engram + self.windows + self.workspace


def cache_records(model: ModelConfig, kv_cache_dtype: str) -> RecordBytes:
    """Record sizes of a KV cache dtype. Raises ValueError for a dtype that the model cannot use."""
    from paraflash.cache.records import kv_format  # imports torch

    layout = kv_format(kv_cache_dtype, model.head_dim, model.rope_dim, model.index_head_dim)
    return RecordBytes(layout.window.nbytes, layout.latent.nbytes, layout.index.nbytes)


@lru_cache(maxsize=64)
def weight_bytes(model: ModelConfig, topology: Topology, dense_weights: str) -> tuple[int, int, int]:
    """(routed experts, all else, whole Engram tables) of rank 0 in bytes; dense_weights: "bf16" or "fp8"."""
    kinds = ("fp4", FP8_LINEARS) if dense_weights == "fp8" else ("fp4",)
    held = rank_bytes(model, Shard(0, topology.tp, topology.world), BF16, kinds)
    return held.experts, held.device - held.experts, held.engram


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
    """The memory plan of one rank; `kv_tokens` is 0 where the fixed part alone does not fit.

    With dense_weights auto, FP8 linears stay in one byte only where bf16 ones leave no room for a prompt of max_len.
    """
    if options.dense_weights not in DENSE_WEIGHTS:
        raise ValueError(f"dense_weights is {options.dense_weights!r}; one of {', '.join(DENSE_WEIGHTS)} is needed")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {options.gpu_memory_utilization}; above 0 and at most 1 is needed")
    if options.dense_weights == "auto":
        wide, narrow = (
            rank_memory(model, topology, hardware, replace(options, dense_weights=form), batch_budget, max_len)
            for form in ("bf16", "fp8")
        )
        fits = wide.fixed <= hardware.memory_bytes * options.gpu_memory_utilization
        enough = fits and (wide.kv_tokens > max_len or not model.kv_owners)
        return wide if enough or wide.dense == narrow.dense else narrow
    records = cache_records(model, options.kv_cache_dtype)
    experts, dense, engram = weight_bytes(model, topology, options.dense_weights)
    windows = window_bytes(model, records, options.max_num_seqs)
    workspace = workspace_bytes(model, topology, batch_budget, max_len)
    on_gpu = engram / topology.tp if options.engram_on_gpu else 0.0
    per_token = kv_bytes_per_token(model, records)
    free = hardware.memory_bytes * options.gpu_memory_utilization - experts - dense - on_gpu - windows - workspace
    tokens = max(0, int(free / per_token)) // BLOCK_SIZE * BLOCK_SIZE if per_token else 0
    host = 0.0 if options.engram_on_gpu else engram
    form = options.dense_weights
    return RankMemory(experts, dense, on_gpu, windows, workspace, per_token, tokens, host, form)
