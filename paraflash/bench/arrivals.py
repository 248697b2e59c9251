"""When requests are due: a rate with Poisson (or more bursty, or more even) gaps, or a rate that ramps up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arrivals:
    """`rate` in requests/s, inf: all at once. `burstiness` is the shape of the gamma-distributed gaps: 1 is Poisson,
    below 1 more bursty, above 1 more even. With `ramp` ("linear", "exponential") the rate goes from `ramp_start` to
    `ramp_end` over the requests of a wave instead."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: str | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0

    def rate_at(self, index: int, count: int) -> float:
        """Requests/s that hold between request `index` and the next."""
        if self.ramp is None:
            return self.rate
        progress = index / max(count - 1, 1)
        if self.ramp == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * progress
        return self.ramp_start * (self.ramp_end / self.ramp_start) ** progress

    def times(self, count: int, seed: list[int]) -> list[float]:
        """Seconds after the wave's begin at which each request is due; the first at 0."""
        rng = np.random.default_rng(seed)
        due, now = [], 0.0
        for i in range(count):
            due.append(now)
            rate = self.rate_at(i, count)
            if math.isfinite(rate):
                now += float(rng.gamma(self.burstiness, 1.0 / (rate * self.burstiness)))
        return due
