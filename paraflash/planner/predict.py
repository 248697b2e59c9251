"""From a workload and a machine to one prediction for every TP x PCP split, and the split to take."""

from __future__ import annotations

from dataclasses import dataclass

from paraflash.config.model import ModelConfig
from paraflash.planner.cost import Efficiency, Setup, StepCost, step_cost
from paraflash.planner.hardware import Hardware
from paraflash.planner.memory import MemoryOptions, RankMemory, cache_records, rank_memory
from paraflash.planner.workload import Workload, steps
from paraflash.topology import Topology, all_splits

# Shares of the FLOP ceilings. marlin and humming: fitted to published runs of another engine on 8 x H20 by
# `python -m paraflash.planner.fit`, so they hold its routing imbalance and host gaps too. kernels: what single kernels
# reached on one H200 at 64 rows an expert, an upper bound for an engine.
EFFICIENCIES = {
    "marlin": Efficiency(experts=0.180, compute=0.815),
    "humming": Efficiency(experts=0.0985, compute=0.983),
    "kernels": Efficiency(experts=0.70, compute=1.0),
}


@dataclass(frozen=True)
class Prediction:
    """One split. `cost` sums the terms of all steps of the workload; `refused` says why a split cannot run."""

    topology: Topology
    memory: RankMemory | None = None
    tokens_per_second: float = 0.0
    mean_ttft: float = 0.0
    cost: StepCost | None = None
    refused: str = ""


def simulate(setup: Setup, workload: Workload) -> tuple[float, float, StepCost]:
    """(input tokens/s, mean time to first token, summed terms) of a workload whose prompts arrive together."""
    clock, first_tokens = 0.0, []
    total: StepCost | None = None
    for step in steps(workload):
        cost = step_cost(setup, step)
        clock += cost.seconds
        first_tokens += [clock] * len(step.finished)
        total = cost if total is None else total + cost
    assert total is not None  # a workload has at least one token
    return workload.input_len * workload.concurrency / clock, sum(first_tokens) / len(first_tokens), total


def _why_not(
    model: ModelConfig,
    hardware: Hardware,
    options: MemoryOptions,
    memory: RankMemory,
    workload: Workload,
) -> str:
    budget = hardware.memory_bytes * options.gpu_memory_utilization
    if memory.fixed > budget:
        return f"does not fit: {memory.fixed / 1e9:.1f} GB of {budget / 1e9:.1f} GB before any KV"
    if model.kv_owners and memory.kv_tokens < workload.input_len + 1:
        return f"KV for {memory.kv_tokens} tokens cannot hold one prompt of {workload.input_len}"
    return ""


def predict(
    model: ModelConfig,
    topology: Topology,
    hardware: Hardware,
    workload: Workload,
    efficiency: Efficiency,
    options: MemoryOptions,
) -> Prediction:
    """Memory, speed and terms of one split. Raises ValueError for options out of range."""
    if model.o_groups % topology.tp:
        return Prediction(topology, refused=f"TP {topology.tp} does not divide the {model.o_groups} output groups")
    if topology.world > model.num_experts:
        return Prediction(
            topology, refused=f"{topology.world} ranks share {model.num_experts} experts: some would have none"
        )
    memory = rank_memory(model, topology, hardware, options, workload.batch_budget, workload.input_len)
    setup = Setup(model, topology, hardware, efficiency, cache_records(model, options.kv_cache_dtype))
    speed, ttft, cost = simulate(setup, workload)
    return Prediction(topology, memory, speed, ttft, cost, _why_not(model, hardware, options, memory, workload))


def predict_all(
    model: ModelConfig,
    hardware: Hardware,
    num_gpus: int,
    workload: Workload,
    efficiency: Efficiency,
    options: MemoryOptions,
) -> list[Prediction]:
    """Every split of `num_gpus`. Raises ValueError where they do not fit into one node."""
    if not 1 <= num_gpus <= hardware.gpus_per_node:
        raise ValueError(
            f"--num-gpus is {num_gpus}; 1 to {hardware.gpus_per_node} of {hardware.name} stand in one node"
        )
    return [predict(model, topology, hardware, workload, efficiency, options) for topology in all_splits(num_gpus)]


def recommend(predictions: list[Prediction]) -> Prediction | None:
    """The fastest split that runs, or None."""
    return max((p for p in predictions if not p.refused), key=lambda p: p.tokens_per_second, default=None)
