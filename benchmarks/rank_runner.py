"""Rank side of `two_gpus.py`: model runners that time their parts, and that hand out raw logits.

`BenchRunner` serves like any runner; on request it runs prepared steps and brackets each kernel call and each
collective with CUDA events (host clocks on a CPU). Names of parts: `kernel <operation>`, `exchange <group> <label>
<collective>`, and `window`, the whole window step of a layer: send rows, collective, key rows, ring write.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paraflash.bench.rank import decode_step, prefill_steps, without_graphs
from paraflash.checkpoint.engram_table import EngramTable
from paraflash.engine import runner
from paraflash.engine.engram_rows import EngramRows
from paraflash.engine.messages import StepInput, StepRequest
from paraflash.model import attention
from paraflash.parallel.mesh import Group, Mesh, Started, done
from paraflash.planner.hardware import exchange_bytes

SAMPLE_ROWS = 1 << 19


class HostMoment:
    """Stands in for a CUDA event where there is no GPU."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostMoment) -> float:
        return (end.seconds - self.seconds) * 1e3


def moment() -> Any:
    return torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else HostMoment()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Recorder:
    """Parts of a step in issue order: (name, bytes that the rank contributes, start, end)."""

    def __init__(self) -> None:
        self.on = False
        self.parts: list[tuple[str, int, Any, Any]] = []

    def call(self, name: str, nbytes: int, work: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.on:
            return work(*args, **kwargs)
        start, end = moment(), moment()
        start.record()
        out = work(*args, **kwargs)
        end.record()
        self.parts.append((name, nbytes, start, end))
        return out

    def take(self) -> list[tuple[str, int, float]]:
        """(name, bytes, seconds) of each part since the last call."""
        synchronize()
        parts, self.parts = self.parts, []
        return [(name, nbytes, start.elapsed_time(end) / 1e3) for name, nbytes, start, end in parts]


@dataclass
class TimedGroup(Group):
    recorder: Recorder | None = None

    @property
    def _timing(self) -> bool:
        return self.recorder is not None and self.recorder.on

    def _timed(self, op: str, x: Tensor, label: str) -> Tensor:
        work = getattr(super(), op)
        if self.recorder is None or self.size == 1:
            return work(x, label)
        return self.recorder.call(f"exchange {self.name} {label} {op}", x.nbytes, work, x, label)

    def all_gather(self, x: Tensor, label: str) -> Tensor:
        return self._timed("all_gather", x, label)

    def all_reduce(self, x: Tensor, label: str) -> Tensor:
        return self._timed("all_reduce", x, label)

    def reduce_scatter(self, x: Tensor, label: str) -> Tensor:
        return self._timed("reduce_scatter", x, label)

    # A collective that is timed runs by itself: beside others its time would not be its own.

    def all_gather_start(self, x: Tensor, label: str) -> Started[Tensor]:
        return done(self.all_gather(x, label)) if self._timing else super().all_gather_start(x, label)

    def reduce_scatter_start(self, x: Tensor, label: str) -> Started[Tensor]:
        return done(self.reduce_scatter(x, label)) if self._timing else super().reduce_scatter_start(x, label)

    def out_start(self, xs: Sequence[Tensor], label: str) -> Started[list[Tensor]] | None:
        return None if self._timing else super().out_start(xs, label)


class TimedKernels:
    """Passes every call of a kernel set through; while the recorder is on, each one is a part."""

    def __init__(self, kernels: Any, recorder: Recorder):
        self._kernels, self._recorder = kernels, recorder

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        if not self._recorder.on or not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            label = f"{name} {args[1].shape[1]} -> {args[1].shape[0]}" if name.startswith("linear") else name
            return self._recorder.call(f"kernel {label}", 0, value, *args, **kwargs)

        return call


class SampleTable(EngramTable):
    """An Engram table whose rows repeat a random sample in host memory, so that lookups take their usual way."""

    def __init__(self, rows: int, dim: int, dtype: torch.dtype):
        self.rows, self.dim, self.dtype = rows, dim, dtype
        draw = np.random.default_rng(rows)
        codes = draw.integers(0x28, 0x48, (SAMPLE_ROWS, dim), np.uint8)  # e4m3 values from 1/4 to 4
        self._weight = codes | draw.integers(0, 2, codes.shape, np.uint8) << 7
        self._scale = np.full((SAMPLE_ROWS, dim // 32), 127, np.uint8)
        self.row_bytes, self.scale_bytes = dim, dim // 32

    def gather(self, ids: Any, raw: Any, scale: Any) -> None:
        super().gather(ids % SAMPLE_ROWS, raw, scale)


class BenchRunner(runner.ModelRunner):
    def __init__(self, config: Any, model: Any, mesh: Mesh):
        self.recorder = Recorder()
        mesh.tp = TimedGroup(**vars(mesh.tp), recorder=self.recorder)
        mesh.pcp = TimedGroup(**vars(mesh.pcp), recorder=self.recorder)
        super().__init__(config, model, mesh)
        self.kernels = TimedKernels(self.kernels, self.recorder)  # type: ignore[assignment]
        exchange = attention.exchange_window

        def timed_exchange(*args: Any) -> Started[Any]:
            if not self.recorder.on:
                return exchange(*args)
            return done(self.recorder.call("window", 0, lambda: exchange(*args).wait()))

        attention.exchange_window = timed_exchange

    def load(self) -> None:
        super().load()
        model, dtype = self.model_config, self.numerics.dtype
        self.tables = [SampleTable(rows, model.engram_head_dim, dtype) for rows in model.engram_rows]
        self.engram = EngramRows(self.tables, self.mesh.device)

    def facts(self) -> dict[str, Any]:
        info: dict[str, Any] = {"weight_bytes": self.weight_bytes, "kernels": dict(self.kernels.info)}
        info["torch"], info["copied_exchange"] = torch.__version__, self.mesh.pcp.copies is not None
        if torch.cuda.is_available():
            info["gpu"] = torch.cuda.get_device_name()
            info["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            info["allocated_bytes"] = torch.cuda.max_memory_allocated()
        return info

    def breakdown(self, kind: str, size: int, second: int, repeat: int) -> dict[str, Any]:
        """Steps of one prompt of `size` tokens in chunks of `second`, or one decode step of `size` rows after `second`
        tokens each. Seconds per step: `step` on the GPU (median of `repeat` runs), `enqueue` until the host is done,
        and the parts of each step in one more run."""
        vocab = self.model_config.vocab_size
        steps = prefill_steps(vocab, size, second) if kind == "prefill" else [decode_step(vocab, size, second)]
        runs = [self._run_steps(steps) for _ in range(repeat + 2)][2:]  # the second one records CUDA graphs
        with without_graphs(self):
            self._run_steps(steps)
            self.recorder.on = True
            try:
                parts, noted = [], []
                for step in steps:
                    synchronize()
                    start, end = moment(), moment()
                    start.record()
                    self.execute(step)
                    end.record()
                    parts.append(self.recorder.take())
                    noted.append(start.elapsed_time(end) / 1e3)
            finally:
                self.recorder.on = False
        return {
            "step": [statistics.median(r[0][i] for r in runs) for i in range(len(steps))],
            "enqueue": [statistics.median(r[1][i] for r in runs) for i in range(len(steps))],
            "recorded_step": noted,
            "parts": parts,
        }

    def _run_steps(self, steps: list[StepInput]) -> tuple[list[float], list[float]]:
        marks, hosts = [moment() for _ in range(len(steps) + 1)], []
        synchronize()
        marks[0].record()
        for step, mark in zip(steps, marks[1:], strict=True):
            before = time.perf_counter()
            self.execute(step)
            mark.record()
            hosts.append(time.perf_counter() - before)
        synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)], hosts

    def collectives(self, sizes: list[int], repeat: int) -> list[dict[str, Any]]:
        """Times of bf16 collectives over the larger group; `nbytes` as in the planner's `exchange_bytes`."""
        group = max(self.mesh.tp, self.mesh.pcp, key=lambda g: g.size)
        found = []
        for nbytes in sizes:
            whole = torch.randn(nbytes // 2, device=self.mesh.device).to(torch.bfloat16)
            shard = whole[: nbytes // 2 // group.size]
            for op, x in (("all_gather", shard), ("reduce_scatter", whole), ("all_reduce", whole)):
                times = []
                for i in range(repeat + 3):
                    start, end = moment(), moment()
                    start.record()
                    getattr(group, op)(x, "bench")
                    end.record()
                    synchronize()
                    if i >= 3:
                        times.append(start.elapsed_time(end) / 1e3)
                start, end = moment(), moment()
                start.record()
                for _ in range(repeat):  # back to back, as many as a step issues
                    getattr(group, op)(x, "bench")
                end.record()
                synchronize()
                burst = start.elapsed_time(end) / 1e3 / repeat
                moved = exchange_bytes(op, nbytes, group.size)
                found.append(
                    {
                        "op": op,
                        "nbytes": nbytes,
                        "alone_seconds": statistics.median(times),
                        "burst_seconds": burst,
                        "bus_bytes_per_second": moved / burst,
                    }
                )
        return found

    def hardware(self) -> dict[str, Any] | None:
        """What one GPU of this machine does, as rank 0 measures it alone (the others wait)."""
        from paraflash.planner import calibrate

        if self.mesh.rank:
            return None
        device = self.mesh.device
        sizes = calibrate.GPU_SIZES if device.type == "cuda" else calibrate.CPU_SIZES
        found = {
            "bf16_flops": calibrate.gemm_flops(sizes, device),
            "memory_bandwidth": calibrate.copy_bandwidth(sizes, device),
            "launch_seconds": calibrate.launch_seconds(device),
        }
        if device.type == "cuda":
            found["fp8_flops"] = calibrate.gemm_flops(sizes, device, fp8=True)
            found["host_bandwidth"] = calibrate.host_bandwidth(sizes, device)
            found["memory_bytes"] = float(torch.cuda.get_device_properties(device).total_memory)
        return found


class GoldenRunner(runner.ModelRunner):
    """`StepOutput.prompt_logprobs` holds logits rows [vocab] of every row that has a target."""

    def _prompt_logprobs(self, rows: Tensor, request: StepRequest, offsets: np.ndarray) -> list[Any]:
        logits = self.transformer.logits(rows).float().cpu()
        return list(logits.numpy()) if self.mesh.rank == 0 else []
