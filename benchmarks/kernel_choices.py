"""Times kernels that stand for a choice, alone, at the released widths, on one GPU: what decides which one a step gets.

`attention`: rows that decode, each with 128 window and 512 chosen keys, from window rows in the ring to the output. As
fp8_ds_mla records read by the paged kernel (where sgl-flash-mla is installed) and decoded into a workspace; as
nvfp4_ds_mla records read as they are stored, by programs of 32 and of 64 heads, and decoded into a workspace; as a
bfloat16 cache. Then few heads on a bfloat16 cache: rows of one prompt in the Triton kernel and in FlashMLA padded to 64
heads, from queries to the output.
`experts`: the routed experts of a step with inputs in bf16 and in FP8, from hidden rows (rounded as in the model) to
their sum, and how far both are from fp32 products for a few rows; also with sums shared out over blocks, as humming has
them by itself.
`linears`: dense products with bf16 weights and with one-byte ones, those with and without shared sums.
Times are medians of replays of a CUDA graph that holds several calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

CALLS = 10  # in a graph, on inputs of their own where these are small

HEAD_DIM, ROPE, INDEX_DIM, WINDOW, CHOSEN = 512, 64, 128, 128, 512
HIDDEN, INNER, TOPK = 5120, 2304, 6
LINEARS = {  # inputs, outputs
    "wq_a": (5120, 1280),
    "wq_b": (1280, 32768),
    "wkv": (5120, 512),
    "wo_b": (8192, 5120),
    "shared w1": (5120, 2304),
    "shared w2": (2304, 5120),
    "Engram wkv": (6144, 25600),
}
COLD = 200 << 20  # bytes of weights that a graph goes through, so that none is still in the L2 cache


def seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Of one call: the median over 20 replays of all of them."""
    for call in calls:
        call()  # compiles, and makes what is kept
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[3:])


def attention(rows: int, heads: int, entries: int) -> None:
    from paraflash.cache.pool import Arena, RecordPool
    from paraflash.cache.records import PlainRecord, kv_format
    from paraflash.kernels.cuda import CudaKernels, attend, direct
    from paraflash.kernels.cuda.packages import find_packages

    packages = find_packages()
    pages = 1 + 65536 // entries
    found = {}
    # What, records, rows up to which these are read as they are (also where the engine would not), heads of a program.
    for name, dtype, limit, heads_at_once in (
        ("fp8 paged", "fp8_ds_mla", rows, 64),
        ("fp8 workspace", "fp8_ds_mla", 0, 64),
        ("nvfp4 direct/32", "nvfp4_ds_mla", rows, 32),
        ("nvfp4 direct/64", "nvfp4_ds_mla", rows, 64),
        ("nvfp4 workspace", "nvfp4_ds_mla", 0, 64),
        ("bfloat16", "bfloat16", 0, 64),
    ):
        same = heads <= 32 and name == "nvfp4 direct/64"
        if same or (name == "fp8 paged" and packages.paged_attention is None):
            continue
        fmt, arena = kv_format(dtype, HEAD_DIM, ROPE, INDEX_DIM), None
        record = fmt.window
        if isinstance(fmt.latent, PlainRecord):
            arena = Arena(fmt.latent, pages * entries, rows * WINDOW, "cuda")
        pool, ring = RecordPool(fmt.latent, pages, entries, "cuda", arena), RecordPool(record, rows, WINDOW, "cuda")
        for held in (pool, ring):
            every = torch.arange(held.storage.shape[0] * held.entries, device="cuda")
            held.write(every, held.record.encode(torch.randn(len(every), HEAD_DIM, device="cuda")))
        kernels = CudaKernels(packages, torch.bfloat16, "grouped_mm", trained=True)
        own, reach = torch.arange(rows, device="cuda")[:, None], torch.arange(WINDOW - 1, device="cuda")
        prior = (own * WINDOW + reach).flatten()
        step_rows = record.encode(torch.randn(rows, HEAD_DIM, device="cuda"))
        window_index = torch.cat([own * (WINDOW - 1) + reach, rows * (WINDOW - 1) + own], 1)
        sink = torch.randn(heads, device="cuda")

        def once(kernels: Any, q: Any, slots: Any, ring: Any, pool: Any, listed: tuple[Any, ...]) -> None:
            prior, step_rows, window_index, sink = listed
            keys = kernels.window_keys(ring, prior, step_rows)
            kernels.attend(q, keys, window_index, pool, slots, sink, HEAD_DIM**-0.5)

        calls = []
        for _ in range(CALLS):
            q = torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            slots = torch.randint(0, pages * entries, (rows, CHOSEN), device="cuda")
            calls.append(partial(once, kernels, q, slots, ring, pool, (prior, step_rows, window_index, sink)))
        direct_choices = {"pays": Mock(return_value=limit > 0), "heads_at_once": Mock(return_value=heads_at_once)}
        with patch.object(attend, "PAGED_ROWS", limit), patch.multiple(direct, **direct_choices):
            found[name] = seconds(calls)
    times = ", ".join(f"{name} {1e6 * t:7.1f} us" for name, t in found.items())
    print(f"{rows:4} rows, {heads:2} heads, pages of {entries}: {times}", flush=True)


