"""A kernel set that times each of its operations on the GPU and knows the least time each could take.

`TimedKernels` passes every call through and brackets it with CUDA events; `Row`s add up, per operation, the measured
time and the floor: operations over the peak rate or bytes (each input read once, each output written once) over the
memory bandwidth, whichever is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of the GPU: FLOP/s and bytes/s."""

    bf16_flops: float
    fp8_flops: float
    bandwidth: float


@dataclass
class Row:
    """One operation, over all calls of a step."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    floor: float = 0.0


Floor = Callable[[Ceilings, tuple[Any, ...], Any], float | Tensor]  # a Tensor where it takes a look at values


def _bytes(*values: Any) -> float:
    return float(sum(v.nbytes for v in values if isinstance(v, Tensor)))


def _moved(c: Ceilings, args: tuple[Any, ...], out: Any) -> float:
    """Memory floor: tensor arguments read, results written."""
    results = out if isinstance(out, tuple) else (out,)
    return _bytes(*args, *results) / c.bandwidth


def _linear(c: Ceilings, args: tuple[Any, ...], out: Any) -> float:
    x, weight = args[0], args[1]
    flops = 2.0 * out.numel() * x.shape[-1]
    return max(flops / c.bf16_flops, _bytes(x, weight, out) / c.bandwidth)


def _grouped(c: Ceilings, args: tuple[Any, ...], out: Any) -> float:
    o, wo_a = args[0], args[1]
    return max(2.0 * out.numel() * o.shape[-1] / c.bf16_flops, _bytes(o, wo_a, out) / c.bandwidth)


def _attend(c: Ceilings, args: tuple[Any, ...], out: Any) -> Tensor:
    q, window, slots = args[0], args[2], args[4]
    keys = (window >= 0).sum() + (0 if slots is None else (slots >= 0).sum())
    return (keys * (4.0 * q.shape[1] * q.shape[2] / c.bf16_flops)).clamp_min(_bytes(q, out) / c.bandwidth)


def _select(c: Ceilings, args: tuple[Any, ...], out: Any) -> float:
    """Scores of all visible pairs, written and read once, unless every row may take all that it sees."""
    q, rows, topk = args[0], args[3], args[4]
    pairs = float(rows.visible_host.sum()) if rows.visible_host.max(initial=0) > topk else 0.0
    return max(2.0 * pairs * q.shape[1] * q.shape[2] / c.fp8_flops, 8.0 * pairs / c.bandwidth)


def _experts(c: Ceilings, args: tuple[Any, ...], out: Any) -> Tensor:
    h, ids, experts = args[0], args[1], args[3]
    inner = getattr(experts, "inner", None) or experts.w1.shape[1]
    count = getattr(experts, "count", None) or experts.w1.shape[0]
    place = (ids - experts.first).flatten()
    local = (place >= 0) & (place < count)
    used = torch.zeros(count + 1, device=ids.device).scatter_(0, torch.where(local, place, count), 1.0)[:count].sum()
    weights = used * (3.0 * h.shape[1] * inner * (0.5 + 1 / 32))  # FP4 with a scale byte per 32
    products = local.sum() * (6.0 * h.shape[1] * inner / c.bf16_flops)
    return torch.maximum(products, (weights + _bytes(h, out)) / c.bandwidth)


def _total(c: Ceilings, args: tuple[Any, ...], out: Any) -> float:
    parts = args[0]
    return _bytes(*parts, out) / c.bandwidth if len(parts) > 1 else 0.0


_FLOORS: dict[str, Floor] = {
    "linear": _linear,
    "linear_fp32": _linear,
    "route": _moved,
    "grouped_output": _grouped,
    "attend": _attend,
    "select_entries": _select,
    "experts": _experts,
    "total": _total,
    "rope": lambda c, args, out: 2.0 * _bytes(args[0]) * 64 / args[0].shape[-1] / c.bandwidth,
}


class TimedKernels:
    """Wraps a kernel set; `rows()` after a step gives and forgets what was recorded."""

    def __init__(self, kernels: Any, ceilings: Ceilings):
        self._kernels, self._ceilings = kernels, ceilings
        self._calls: list[tuple[str, Any, Any, float | Tensor]] = []
        self.recording = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        if not callable(value) or name == "pack_experts":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.recording:
                return value(*args, **kwargs)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            out = value(*args, **kwargs)
            end.record()
            label = name
            if name in ("linear", "linear_fp32"):
                label = f"{name} {args[1].shape[1]} -> {args[1].shape[0]}"
            self._calls.append((label, start, end, _FLOORS.get(name, _moved)(self._ceilings, args, out)))
            return out

        return call

    def rows(self) -> list[Row]:
        """Rows of everything recorded, the slowest first."""
        torch.cuda.synchronize()
        found: dict[str, Row] = {}
        for label, start, end, floor in self._calls:
            row = found.setdefault(label, Row(label))
            row.calls += 1
            row.seconds += start.elapsed_time(end) / 1e3
            row.floor += float(floor)
        self._calls.clear()
        return sorted(found.values(), key=lambda r: -r.seconds)


def format_rows(rows: list[Row], total: float) -> str:
    """A table for people; `total` is the step's time, the rest of which lies between the operations."""
    lines = [f"{'operation':32} {'calls':>5} {'ms':>9} {'floor ms':>9} {'x floor':>8} {'share':>7}"]
    for r in rows:
        times = r.seconds / r.floor if r.floor else math.nan
        lines.append(
            f"{r.name:32} {r.calls:5} {r.seconds * 1e3:9.3f} {r.floor * 1e3:9.3f} {times:8.2f} {r.seconds / total:7.1%}"
        )
    known, floor = sum(r.seconds for r in rows), sum(r.floor for r in rows)
    lines.append(
        f"{'between operations':32} {'':5} {(total - known) * 1e3:9.3f} {'':9} {'':8} {1 - known / total:7.1%}"
    )
    lines.append(f"{'step':32} {'':5} {total * 1e3:9.3f} {floor * 1e3:9.3f} {total / floor:8.2f} {1:7.1%}")
    return "\n".join(lines)
