"""A ModelRunner that hands out raw logits and probes, for tests that compare whole steps across topologies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paraflash.engine import runner
from paraflash.engine.messages import StepRequest


class LogitsRunner(runner.ModelRunner):
    """`StepOutput.prompt_logprobs` holds logits rows [vocab] of every row that has a target."""

    def _prompt_logprobs(self, rows: Tensor, request: StepRequest, offsets: np.ndarray) -> list[Any]:
        logits = self.transformer.logits(rows)
        return list(logits.numpy()) if self.mesh.rank == 0 else []

    def start_probe(self, names: list[str]) -> None:
        self.seen: dict[str, list[Any]] = {}

        def probe(name: str, value: Any) -> None:
            if name.split(".", 2)[-1] in names or name in names:
                self.seen.setdefault(name, []).append(value)

        self.transformer.probe = probe

    def take_probe(self) -> dict[str, list[Any]]:
        seen, self.seen = self.seen, {}
        return seen

    def poison(self) -> None:
        """Fills the caches with NaN bytes, so that a read of something never written shows."""
        for part in self.cache._parts():
            part.view(torch.uint8).fill_(0xFF)