def few_heads(rows: int, heads: int) -> None:
    from paraflash.cache.pool import Arena, RecordPool
    from paraflash.cache.records import PlainRecord, kv_format
    from paraflash.kernels.cuda import CudaKernels, attend
    from paraflash.kernels.cuda import attention as attention_kernels
    from paraflash.kernels.cuda.packages import find_packages

    packages = find_packages()
    if packages.sparse_attention is None:
        raise SystemExit(f"few heads need sgl-flash-mla: {packages.notes['sgl-flash-mla']}")
    record, pages, entries = kv_format("bfloat16", HEAD_DIM, ROPE, INDEX_DIM).latent, 1025, 64
    assert isinstance(record, PlainRecord)
    arena = Arena(record, pages * entries, rows + WINDOW, "cuda")
    pool = RecordPool(record, pages, entries, "cuda", arena)
    arena.rows.normal_()
    window = torch.randn(WINDOW - 1 + rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    window_index = torch.arange(rows, device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
    sink = torch.randn(heads, device="cuda")
    kernels = CudaKernels(packages, torch.bfloat16, "grouped_mm", trained=True)
    calls = []
    for _ in range(CALLS if rows <= 256 else 3):
        q = torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        slots = torch.randint(0, pages * entries, (rows, CHOSEN), device="cuda")
        keys = attend.WindowKeys(len(window), rows=window)
        calls.append(partial(kernels.attend, q, keys, window_index, pool, slots, sink, HEAD_DIM**-0.5))
    found = {}
    with patch.object(attention_kernels, "flash_takes", return_value=False):
        found["triton"] = seconds(calls)
    found["padded flash"] = seconds(calls)
    times = ", ".join(f"{name} {1e6 * t:8.1f} us" for name, t in found.items())
    print(f"{rows:4} rows of a prompt, {heads:2} heads: {times}", flush=True)


def shared_sums() -> Any:
    """While it lasts humming's products are compiled with the package's own settings."""
    from paraflash.kernels.cuda import tuning

    return patch.multiple(tuning, one_block=lambda settings: settings, least_work=lambda choices, *_: choices[-1])


def linears(name: str, every_rows: Sequence[int]) -> None:
    from paraflash.checkpoint.quant import QuantTensor, fp8_block_quant
    from paraflash.kernels.cuda import CudaKernels
    from paraflash.kernels.cuda.packages import find_packages

    kernels = CudaKernels(find_packages(), torch.bfloat16, "grouped_mm", trained=True)
    if kernels.why_no_fp8_linears:
        raise SystemExit(kernels.why_no_fp8_linears)
    width, out = LINEARS[name]
    weight = QuantTensor("fp8", *fp8_block_quant(torch.randn(out, width, device="cuda") * width**-0.5))
    copies = min(40, -(-COLD // (out * width)))
    forms: dict[str, list[Any]] = {"bf16": [weight.dequantise(torch.bfloat16) for _ in range(copies)]}
    forms["one byte"] = [kernels.pack_linear(weight) for _ in range(copies)]
    with shared_sums():
        forms["shared sums"] = [kernels.pack_linear(weight) for _ in range(copies)]
    for rows in every_rows:
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        found = {form: seconds([partial(kernels.linear, x, w) for w in held]) for form, held in forms.items()}
        times = ", ".join(f"{form} {1e6 * t:7.1f} us" for form, t in found.items())
        print(f"{name:10} {rows:4} rows: {times}", flush=True)


def experts(rows: int, total: int, local: int) -> None:
    from paraflash.checkpoint.quant import QuantTensor
    from paraflash.kernels.cuda import CudaKernels
    from paraflash.kernels.cuda.packages import find_packages
    from paraflash.kernels.interface import Expert
    from paraflash.kernels.reference import reference_kernels

    packages = find_packages()
    if packages.humming is None:
        raise SystemExit(f"experts needs humming-kernels: {packages.notes['humming-kernels']}")

    def weight(out: int, width: int) -> QuantTensor:
        codes = torch.randint(0, 256, (local, out, width // 2), device="cuda", dtype=torch.uint8)
        scale = torch.randint(117, 121, (local, out, width // 32), device="cuda", dtype=torch.uint8)
        return QuantTensor("fp4", codes, scale)

    own = Expert(weight(INNER, HIDDEN), weight(HIDDEN, INNER), weight(INNER, HIDDEN), 0, total)
    h = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(rows, total, device="cuda").argsort(1)[:, :TOPK]
    weights = torch.rand(rows, TOPK, device="cuda")
    few = slice(0, min(rows, 16))
    w1, w2, w3 = (w.dequantise(torch.float32) for w in (own.w1, own.w2, own.w3))
    expanded = Expert(w1, w2, w3, 0, total)
    wanted = reference_kernels().experts(h[few].float(), ids[few], weights[few], expanded, 10.0, True)
    del expanded, w1, w2, w3
    for backend, shared in product(("humming", "humming_fp8"), (False, True)):
        kernels = CudaKernels(packages, torch.bfloat16, backend, trained=True)
        packed = kernels.pack_experts(own)
        with shared_sums() if shared else nullcontext():
            part = kernels.experts(h[few], ids[few], weights[few], packed, 10.0, True).float()
            error = float((part - wanted).norm() / wanted.norm())
            taken = seconds([partial(kernels.experts, h, ids, weights, packed, 10.0, True)] * 2)
        what = f"{backend}{', shared sums' if shared else ''}"
        print(
            f"{what:24} {rows} rows, {local} of {total} experts: {1e3 * taken:7.3f} ms, error {error:.2e}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("attention")
    sub.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64, 128, 256], help="none: that part not")
    sub.add_argument("--heads", type=int, nargs="+", default=[64, 16], help="local heads")
    sub.add_argument("--few-heads", type=int, nargs="*", default=[8, 16], help="local heads of the second part")
    sub.add_argument("--few-heads-rows", type=int, nargs="*", default=[1, 64, 256, 512, 1024, 2048, 4096])
    sub = commands.add_parser("linears")
    sub.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 1024, 4096])
    sub.add_argument("--linears", choices=list(LINEARS), nargs="+", default=list(LINEARS))
    sub = commands.add_parser("experts")
    sub.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512, 4096])
    sub.add_argument("--experts", type=int, default=384)
    sub.add_argument("--local", type=int, nargs="+", default=[48, 96], help="experts of this GPU")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernel_choices needs a CUDA device")
    if args.command == "attention":
        for heads in args.heads:
            for rows in args.rows:
                attention(rows, heads, 64)
        for heads in args.few_heads:
            for rows in args.few_heads_rows:
                few_heads(rows, heads)
    elif args.command == "linears":
        for name in args.linears:
            linears(name, args.rows)
    else:
        for local in args.local:
            for rows in args.rows:
                experts(rows, args.experts, local)


if __name__ == "__main__":
    main()
