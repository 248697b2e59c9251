"""`paraflash bench rank`: one rank's share of any topology on one GPU, before the other GPUs are there.

Rank 0 runs with its true shapes: its heads, its experts, its local rows and the gathered rows of its MoE. Collectives
are replaced by copies of the same bytes, and what they would take is modelled from the planner's hardware file. Rates
are given by the clock and, since a slow host hides differences between topologies, by the time the GPU was busy. A
prompt of --input-len tokens is prefilled in steps of --max-num-batched-tokens; with --decode, rows are decoded too.
Steps are replayed as CUDA graphs unless --enforce-eager; the table of operations is of a step without them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from paraflash.bench.timed import Ceilings
    from paraflash.engine.messages import StepInput
    from paraflash.engine.runner import ModelRunner
    from paraflash.parallel.mesh import Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from paraflash.engine.flags import json_object, length

    parser.add_argument("--model", required=True, help="folder with a config.json; weights are random")
    parser.add_argument("--hf-overrides", type=json_object, default={}, help="JSON merged into config.json")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, help="of the topology")
    parser.add_argument("--prefill-context-parallel-size", "-pcp", type=int, default=1, help="of the topology")
    parser.add_argument("--rank", type=int, default=0, help="whose share runs")
    parser.add_argument("--moe-backend", default="auto", help="as of paraflash serve")
    parser.add_argument(
        "--kv-cache-dtype", default="bfloat16", choices=("bfloat16", "fp8_ds_mla", "nvfp4_ds_mla"), help="cache records"
    )
    parser.add_argument("--max-num-batched-tokens", type=length, default=4096, help="rows of a step, over all ranks")
    parser.add_argument("--input-len", type=length, nargs="+", default=[32768], help="prompt lengths")
    parser.add_argument("--decode", type=int, nargs="*", default=[], help="also decode these numbers of rows a step")
    parser.add_argument("--decode-context", type=length, default=8192, help="tokens before each decoded row")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs; the median counts")
    parser.add_argument("--enforce-eager", action="store_true", help="never use CUDA graphs")
    parser.add_argument("--gpu", default="H200", help="entry of the hardware file for floors and links")
    parser.add_argument("--kernels", action="store_true", help="also list GPU kernels of one step by time")
    parser.add_argument("--host", action="store_true", help="also list host functions of one step by time")
    parser.add_argument("--json", type=Path, help="write all results to this file")


def run(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print("bench rank needs a CUDA device: it measures one rank on a real GPU")
        return 1
    result = measure(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def alone(tp: int, pcp: int, rank: int) -> Mesh:
    """The mesh of one rank of tp * pcp without the others: gathers repeat its rows, sums are copies."""
    import torch

    from paraflash.parallel.mesh import Group, Mesh

    class LoneGroup(Group):
        def all_gather(self, x: Tensor, label: str) -> Tensor:
            out = x if self.size == 1 else x.repeat(self.size, *[1] * (x.dim() - 1))
            return self._logged("all_gather", label, x, out)

        def all_reduce(self, x: Tensor, label: str) -> Tensor:
            return self._logged("all_reduce", label, x, x if self.size == 1 else x.clone())

        def reduce_scatter(self, x: Tensor, label: str) -> Tensor:
            out = x if self.size == 1 else x[: len(x) // self.size].clone()
            return self._logged("reduce_scatter", label, x, out)

        def _logged(self, op: str, label: str, x: Tensor, out: Tensor) -> Tensor:
            if self.size > 1:
                self._note(op, label, x, time.perf_counter())
            return out

    groups = LoneGroup("tp", tp, rank % tp), LoneGroup("pcp", pcp, rank // tp)
    return Mesh(rank, *groups, torch.device("cuda", torch.cuda.current_device()))


def make_runner(args: argparse.Namespace, ceilings: Ceilings) -> ModelRunner:
    from paraflash.bench.timed import TimedKernels
    from paraflash.config.engine import EngineConfig
    from paraflash.config.model import load_config
    from paraflash.engine.engram_rows import EngramRows
    from paraflash.engine.runner import ModelRunner

    model = load_config(args.model, args.hf_overrides)
    longest = max([*args.input_len, args.decode_context + 64])
    sequences = max([1, *args.decode])
    blocks = max(-(-longest // 64), sequences * -(-(args.decode_context + 64) // 64) if args.decode else 0)
    config = EngineConfig(
        model=args.model,
        tokenizer=args.model,
        device="cuda",
        dtype="bfloat16",
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        prefill_context_parallel_size=args.prefill_context_parallel_size,
        moe_backend=args.moe_backend,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=sequences,
        num_gpu_blocks_override=blocks + 1,
        load_format="dummy",
        enforce_eager=args.enforce_eager,
    )
    mesh = alone(args.tensor_parallel_size, args.prefill_context_parallel_size, args.rank)
    runner = ModelRunner(config, model, mesh)
    runner.kernels = TimedKernels(runner.kernels, ceilings)  # type: ignore[assignment]
    runner.load()
    runner.engram = EngramRows([HostTable(model.engram_head_dim, n) for n in model.engram_rows], mesh.device)
    return runner


class HostTable:
    """An Engram table's cost without its bytes: `rows` rows, all of which share a smaller table in host memory."""

    HELD = 1 << 20

    def __init__(self, dim: int, rows: int):
        import numpy as np

        draw = np.random.default_rng(dim)
        self.rows, self.dim, self.row_bytes, self.scale_bytes = rows, dim, dim, dim // 32
        self._raw = draw.integers(0, 120, (self.HELD, self.row_bytes), np.uint8)  # e4m3 codes of finite values
        self._scale = draw.integers(117, 121, (self.HELD, self.scale_bytes), np.uint8)

    def gather(self, ids: Any, raw: Any, scale: Any) -> None:
        import numpy as np

        np.take(self._raw, ids % self.HELD, axis=0, out=raw, mode="clip")
        np.take(self._scale, ids % self.HELD, axis=0, out=scale, mode="clip")

    def decode(self, raw: Tensor, scale: Tensor) -> Tensor:
        import torch

        from paraflash.checkpoint.quant import row_dequant

        return row_dequant(raw.view(torch.float8_e4m3fn), scale).to(torch.bfloat16)


