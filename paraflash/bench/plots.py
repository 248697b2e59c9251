"""The three plots of a sweep: TTFT against input length, throughput against concurrency, and scaling.

Cells without a value leave gaps; a plot for which nothing was measured is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflash.topology import parse_topology

if TYPE_CHECKING:
    from paraflash.bench.report import Sweep

# Okabe-Ito: told apart with any colour vision; markers differ too.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_MAX_PANELS = 4


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 3.4 * panels), 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _spread(values: list[int]) -> list[int]:
    """At most `_MAX_PANELS` of the values: the first, the last and some between."""
    if len(values) <= _MAX_PANELS:
        return values
    step = (len(values) - 1) / (_MAX_PANELS - 1)
    return [values[round(i * step)] for i in range(_MAX_PANELS)]


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index % len(_MARKERS)], "markersize": 5}


def _lines(sweep: Sweep, key: str, along: str) -> tuple[Any, bool]:
    """One panel per concurrency (along="input_lens") or per input length (along="concurrencies")."""
    inputs, concurrencies = sorted(sweep.state["input_lens"]), sorted(sweep.state["concurrencies"])
    by_input = along == "input_lens"
    ticks, fixed = (inputs, concurrencies) if by_input else (concurrencies, inputs)
    chosen = _spread(fixed)
    figure, axes = _figure(len(chosen))
    drawn = False
    for axis, other in zip(axes, chosen, strict=True):
        for i, name in enumerate(sweep.names):
            shapes = [(x, other) if by_input else (other, x) for x in ticks]
            values = [sweep.value(name, shape, key) for shape in shapes]
            points = [(x, v) for x, v in zip(ticks, values, strict=True) if v is not None]
            if points:
                drawn = True
                axis.plot(*zip(*points, strict=True), label=str(parse_topology(name)), **_style(i))
        axis.set_title(f"concurrency {other}" if by_input else f"input length {other}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(x) for x in ticks])
        axis.set_xlabel("input length (tokens)" if by_input else "concurrency")
    axes[0].set_ylim(bottom=0)  # last: it fixes the shared scale
    return figure, drawn


def _scaling(sweep: Sweep) -> tuple[Any, bool]:
    """Bars: input throughput of each topology over that of the first, for every cell."""
    figure, (axis,) = _figure(1)
    figure.set_size_inches(max(5.0, 0.5 * len(sweep.shapes) * len(sweep.names)), 3.6)
    base, others = sweep.names[0], sweep.names[1:]
    width, drawn = 0.8 / max(len(others), 1), False
    for i, name in enumerate(others):
        points = []
        for x, shape in enumerate(sweep.shapes):
            value, reference = (sweep.value(n, shape, "input_throughput") for n in (name, base))
            if value and reference:
                points.append((x + (i - (len(others) - 1) / 2) * width, value / reference))
        if points:
            topology = parse_topology(name)
            label = f"{topology} ({topology.world} rank{'s' if topology.world > 1 else ''})"
            bars = axis.bar(
                *zip(*points, strict=True), width * 0.92, label=label, color=_COLORS[(i + 1) % len(_COLORS)]
            )
            axis.bar_label(bars, fmt="%.2f", fontsize=8)
            drawn = True
    first = parse_topology(base)
    axis.axhline(1.0, color=_COLORS[0], linewidth=1.2, label=f"{first} ({first.world} ranks)")
    axis.set_xticks(range(len(sweep.shapes)), [f"{n}\nx {c}" for n, c in sweep.shapes])
    axis.set_xlabel("input length x concurrency")
    axis.set_ylabel(f"input throughput / {first}")
    return figure, drawn


def draw_plots(sweep: Sweep, folder: Path) -> list[tuple[str, Path]]:
    """Writes PNG files; returns (title, file) of each that shows something."""
    plots = [("TTFT against input length", "ttft.png", *_lines(sweep, "mean_ttft_ms", "input_lens"))]
    plots[-1][2].axes[0].set_ylabel("mean TTFT (ms)")
    plots += [("Throughput against concurrency", "throughput.png", *_lines(sweep, "input_throughput", "concurrencies"))]
    plots[-1][2].axes[0].set_ylabel("input throughput (tok/s)")
    plots += [("Scaling", "scaling.png", *_scaling(sweep))]
    written = []
    for title, name, figure, drawn in plots:
        path = folder / name
        if not drawn:
            path.unlink(missing_ok=True)  # of an earlier run
            continue
        folder.mkdir(parents=True, exist_ok=True)
        # A topology may be absent from some panels; same label, same look everywhere.
        known = {
            label: handle
            for axis in figure.axes
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        labels, handles = list(known), list(known.values())
        figure.legend(handles, labels, loc="outside upper center", ncols=max(1, len(labels)), frameon=False)
        figure.savefig(path, dpi=130, metadata={"Software": None})
        written.append((title, path))
    return written
