"""Measures the ceilings of the machine it runs on, as a `Hardware` entry for the cost model.

Matrix product, memory copy, host link, launch cost, and an all-reduce between the GPUs (NCCL) or between two CPU
processes (gloo). Each number is a median of repeats after a warm-up, on random data.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paraflash.planner.hardware import Hardware, exchange_bytes


@dataclass(frozen=True)
class Sizes:
    """Problem sizes: large enough to reach the ceiling on a GPU, small enough to take seconds on a CPU."""

    gemm: int
    copy_bytes: int
    reduce_bytes: int
    repeats: int


GPU_SIZES = Sizes(gemm=8192, copy_bytes=2 << 30, reduce_bytes=64 << 20, repeats=20)
CPU_SIZES = Sizes(gemm=512, copy_bytes=64 << 20, reduce_bytes=4 << 20, repeats=5)


def _median_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):
        work()
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def gemm_flops(sizes: Sizes, device: torch.device, fp8: bool = False) -> float:
    """FLOP/s of a square product in bf16, or in fp8 with one scale a tensor (CUDA only)."""
    n = sizes.gemm
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    work: Callable[[], object] = lambda: a @ b  # noqa: E731
    if fp8:
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        work = lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * n**3 / _median_seconds(work, sizes.repeats, device)


def copy_bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Bytes/s of a copy inside the device's memory, read plus write."""
    source = torch.randint(0, 255, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / _median_seconds(lambda: target.copy_(source), sizes.repeats, device)


def host_bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Bytes/s from pinned host memory to the GPU."""
    source = torch.randint(0, 255, (sizes.copy_bytes // 4,), dtype=torch.uint8).pin_memory()
    target = torch.empty(source.shape, dtype=torch.uint8, device=device)
    return source.numel() / _median_seconds(lambda: target.copy_(source, non_blocking=True), sizes.repeats, device)


def launch_seconds(device: torch.device) -> float:
    """Host time of one eager operation on a tiny tensor, over a burst that the device's queue takes."""
    x, burst = torch.zeros(8, device=device), 500

    def work() -> float:
        start = time.perf_counter()
        for _ in range(burst):
            x.add_(1.0)
        return (time.perf_counter() - start) / burst

    times = []
    for _ in range(5):
        times.append(work())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return statistics.median(times)


def _reduce_worker(rank: int, world: int, store: str, backend: str, sizes: Sizes, out: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    small = torch.zeros(8, device=device)
    large = torch.zeros(sizes.reduce_bytes // 2, dtype=torch.bfloat16, device=device)
    latency = _median_seconds(lambda: dist.all_reduce(small), 10 * sizes.repeats, device)
    total = _median_seconds(lambda: dist.all_reduce(large), sizes.repeats, device)
    if rank == 0:
        Path(out).write_text(f"{latency} {total}", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def all_reduce_speed(sizes: Sizes, world: int, backend: str) -> tuple[float, float]:
    """(bytes/s that a rank sends in a large bf16 all-reduce, seconds of a tiny one) over `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        mp.spawn(_reduce_worker, (world, str(Path(folder) / "store"), backend, sizes, str(out)), nprocs=world)
        latency, total = (float(word) for word in out.read_text(encoding="utf-8").split())
    return exchange_bytes("all_reduce", sizes.reduce_bytes, world) / max(total - latency, 1e-9), latency


def measure(name: str | None = None, sizes: Sizes | None = None) -> Hardware:
    """Measures this machine: its GPUs, or its CPU where there are none. `name`: the entry's (default: the device's)."""
    if torch.cuda.is_available():
        return _measure_gpu(name, sizes or GPU_SIZES)
    return _measure_cpu(name, sizes or CPU_SIZES)


def _measure_gpu(name: str | None, sizes: Sizes) -> Hardware:
    device, count = torch.device("cuda", 0), torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(device)
    kind = properties.name
    measured = f"measured on {kind}"
    bf16 = gemm_flops(sizes, device)
    has_fp8 = (properties.major, properties.minor) >= (8, 9)
    fp8 = gemm_flops(sizes, device, fp8=True) if has_fp8 else bf16
    host = host_bandwidth(sizes, device)
    if count > 1:
        link, latency = all_reduce_speed(sizes, count, "nccl")
        link_source = latency_source = f"{measured}: NCCL all-reduce over {count} GPUs"
    else:
        # One GPU shows no link; the host link is the slowest that a second one could have.
        link, latency = host, launch_seconds(device)
        link_source, latency_source = "not measured (one GPU): the host link's", "not measured (one GPU): one launch"
    return Hardware(
        name=name or kind,
        bf16_flops=bf16,
        fp8_flops=fp8,
        memory_bytes=float(properties.total_memory),
        memory_bandwidth=copy_bandwidth(sizes, device),
        link_bandwidth=link,
        host_bandwidth=host,
        collective_latency=latency,
        launch_seconds=launch_seconds(device),
        gpus_per_node=count,
        sources={
            "bf16_flops": f"{measured}: matmul {sizes.gemm}^3",
            "fp8_flops": f"{measured}: tensor-scaled matmul {sizes.gemm}^3" if has_fp8 else "no fp8 units: bf16's",
            "memory_bytes": f"{measured}: reported by the driver",
            "memory_bandwidth": f"{measured}: device copy, read + write",
            "link_bandwidth": link_source,
            "host_bandwidth": f"{measured}: copy from pinned memory",
            "collective_latency": latency_source,
            "launch_seconds": f"{measured}: eager launches",
            "gpus_per_node": "counted",
        },
    )


def _measure_cpu(name: str | None, sizes: Sizes) -> Hardware:
    device, world = torch.device("cpu"), 2
    bf16, copy = gemm_flops(sizes, device), copy_bandwidth(sizes, device)
    link, latency = all_reduce_speed(sizes, world, "gloo")
    measured = f"measured on the CPU, {torch.get_num_threads()} threads"
    return Hardware(
        name=name or "CPU",
        bf16_flops=bf16,
        fp8_flops=bf16,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        memory_bandwidth=copy,
        link_bandwidth=link,
        host_bandwidth=copy,
        collective_latency=latency,
        launch_seconds=launch_seconds(device),
        gpus_per_node=max(world, os.cpu_count() or 1),
        sources={
            "bf16_flops": f"{measured}: matmul {sizes.gemm}^3",
            "fp8_flops": "no fp8 units: bf16's",
            "memory_bytes": "the machine's memory",
            "memory_bandwidth": f"{measured}: copy, read + write",
            "link_bandwidth": f"{measured}: gloo all-reduce over {world} processes",
            "host_bandwidth": "the same memory",
            "collective_latency": f"{measured}: gloo all-reduce over {world} processes",
            "launch_seconds": f"{measured}: eager operations",
            "gpus_per_node": "processors, one a rank",
        },
    )
