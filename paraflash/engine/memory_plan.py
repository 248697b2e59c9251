"""Where the GPU memory of a rank goes, planned before anything is loaded; it settles `--dense-weights auto`.

Weights, windows and KV are counted, what a step takes is the planner's estimate (it is measured once the weights are
there). All sizes are bytes of one rank. FP8 linears stay in one byte only where the plan with bf16 ones does not fit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from paraflash.cache.records import KVFormat
from paraflash.cache.store import block_bytes, window_bytes
from paraflash.checkpoint.memory import FP8_LINEARS, engram_share, rank_bytes
from paraflash.checkpoint.tensors import Shard
from paraflash.config.engine import EngineConfig, Refused
from paraflash.config.model import ModelConfig
from paraflash.kernels.interface import Kernels
from paraflash.parallel.mesh import Mesh
from paraflash.planner.memory import workspace_bytes
from paraflash.topology import Topology

log = logging.getLogger("paraflash.memory")

LONG_CONTEXT_BYTES = 3 << 30  # what a step at the end of a long context takes more than one at its start


@dataclass(frozen=True)
class MemoryPlan:
    experts: int
    dense_bf16: int  # all but experts, embedding and head, with FP8 linears expanded
    dense_fp8: int  # the same with FP8 linears in one byte
    embeddings: int  # and the head
    engram: int  # 0 where the tables lie in host memory
    steps: int  # estimate
    windows: int
    kv: int  # the least that serves: one request of the greatest length, or what was asked for
    usable: int  # what may be taken of the GPU

    def needed(self, form: str) -> int:
        """Sum with dense weights in the form "bf16" or "fp8"."""
        dense = self.dense_fp8 if form == "fp8" else self.dense_bf16
        return self.experts + dense + self.embeddings + self.engram + self.steps + self.windows + self.kv

    def fits(self, form: str) -> bool:
        return self.needed(form) <= self.usable

    def table(self) -> str:
        """Lines of GiB for a log."""
        rows = (
            ("experts", self.experts, self.experts),
            ("dense weights", self.dense_bf16, self.dense_fp8),
            ("embedding and head", self.embeddings, self.embeddings),
            ("Engram tables", self.engram, self.engram),
            ("steps (estimate)", self.steps, self.steps),
            ("windows", self.windows, self.windows),
            ("KV, at least", self.kv, self.kv),
            ("sum", self.needed("bf16"), self.needed("fp8")),
            ("may be used", self.usable, self.usable),
        )
        lines = [f"  {'GiB':<20}{'bf16':>10}{'fp8':>10}"]
        return "\n".join(lines + [f"  {name:<20}{a / 2**30:>10.2f}{b / 2**30:>10.2f}" for name, a, b in rows])


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    rank: int,
    fmt: KVFormat,
    stored: tuple[str, ...],
    slots: int,
    spare_rows: int,
    graphs: bool,
    usable: int,
) -> MemoryPlan:
    """The plan of a rank in bfloat16. stored: kinds of weights kept as stored; slots, spare_rows: as of `KVCache`."""
    assert config.max_num_batched_tokens is not None
    shard = Shard(rank, config.tensor_parallel_size, config.world_size)
    expanded, packed = (rank_bytes(model, shard, 2, kinds) for kinds in (stored, (*stored, FP8_LINEARS)))
    length = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    blocks, size = -(-length // config.block_size), block_bytes(model, fmt, config.block_size)
    if config.num_gpu_blocks_override is not None:  # in this order, as the runner sizes the pool
        kv = (config.num_gpu_blocks_override + 1) * size
    elif config.kv_cache_memory_bytes is not None:
        kv = min(config.kv_cache_memory_bytes, (slots * blocks + 1) * size)
    else:
        kv = (blocks + 1) * size
    topology = Topology(config.tensor_parallel_size, config.prefill_context_parallel_size)
    step = int(workspace_bytes(model, topology, config.max_num_batched_tokens, length))
    return MemoryPlan(
        experts=expanded.experts,
        dense_bf16=expanded.dense,
        dense_fp8=packed.dense,
        embeddings=expanded.embeddings,
        engram=engram_share(model, topology.tp) if config.engram_on_device else 0,
        steps=step_room(step, graphs),
        windows=slots * window_bytes(model, fmt) + spare_rows * fmt.latent.nbytes,
        kv=kv,
        usable=usable,
    )


def step_room(largest: int, graphs: bool) -> int:
    """What is set aside for steps, given what the largest takes beside weights and caches.

    The passes that are replayed and those that run as they are take their scratch memory from different pools.
    """
    return (largest + LONG_CONTEXT_BYTES) * (2 if graphs else 1)


def choose(asked: str, plan: MemoryPlan, fits: bool, unavailable: str) -> tuple[str, str]:
    """("bf16" or "fp8", why). fits: whether bf16 does on all ranks; unavailable: why fp8 is not, or empty.

    Raises `Refused` where fp8 is asked for and not available.
    """
    if asked == "fp8" and unavailable:
        raise Refused(f"dense_weights is fp8: {unavailable}; use --dense-weights bf16 or auto")
    if asked != "auto":
        return asked, "as asked for"
    if fits:
        return "bf16", "it fits"
    if unavailable:
        return "bf16", f"it does not fit, but {unavailable}"
    if plan.dense_fp8 == plan.dense_bf16:
        return "bf16", "it does not fit, but no weight of this model could be smaller"
    return "fp8", "bf16 does not fit" if not plan.fits("bf16") else "bf16 does not fit on another rank"


def usable_memory(device: torch.device, utilization: float) -> int:
    """Bytes of a CUDA device that may still be taken: the share `utilization` of it less what is in use."""
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - utilization))


def settle_dense_weights(
    config: EngineConfig,
    model: ModelConfig,
    mesh: Mesh,
    fmt: KVFormat,
    kernels: Kernels,
    slots: int,
    spare_rows: int,
    graphs: bool,
) -> str:
    """The form of the FP8 linears, the same on all ranks; rank 0 logs the plan. Raises `Refused` as `choose`."""
    if mesh.device.type != "cuda":
        return "bf16"
    usable = usable_memory(mesh.device, config.gpu_memory_utilization)
    plan = plan_memory(config, model, mesh.rank, fmt, kernels.stored, slots, spare_rows, graphs, usable)
    fits = bool(mesh.agree_min(int(plan.fits("bf16"))))
    form, why = choose(config.dense_weights, plan, fits, kernels.why_no_fp8_linears)
    if mesh.rank == 0:
        log.info("memory plan of rank 0:\n%s\n  dense weights: %s (%s)", plan.table(), form, why)
    return form


def log_held(info: dict[str, Any]) -> None:
    """What a rank holds now that all is there; info: its `cache_info`."""
    gib = {name: value / 2**30 for name, value in info.items() if name.endswith("_bytes")}
    log.info(
        "memory of rank %d: weights %.2f GiB (dense %s), steps %.2f GiB, caches %.2f GiB in %d blocks",
        info["rank"], gib["weight_bytes"], info["dense_weights"], gib["step_bytes"], gib["cache_bytes"],
        info["num_blocks"],
    )  # fmt: skip