def prefill_steps(vocab: int, length: int, budget: int) -> list[StepInput]:
    """The steps of one prompt of `length` tokens, each of `budget` tokens; the last one is sampled."""
    import numpy as np

    from paraflash.engine.messages import SampleSpec, StepInput, StepRequest

    ids = np.random.default_rng(length).integers(0, vocab, length).astype(np.int32)
    steps: list[StepInput] = []
    for start in range(0, length, budget):
        end = min(length, start + budget)
        request = StepRequest(
            request_id="prompt",
            slot=0,
            token_ids=ids[start:end],
            lookback=ids[max(0, start - 3) : start],
            num_computed=start,
            is_prefill=True,
            block_ids=np.arange(1, -(-end // 64) + 1, dtype=np.int32),
            sample=SampleSpec() if end == length else None,
            is_last_chunk=end == length,
        )
        steps.append(StepInput(len(steps), [request]))
    return steps


def decode_step(vocab: int, rows: int, context: int) -> StepInput:
    """One step that decodes `rows` requests, each with `context` tokens before it."""
    import numpy as np

    from paraflash.engine.messages import SampleSpec, StepInput, StepRequest

    blocks = -(-(context + 1) // 64)
    draw = np.random.default_rng(rows)
    requests = [
        StepRequest(
            request_id=str(i),
            slot=i,
            token_ids=draw.integers(0, vocab, 1).astype(np.int32),
            lookback=draw.integers(0, vocab, 3).astype(np.int32),
            num_computed=context,
            is_prefill=False,
            block_ids=np.arange(1 + i * blocks, 1 + (i + 1) * blocks, dtype=np.int32),
            sample=SampleSpec(),
        )
        for i in range(rows)
    ]
    return StepInput(0, requests)


def seconds_of(runner: ModelRunner, steps: list[StepInput], repeat: int) -> tuple[float, float]:
    """Median over `repeat` runs of all steps, after two untimed runs (the second records CUDA graphs): seconds until
    the GPU is done, and of these the seconds in which the host issued work."""
    import torch

    times, issued = [], []
    for _ in range(repeat + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for step in steps:
            runner.execute(step)
        issued.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), statistics.median(issued[2:])


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    """Steps inside call every operation, so that each can be timed."""
    graphs, runner.graphs = runner.graphs, None
    try:
        yield
    finally:
        runner.graphs = graphs


def exchange_of(runner: ModelRunner, steps: list[StepInput], hardware: Any) -> tuple[dict[str, float], float]:
    """Of the collectives of these steps: modelled seconds by group and label, and the least seconds of the copies that
    stand for them on this GPU."""
    from paraflash.planner.hardware import exchange_seconds

    runner.start_collective_log()
    for step in steps:
        runner.execute(step)
    sizes = {"tp": runner.mesh.tp.size, "pcp": runner.mesh.pcp.size}
    found: dict[str, float] = {}
    copied = 0.0
    for entry in runner.collective_log():
        size = sizes[entry.group]
        nbytes = entry.nbytes * (size if entry.op == "all_gather" else 1)
        key = f"{entry.group} {entry.label}"
        found[key] = found.get(key, 0.0) + exchange_seconds(entry.op, nbytes, size, hardware)
        kept = nbytes / size if entry.op == "reduce_scatter" else nbytes
        copied += 2 * kept  # read and written; a gather reads its source once per rank
    runner.mesh.tp.log = runner.mesh.pcp.log = None
    return found, copied / hardware.memory_bandwidth


def busy_of(runner: ModelRunner, steps: list[StepInput]) -> tuple[float, list[tuple[str, int, float]]]:
    """Seconds in which the GPU runs kernels during these steps, and the kernels by time (name, calls, seconds)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for step in steps:
            runner.execute(step)
        torch.cuda.synchronize()
    events = [(e.key, e.count, e.self_device_time_total / 1e6) for e in recorded.key_averages()]
    events = sorted((e for e in events if e[2] > 0), key=lambda e: -e[2])
    return sum(e[2] for e in events), events


def host_profile(runner: ModelRunner, steps: list[StepInput]) -> str:
    """The host functions of these steps by own time."""
    import cProfile
    import io
    import pstats

    import torch

    with cProfile.Profile() as recorded:
        for step in steps:
            runner.execute(step)
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(recorded, stream=text).sort_stats("tottime").print_stats(40)
    return text.getvalue()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from paraflash.bench.timed import Ceilings, format_rows
    from paraflash.planner.hardware import load_hardware

    hardware = load_hardware(args.gpu)
    ceilings = Ceilings(hardware.bf16_flops, hardware.fp8_flops, hardware.memory_bandwidth)
    start = time.perf_counter()
    runner = make_runner(args, ceilings)
    kernels: Any = runner.kernels
    model = runner.model_config
    place = f"TP{args.tensor_parallel_size}/PCP{args.prefill_context_parallel_size} rank {args.rank}"
    print(f"{place}: {torch.cuda.get_device_name()}, loaded in {time.perf_counter() - start:.1f} s; {kernels.info}")
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "tensor_parallel_size": args.tensor_parallel_size,
        "prefill_context_parallel_size": args.prefill_context_parallel_size,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "layers": model.num_layers,
        "kernels": dict(kernels.info),
        "weight_bytes": runner.weight_bytes,
        "prefill": [],
        "decode": [],
    }
    works = [("prefill", n, prefill_steps(model.vocab_size, n, args.max_num_batched_tokens), n) for n in args.input_len]
    works += [("decode", n, [decode_step(model.vocab_size, n, args.decode_context)], n) for n in args.decode]
    for kind, size, steps, tokens in works:
        wall, issued = seconds_of(runner, steps, args.repeat)
        exchange, copies = exchange_of(runner, steps, hardware)
        exchanged = sum(exchange.values())
        busy, _ = busy_of(runner, steps)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with without_graphs(runner):
            runner.execute(steps[-1])
            kernels.recording = True
            torch.cuda.synchronize()
            begin.record()
            runner.execute(steps[-1])
            end.record()
            rows = kernels.rows()
            kernels.recording = False
        last = begin.elapsed_time(end) / 1e3
        entry: dict[str, Any] = {
            "size": size,
            "steps": len(steps),
            "wall_seconds": wall,
            "host_seconds": issued,
            "busy_seconds": busy,
            "copy_seconds": copies,
            "exchange_seconds": exchange,
            "tokens_per_second": tokens / (wall - copies + exchanged),
            "busy_tokens_per_second": tokens / (busy - copies + exchanged),
            "last_step_seconds": last,
            "operations": [asdict(r) for r in rows],
        }
        if runner.graphs is not None:
            entry["graphs"] = runner.graphs.counts()
            print(f"CUDA graphs so far: {entry['graphs']}")
        print(
            f"{place}, {kind} {size}: {wall * 1e3:.2f} ms by the clock (host {issued * 1e3:.2f}), GPU busy "
            f"{busy * 1e3:.2f}, of which copies for collectives at least {copies * 1e3:.2f}; modelled exchange "
            f"{exchanged * 1e3:.2f}\n  {entry['tokens_per_second']:.0f} tok/s by the clock, "
            f"{entry['busy_tokens_per_second']:.0f} if the host never held the GPU up"
        )
        print(format_rows(rows, last))
        if args.kernels:
            busy, events = busy_of(runner, steps[-1:])
            entry["last_step_busy_seconds"], entry["gpu_kernels"] = busy, events
            print(f"last step: GPU busy {busy * 1e3:.2f} ms")
            for name, count, seconds in events[:45]:
                print(f"  {seconds * 1e3:8.3f} ms {count:5}  {name[:100]}")
        if args.host:
            print(host_profile(runner, steps[-1:]))
        result[kind].append(entry)
    return result
