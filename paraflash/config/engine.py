"""Everything a user can set, as one value that is checked once and passed down.

Names and meanings follow vLLM's flags. A combination that does not work is refused here, before anything starts,
with one sentence that says why and what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KV_CACHE_DTYPES = ("auto", "fp8_ds_mla", "nvfp4_ds_mla", "bfloat16", "float32")
DENSE_WEIGHTS = ("auto", "bf16", "fp8")
BLOCK_SIZE = 64


class Refused(ValueError):
    """A setting or a combination of settings that paraflash does not support; the message says what to use."""


@dataclass(frozen=True)
class EngineConfig:
    model: str
    tokenizer: str | None = None
    device: str = "auto"  # auto, cpu, cuda
    dtype: str = "auto"  # auto, bfloat16, float32
    tensor_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str = "allgather_reducescatter"
    disable_custom_all_reduce: bool = False  # exchange between GPUs by NCCL alone
    moe_backend: str = "auto"
    attention_backend: str = "auto"
    dense_weights: str = "auto"  # FP8 linears on a GPU: bf16 (expanded), fp8 (one byte), auto (bf16 where it fits)
    kv_cache_dtype: str = "auto"
    kv_cache_rounding: str = "trained"  # trained, none: modes R and R0 of the model
    block_size: int = BLOCK_SIZE
    max_model_len: int | None = None  # None: as many as the KV pool and the model allow
    max_num_batched_tokens: int | None = None  # None: a default by device
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int = 0  # 0: no cap
    max_num_partial_prefills: int = 0  # 0: no cap
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None  # KV blocks, on any device
    enable_prefix_caching: bool = True
    swa_bounded_replay: bool | None = None  # None: on, but off in float32, the dtype for exact results
    enforce_eager: bool = False
    async_scheduling: bool | None = None  # None: on with GPUs, off on the CPU
    load_format: str = "auto"  # auto, dummy
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    engram_config: dict[str, Any] = field(default_factory=dict)  # {"cpu_offload": bool}
    max_logprobs: int = 20
    max_queue: int = 0  # waiting requests above which new ones are turned away; 0: no limit
    seed: int = 0
    step_timeout: float = 9.0  # seconds without progress of any rank after which the engine ends, within 10 in all
    check_caches: bool = False  # debug: compare a hash of all PCP ranks' caches after each step

    @property
    def engram_on_device(self) -> bool:
        """Whether the Engram tables lie on the devices, split over TP; dummy tables lie nowhere."""
        return not self.engram_config.get("cpu_offload", True) and self.load_format != "dummy"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.prefill_context_parallel_size
