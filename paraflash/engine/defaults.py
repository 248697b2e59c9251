"""Fills in what a user left open and refuses what cannot work, before any process starts.

`resolve(config, model)` gives an `EngineConfig` without "auto": device, dtypes, backends and limits are chosen. Only
`max_model_len` may stay None; it is settled by `fit_to_pool` when the size of the KV pool is known. And `dense_weights`
may stay auto on a GPU, where the memory plan settles it (memory_plan.py).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from paraflash.config.engine import BLOCK_SIZE, DENSE_WEIGHTS, KV_CACHE_DTYPES, EngineConfig, Refused
from paraflash.config.model import ModelConfig

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("auto", "reference", "FLASHMLA_SPARSE_DSV41")
MOE_BACKENDS = ("auto", "reference", "marlin", "humming", "humming_fp8", "triton")
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "bfloat16", "float32"),
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "kv_cache_rounding": ("trained", "none"),
    "load_format": ("auto", "dummy"),
    "all2all_backend": ("allgather_reducescatter",),
    "moe_backend": MOE_BACKENDS,
    "dense_weights": DENSE_WEIGHTS,
    "attention_backend": ATTENTION_BACKENDS,
}
_AT_LEAST = {
    "tensor_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "block_size": 1,
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 0,
    "max_logprobs": 0,
    "max_queue": 0,
    "seed": -(2**63),
}
_AT_LEAST_OR_NONE = {
    "max_model_len": 1,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 1,
}
_SWITCHES = ("enable_expert_parallel", "enable_prefix_caching", "enforce_eager", "check_caches")
_ONLY_ONE = {
    "pipeline_parallel_size": "pipeline parallelism is not supported; use -tp and -pcp",
    "data_parallel_size": "data parallelism is not supported; start one server per replica, or use -pcp",
    "decode_context_parallel_size": "decode context parallelism is not supported; use -pcp, which spreads decode rows",
}


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Checks every setting and fills in the defaults. Raises `Refused` with one sentence for what cannot work."""
    if config.max_model_len == -1:
        config = replace(config, max_model_len=None)
    if config.kv_cache_dtype == "fp8":  # vLLM's general name
        logger.info("--kv-cache-dtype fp8 means fp8_ds_mla for this model")
        config = replace(config, kv_cache_dtype="fp8_ds_mla")
    _check_values(config)
    _check_unsupported(config)
    _check_model(config, model)
    config = _choose_device(config)
    cuda = config.device == "cuda"
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    # Bounded replay is an approximation by definition; float32 is asked for where results must be exact.
    replay = config.swa_bounded_replay if config.swa_bounded_replay is not None else dtype != "float32"
    config = replace(
        config,
        tokenizer=config.tokenizer or config.model,
        swa_bounded_replay=replay,
        dtype=dtype,
        kv_cache_dtype=_kv_cache_dtype(config, dtype),
        max_num_batched_tokens=config.max_num_batched_tokens or (8192 if cuda else 2048),
        max_num_seqs=config.max_num_seqs or (256 if cuda else 64),
        async_scheduling=_runs_ahead(config),
    )
    _check_widths(config, model)
    return _choose_backends(_choose_dense_weights(config, model))


def fit_to_pool(config: EngineConfig, model: ModelConfig, num_blocks: int) -> EngineConfig:
    """Settles `max_model_len` for a KV pool of `num_blocks` blocks, the null block included."""
    capacity = (num_blocks - 1) * BLOCK_SIZE
    if config.max_model_len is None:
        return replace(config, max_model_len=min(model.max_position_embeddings, capacity))
    if config.max_model_len > capacity:
        logger.warning(
            "max_model_len is %d but the KV pool holds %d tokens; longer requests are refused one by one",
            config.max_model_len,
            capacity,
        )
    return config


def _runs_ahead(config: EngineConfig) -> bool:
    """`config.device` is chosen. On the CPU ranks and scheduler share the cores: nothing is gained there."""
    if config.async_scheduling and config.check_caches:
        logger.warning("--async-scheduling is off: --check-caches looks at the caches between steps")
    wanted = config.device == "cuda" if config.async_scheduling is None else config.async_scheduling
    return wanted and not config.check_caches


