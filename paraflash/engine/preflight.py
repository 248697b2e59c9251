"""What is checked before any process starts: that the checkpoint holds the model, and that its weights fit.

Ranks on the CPU share the machine's memory, so their shards are added up here; a GPU rank checks its own.
"""

from __future__ import annotations

from paraflash.checkpoint.load import Checkpoint
from paraflash.checkpoint.memory import check_memory, rank_bytes
from paraflash.checkpoint.tensors import Shard
from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig


def check_start(config: EngineConfig, model: ModelConfig) -> None:
    """`config` is resolved. Raises CheckpointError or NotEnoughMemory."""
    if config.load_format != "dummy":
        Checkpoint.open(config.model).check(model)
    if config.device == "cpu":
        itemsize = {"float32": 4, "bfloat16": 2}[config.dtype]
        tp, world = config.tensor_parallel_size, config.world_size
        needed = sum(rank_bytes(model, Shard(rank, tp, world), itemsize).device for rank in range(world))
        check_memory(needed, "cpu", f"the weights of {world} rank(s)")
