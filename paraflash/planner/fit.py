"""Fits the two efficiency factors of an expert backend to the published 8 x H20 tables, all cells at once.

`python -m paraflash.planner.fit MODEL_OR_CONFIG.json` prints the factors and, cell by cell, published against
predicted. Least squares on log throughput, by Gauss-Newton over the logarithms of the two factors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paraflash.config.model import ModelConfig
from paraflash.planner.cost import Efficiency, RecordBytes, Setup
from paraflash.planner.hardware import RELEASED_FILE, Hardware, read_entries
from paraflash.planner.predict import simulate
from paraflash.planner.workload import Workload
from paraflash.topology import Topology

PUBLISHED_FILE = Path(__file__).with_name("published.json")
PUBLISHED_RECORDS = RecordBytes(window=584, latent=584, index=132)  # the fp8_ds_mla cache of those runs


@dataclass(frozen=True)
class Cell:
    """One row of a published table: tokens/s for each of `TOPOLOGIES`."""

    workload: Workload
    tokens_per_second: tuple[float, ...]


def published(backend: str, replay: bool = False) -> tuple[Hardware, list[Topology], list[Cell]]:
    """The GPU, the topologies and the cells of one expert backend ("marlin" or "humming")."""
    data = json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
    cells = [
        Cell(
            Workload(row["input_len"], row["concurrency"], data["batch_budget"], replay),
            tuple(row["tokens_per_second"]),
        )
        for row in data[backend]
    ]
    return read_entries(RELEASED_FILE)[data["gpu"]], [Topology(tp, pcp) for tp, pcp in data["topologies"]], cells


def predicted(
    model: ModelConfig, hardware: Hardware, topologies: list[Topology], cell: Cell, efficiency: Efficiency
) -> list[float]:
    """tokens/s of a cell by the model."""
    return [simulate(Setup(model, t, hardware, efficiency, PUBLISHED_RECORDS), cell.workload)[0] for t in topologies]


def fit(model: ModelConfig, backend: str, replay: bool = False) -> tuple[Efficiency, float]:
    """(factors, root mean square of the relative error) over all cells of a backend."""
    hardware, topologies, cells = published(backend, replay)
    # Prompts of a wave differ in nothing that the model sees, so equal lengths share one evaluation.
    target: dict[int, list[tuple[float, ...]]] = {}
    for cell in cells:
        target.setdefault(cell.workload.input_len, []).append(cell.tokens_per_second)

    def errors(point: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency = Efficiency(*np.exp(point).tolist())
        parts = []
        for length, rows in target.items():
            one = Cell(Workload(length, 1, cells[0].workload.batch_budget, replay), ())
            speeds = np.log(predicted(model, hardware, topologies, one, efficiency))
            parts += [speeds - np.log(row) for row in rows]
        return np.concatenate(parts)

    point, step = np.log(np.array([0.2, 0.8])), 1e-4
    for _ in range(8):
        now = errors(point)
        slope = np.stack([(errors(point + step * axis) - now) / step for axis in np.eye(2)], 1)
        point = point - np.linalg.lstsq(slope, now, rcond=None)[0]
    return Efficiency(*np.exp(point).tolist()), float(np.sqrt((errors(point) ** 2).mean()))


def main(path: str) -> None:
    from paraflash.planner.cli import read_model

    model = read_model(path)
    for replay in (False, True):
        for backend in ("marlin", "humming"):
            efficiency, rms = fit(model, backend, replay)
            factors = f"experts {efficiency.experts:.4f}, compute {efficiency.compute:.4f}"
            print(f"{backend}, bounded replay {replay}: {factors}, rms error {rms:.2%}; published, predicted:")
            hardware, topologies, cells = published(backend, replay)
            for cell in cells:
                speeds = predicted(model, hardware, topologies, cell, efficiency)
                pairs = "  ".join(f"{a:8.0f} {b:8.0f}" for a, b in zip(cell.tokens_per_second, speeds, strict=True))
                gains = "  ".join(
                    f"{a / cell.tokens_per_second[0] - 1:6.1%} {b / speeds[0] - 1:6.1%}"
                    for a, b in zip(cell.tokens_per_second[1:], speeds[1:], strict=True)
                )
                print(f"  {cell.workload.input_len:6} x{cell.workload.concurrency}: {pairs} | {gains}")


if __name__ == "__main__":
    main(sys.argv[1])
