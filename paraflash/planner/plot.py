"""The plan as a picture: each split's time by term, and input tokens/s against prompt length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paraflash.config.model import ModelConfig
from paraflash.planner.cli import TERM_TITLES
from paraflash.planner.cost import Efficiency, Setup
from paraflash.planner.hardware import Hardware
from paraflash.planner.memory import MemoryOptions, cache_records
from paraflash.planner.predict import Prediction, simulate
from paraflash.planner.workload import Workload


def prompt_lengths(longest: int, limit: int) -> list[int]:
    """Powers of two from 1,024 that span `longest`, at least up to 32,768, as far as the model's positions allow."""
    top = max(longest, 32768)
    return [n for n in (1024 << i for i in range(11)) if n <= min(2 * top - 1, limit)] or [limit]


def draw(
    path: Path,
    model: ModelConfig,
    hardware: Hardware,
    predictions: list[Prediction],
    workload: Workload,
    efficiency: Efficiency,
    options: MemoryOptions,
) -> None:
    """Writes the picture; the format follows the file's suffix. Raises ValueError for one that is not supported."""
    from matplotlib.figure import Figure  # no pyplot: needs no display and keeps no global state

    shown = [p for p in predictions if p.cost]
    figure = Figure(figsize=(13, 5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    tokens = workload.input_len * workload.concurrency
    names = [str(p.topology) + (" (refused)" if p.refused else "") for p in shown]
    left = [0.0] * len(shown)
    for name, title in TERM_TITLES.items():
        widths = [p.cost.terms[name].seconds * 1e6 / tokens if p.cost else 0.0 for p in shown]
        bars.barh(names, widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.invert_yaxis()
    bars.set_xlabel("microseconds a prompt token, one rank")
    bars.set_title(f"{workload.concurrency} prompts of {workload.input_len} tokens, budget {workload.batch_budget}")
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, frameon=False, fontsize="small")

    lengths = prompt_lengths(workload.input_len, model.max_position_embeddings)
    records = cache_records(model, options.kv_cache_dtype)
    for p in shown:
        setup = Setup(model, p.topology, hardware, efficiency, records)
        speeds = [simulate(setup, replace(workload, input_len=n, concurrency=1))[0] for n in lengths]
        lines.plot(lengths, speeds, marker="o", label=str(p.topology))
    lines.set_xscale("log", base=2)
    lines.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    lines.set_ylim(bottom=0)
    lines.set_xlabel("prompt tokens")
    lines.set_ylabel("input tokens/s, predicted")
    lines.set_title(f"{predictions[0].topology.world} x {hardware.name}, one prompt at a time")
    lines.legend(frameon=False)
    figure.savefig(path, dpi=120)