def _named(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_values(config: EngineConfig) -> None:
    """Type and range of each field, on its own."""
    for name, allowed in _CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            raise Refused(f"{name} is {value!r}; paraflash supports {_named(allowed)}")
    for name, low in (_AT_LEAST | _AT_LEAST_OR_NONE).items():
        value = getattr(config, name)
        if value is None and name in _AT_LEAST_OR_NONE:
            continue
        if not _is_int(value) or not low <= value < 2**63:
            raise Refused(f"{name} is {value!r}; an integer of at least {low} is needed")
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise Refused(f"{name} is {getattr(config, name)!r}; true or false is needed")
    for name, high in (("gpu_memory_utilization", 1.0), ("step_timeout", math.inf)):
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= high:
            raise Refused(f"{name} is {value!r}; a number above 0 and at most {high:g} is needed")
    for name in ("async_scheduling", "swa_bounded_replay"):
        if not isinstance(getattr(config, name), (bool, type(None))):
            raise Refused(f"{name} is {getattr(config, name)!r}; true, false or nothing is needed")
    if not isinstance(config.model, (str, os.PathLike)) or not (
        config.tokenizer is None or isinstance(config.tokenizer, (str, os.PathLike))
    ):
        raise Refused(f"model is {config.model!r} and tokenizer {config.tokenizer!r}; the paths of folders are needed")
    if not isinstance(config.hf_overrides, dict):
        raise Refused(f"hf_overrides is {config.hf_overrides!r}; an object is needed")
    engram = config.engram_config
    if (
        not isinstance(engram, dict)
        or set(engram) - {"cpu_offload"}
        or not isinstance(engram.get("cpu_offload", True), bool)
    ):
        raise Refused(f'engram_config is {engram!r}; an object with at most "cpu_offload": true or false is needed')


def _check_unsupported(config: EngineConfig) -> None:
    for name, why in _ONLY_ONE.items():
        if getattr(config, name) != 1:
            raise Refused(f"{name} is {getattr(config, name)}: {why}")
    if config.block_size != BLOCK_SIZE:
        raise Refused(
            f"block_size is {config.block_size}: KV blocks hold {BLOCK_SIZE} tokens; use --block-size {BLOCK_SIZE}"
        )
    if config.kv_cache_dtype == "nvfp4_ds_mla" and config.kv_cache_rounding == "none":
        raise Refused(
            "kv_cache_dtype is nvfp4_ds_mla with kv_cache_rounding none: this record is the trained rounding itself; "
            "use --kv-cache-dtype bfloat16 or float32"
        )


def _check_model(config: EngineConfig, model: ModelConfig) -> None:
    """What the sizes of the model do not allow."""
    tp = config.tensor_parallel_size
    shared = {
        "o_groups": model.o_groups,
        "num_heads": model.num_heads,
        "moe_intermediate_size": model.moe_intermediate_size,
    }
    for name, size in shared.items():
        if size % tp:
            raise Refused(
                f"tensor_parallel_size is {tp}, which does not divide {name} {size} of this model; "
                f"use a divisor of {math.gcd(*shared.values())} and more of -pcp"
            )
    if config.world_size > model.num_experts:
        raise Refused(
            f"tensor_parallel_size {tp} x prefill_context_parallel_size {config.prefill_context_parallel_size} is "
            f"{config.world_size} ranks for {model.num_experts} routed experts; each rank needs one, use fewer ranks"
        )
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise Refused(
            f"max_model_len is {config.max_model_len}, but the model knows {model.max_position_embeddings} positions; "
            f"use at most that"
        )


def _check_widths(config: EngineConfig, model: ModelConfig) -> None:
    """The groups of the cache's rounding must fit the model's heads."""
    from paraflash.cache.records import kv_format

    if config.kv_cache_rounding == "trained" and (model.head_dim % 32 or model.index_head_dim % 32):
        raise Refused(
            f"kv_cache_rounding is trained, which needs head_dim and index_head_dim in multiples of 32, not "
            f"{model.head_dim} and {model.index_head_dim}; use none"
        )
    try:
        kv_format(config.kv_cache_dtype, model.head_dim, model.rope_dim, model.index_head_dim)
    except ValueError as error:
        raise Refused(str(error)) from None


def _choose_device(config: EngineConfig) -> EngineConfig:
    import torch

    available = torch.cuda.is_available()
    device = ("cuda" if available else "cpu") if config.device == "auto" else config.device
    if device == "cuda":
        if torch.version.hip is not None:
            raise Refused(
                "device is cuda with a ROCm build of torch: ROCm is not supported; use an NVIDIA GPU or --device cpu"
            )
        if not available:
            raise Refused(
                "device is cuda, but torch finds no CUDA device; use --device cpu or install a CUDA build of torch"
            )
        gpus, tp, pcp = torch.cuda.device_count(), config.tensor_parallel_size, config.prefill_context_parallel_size
        if config.world_size > gpus:
            raise Refused(
                f"tensor_parallel_size {tp} x prefill_context_parallel_size {pcp} needs {config.world_size} GPUs, but "
                f"{gpus} are visible; use smaller sizes or more GPUs"
            )
        if config.kv_cache_dtype == "float32":
            raise Refused(
                "kv_cache_dtype is float32 on cuda: no GPU kernel reads it; use bfloat16 there, or --device cpu"
            )
    return replace(config, device=device)


def _kv_cache_dtype(config: EngineConfig, dtype: str) -> str:
    """`config.device` is chosen; the default on the CPU is what is faithful to the trained model."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    if config.device == "cuda":
        return "bfloat16"
    return "nvfp4_ds_mla" if config.kv_cache_rounding == "trained" else dtype


def _choose_dense_weights(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`config.device` and `dtype` are chosen. The package and the GPU are looked at by each rank."""
    if config.device == "cpu":
        why = "one-byte products run on a GPU, device is cpu"
    elif config.dtype != "bfloat16":
        why = f"one-byte products compute in bfloat16, dtype is {config.dtype}"
    elif model.quant is None:
        why = "the linears of this checkpoint are not FP8"
    else:
        return config
    if config.dense_weights == "fp8":
        raise Refused(f"dense_weights is fp8: {why}; use --dense-weights bf16 or auto")
    return replace(config, dense_weights="bf16")


def _choose_backends(config: EngineConfig) -> EngineConfig:
    """Maps vLLM's names of kernels to what runs on the device, with a log line for each that means something else."""
    if config.device == "cpu":
        for name in ("attention_backend", "moe_backend"):
            if getattr(config, name) not in ("auto", "reference"):
                logger.info(
                    "--%s %s: on the CPU the reference kernels run", name.replace("_", "-"), getattr(config, name)
                )
        return replace(config, attention_backend="reference", moe_backend="reference", enforce_eager=True)
    for name in ("attention_backend", "moe_backend"):
        if getattr(config, name) == "reference":
            raise Refused(f"{name} is reference: those kernels run on the CPU alone; use auto, or --device cpu")
    if config.moe_backend == "marlin":
        logger.info("--moe-backend marlin: humming runs the FP4 experts with BF16 activations")
        config = replace(config, moe_backend="humming")
    if config.dtype == "float32" and not config.enforce_eager:
        logger.info("CUDA graphs are off: in float32 the experts run in code that a graph cannot hold")
        config = replace(config, enforce_eager=True)
    return config
