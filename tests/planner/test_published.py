"""The model against the published 8 x H20 tables: gains within 6 points, throughput within 25 %."""

from __future__ import annotations

import pytest

from paraflash.planner.fit import Cell, fit, predicted, published
from paraflash.planner.predict import EFFICIENCIES

from .helpers import released

MARLIN_TTFT = {
    8192: (1.21098, 1.03490, 0.92097),
    16384: (2.44316, 2.06599, 1.84479),
    32768: (4.94236, 4.14920, 3.71534),
}


def cells(backend: str) -> list[Cell]:
    return published(backend)[2]


def name(cell: Cell) -> str:
    return f"{cell.workload.input_len}x{cell.workload.concurrency}"


def speeds(backend: str, cell: Cell) -> list[float]:
    hardware, topologies, _ = published(backend)
    return predicted(released(), hardware, topologies, cell, EFFICIENCIES[backend])


@pytest.mark.parametrize("cell", cells("marlin"), ids=name)
def test_gain_over_tp8_is_within_6_points_and_throughput_within_25_percent(cell):
    ours, theirs = speeds("marlin", cell), cell.tokens_per_second
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a / ours[0] - b / theirs[0] == pytest.approx(0, abs=0.06)
    assert ours == pytest.approx(theirs, rel=0.25)


@pytest.mark.parametrize("cell", cells("humming"), ids=name)
def test_the_other_expert_backend_fits_as_well(cell):
    ours, theirs = speeds("humming", cell), cell.tokens_per_second
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert a / ours[0] - b / theirs[0] == pytest.approx(0, abs=0.06)
    assert ours == pytest.approx(theirs, rel=0.25)


@pytest.mark.parametrize("length", sorted(MARLIN_TTFT))
def test_time_to_first_token_of_one_prompt(length):
    cell = next(c for c in cells("marlin") if c.workload.input_len == length and c.workload.concurrency == 1)
    assert [length / speed for speed in speeds("marlin", cell)] == pytest.approx(MARLIN_TTFT[length], rel=0.25)


@pytest.mark.parametrize("backend", ["marlin", "humming"])
def test_the_shipped_factors_are_the_fit(backend):
    efficiency, error = fit(released(), backend)
    assert efficiency.experts == pytest.approx(EFFICIENCIES[backend].experts, rel=0.01)
    assert efficiency.compute == pytest.approx(EFFICIENCIES[backend].compute, rel=0.01)
    assert error < 0.03
