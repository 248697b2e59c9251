"""FLOPs of a prompt with bounded replay on and off: executed on the CPU and counted, and counted for a released model.

    python benchmarks/replay_flops.py [--config tests/data/released_config.json] [--lengths 8192 32768]

Executed: a small random model runs a prompt under PyTorch's FLOP counter, which sees every matrix product. Counted: the
planner's terms over the chunks and kept rows that the scheduler's rule gives.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.utils.flop_counter import FlopCounterMode

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig, load_config, parse_config
from paraflash.engine.defaults import resolve
from paraflash.engine.replay import certain_rows, drops_rows, kept_rows
from paraflash.planner.cost import Efficiency, RecordBytes, Setup, step_cost
from paraflash.planner.hardware import load_hardware
from paraflash.planner.workload import Chunk, Step
from paraflash.topology import Topology


def chunks_of(length: int, budget: int) -> list[Chunk]:
    return [(start, min(budget, length - start)) for start in range(0, length, budget)]


def counted(model: ModelConfig, config: EngineConfig, length: int) -> float:
    """FLOPs of one prompt alone on one rank."""
    assert config.max_num_batched_tokens is not None
    hardware = load_hardware("H200")  # rates do not enter the FLOPs
    setup = Setup(model, Topology(1, 1), hardware, Efficiency(1.0, 1.0), RecordBytes(1, 1, 1))
    drops, certain, total = drops_rows(config, model), certain_rows(config), 0.0
    for start, rows in chunks_of(length, config.max_num_batched_tokens):
        end = start + rows
        kept = kept_rows(rows, length - end, model.window, certain) if drops else rows
        step = Step(((start, rows),), (0,) if end == length else (), drops, ((end - kept, kept),) if kept else ())
        total += sum(term.flops for term in step_cost(setup, step).terms.values())
    return total


def executed(folder: str, config: EngineConfig, length: int) -> int:
    """FLOPs of the matrix products of one prompt, run in this process."""
    from paraflash.engine.request import Request
    from paraflash.engine.runner import ModelRunner
    from paraflash.engine.sampling_params import SamplingParams
    from paraflash.engine.scheduler import Scheduler
    from paraflash.parallel.mesh import init_mesh

    model = load_config(folder)
    config = replace(resolve(config, model), max_model_len=model.max_position_embeddings)
    runner = ModelRunner(config, model, init_mesh(0, 1, 1, "cpu"))
    runner.load()
    scheduler = Scheduler(config, model, runner.cache.num_blocks)
    ids = np.random.default_rng(0).integers(3, model.vocab_size, length)
    scheduler.add(Request("r", ids, SamplingParams(max_tokens=1, temperature=0.0)))
    with FlopCounterMode(display=False) as counter:
        while (step := scheduler.schedule()) is not None:
            output = runner.execute(step)
            assert output is not None
            scheduler.update(step, output)
    return counter.get_total_flops()


def main() -> None:
    from paraflash.checkpoint.synthetic import synthetic_config, write_synthetic

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("tests/data/released_config.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--executed-length", type=int, default=2048)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(folder, synthetic_config("small", quantise=False))
        for budget in (args.executed_length, 512):
            config = EngineConfig(folder, device="cpu", dtype="float32", max_num_batched_tokens=budget)
            on, off = (
                executed(folder, replace(config, swa_bounded_replay=r), args.executed_length) for r in (True, False)
            )
            line = {"executed": "small", "length": args.executed_length, "budget": budget, "on": on, "off": off}
            print(json.dumps({**line, "off/on": round(off / on, 3)}), flush=True)
    model = parse_config(json.loads(args.config.read_text()))
    config = EngineConfig("", max_num_batched_tokens=args.budget, max_num_seqs=256)
    for length in args.lengths:
        on, off = (counted(model, replace(config, swa_bounded_replay=r), length) for r in (True, False))
        line = {"counted": args.config.name, "length": length, "budget": args.budget, "on": on, "off": off}
        print(json.dumps({**line, "off/on": round(off / on, 3)}), flush=True)


if __name__ == "__main__":
    main()
