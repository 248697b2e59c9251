"""Batches for the trainer: sequences of tasks with their Engram rows, made in worker processes, a function of the seed.

Every batch is a dict of [B, T] tensors plus `hashes` [B, T, engram layers, columns]. Test problems are packed the same
way, one problem a row.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paraflash.config.model import ModelConfig
from paraflash.model.engram_hash import hash_windows
from training.tasks import Sequence, Turn, training_batch


@dataclass(frozen=True)
class Shape:
    """Size of one batch: sequences and tokens of each."""

    batch: int
    length: int


@dataclass(frozen=True)
class Batch:
    """What one batch holds; see tasks.training_batch."""

    shape: Shape
    kinds: str = "prss"
    hard: float = 1.0
    dense: float = 1.0


def engram_rows(config: ModelConfig, mapping: NDArray, ids: NDArray) -> NDArray:
    """ids [B, T], each row a sequence of its own -> table rows [B, T, layers, columns] int32."""
    b, t = ids.shape
    n = config.engram_max_ngram
    padded = np.concatenate([np.full((b, n - 1), -1, np.int64), ids], 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, n, axis=1)[:, :, ::-1]
    rows = hash_windows(config, mapping, windows.reshape(b * t, n))
    return rows.reshape(b, t, *rows.shape[1:]).astype(np.int32)


class _Batches(Dataset):
    def __init__(self, config: ModelConfig, mapping: NDArray, wanted: Many[Batch], seed: int):
        self.config, self.mapping, self.wanted, self.seed = config, mapping, wanted, seed

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        b = self.wanted[step]
        size, length = b.shape.batch, b.shape.length
        out = training_batch(self.seed * 1_000_003 + step, size, length, length, b.kinds, b.hard, b.dense)
        out["hashes"] = engram_rows(self.config, self.mapping, out["ids"])
        return {name: torch.from_numpy(value) for name, value in out.items()}


def batches(
    config: ModelConfig, mapping: NDArray, wanted: Many[Batch], seed: int, workers: int, pin: bool, begin: int = 0
) -> Any:
    """An iterator over one batch for each of `wanted`, from number `begin` on, in order with any number of workers."""
    source = _Batches(config, mapping, wanted, seed)
    more: dict[str, Any] = {"prefetch_factor": 6, "multiprocessing_context": "fork"} if workers else {}
    return iter(
        DataLoader(
            source, batch_size=None, sampler=range(begin, len(wanted)), num_workers=workers, pin_memory=pin, **more
        )
    )


def problem_batches(config: ModelConfig, mapping: NDArray, turns: Many[Turn], tokens: int) -> list[dict[str, Any]]:
    """Problems sorted by length and packed to about `tokens` a batch; `rows` says which problem each row is."""
    made = []
    for number, turn in enumerate(turns):
        sequence = Sequence()
        sequence.add(turn)
        made.append((len(sequence.ids), number, sequence))
    made.sort(key=lambda item: item[:2])
    out: list[dict[str, Any]] = []
    group: list[tuple[int, int, Sequence]] = []
    for item in [*made, None]:
        if item is None or (group and item[0] * (len(group) + 1) > tokens):
            length = group[-1][0] - 1
            ids = np.full((len(group), length + 1), config.eos_token_ids[0], np.int64)
            answer = np.zeros((len(group), length), bool)
            for i, (size, _, sequence) in enumerate(group):
                ids[i, :size] = sequence.ids
                answer[i, sequence.starts[0] - 1 : size - 1] = True
            batch = {"ids": ids[:, :-1], "targets": ids[:, 1:].copy(), "answer": answer}
            batch["hashes"] = engram_rows(config, mapping, batch["ids"])
            out.append({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in batch.items()})
            out[-1]["rows"] = [number for _, number, _ in group]
            group = []
        if item is not None:
            group.append(item)
    return out
