"""The released model and small builders that the planner's tests share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from paraflash.config.model import ModelConfig
from paraflash.planner.cli import read_model
from paraflash.planner.cost import Efficiency, RecordBytes, Setup
from paraflash.planner.hardware import RELEASED_FILE, Hardware, read_entries
from paraflash.planner.workload import Step
from paraflash.topology import Topology

DATA = Path(__file__).parent.parent / "data"
CONFIG = DATA / "released_config.json"
RECORDS = RecordBytes(window=584, latent=584, index=132)


@cache
def released() -> ModelConfig:
    return read_model(str(CONFIG))


def hardware(name: str = "H20") -> Hardware:
    return read_entries(RELEASED_FILE)[name]


def setup(tp: int = 8, pcp: int = 1, gpu: str = "H20", experts: float = 1.0, compute: float = 1.0) -> Setup:
    return Setup(released(), Topology(tp, pcp), hardware(gpu), Efficiency(experts, compute), RECORDS)


def one_layer(base: Setup, layer: int) -> Setup:
    """The same setup on a model of this layer alone (for terms that read no tensor table)."""
    return replace(base, model=replace(base.model, layers=(base.model.layers[layer],)))


def step(start: int, length: int, replay: bool = False, finished: bool = False) -> Step:
    return Step(((start, length),), (0,) if finished else (), replay)
