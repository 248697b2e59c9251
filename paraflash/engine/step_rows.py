"""Small questions about the rows of a step: their spans, which of them are wanted, whether their shapes come again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paraflash.cache.window import Span
from paraflash.engine.messages import SampleSpec, StepInput, StepRequest
from paraflash.model.inputs import to_device


def rows_at(x: Tensor, index: np.ndarray) -> Tensor:
    """x[index]; where the rows lie one behind the other, as they mostly do, without a copy."""
    first, count = (int(index[0]) if len(index) else 0), len(index)
    if np.array_equal(index, np.arange(first, first + count)):
        return x[first : first + count]
    return x[to_device(torch.from_numpy(index), x.device)]


def in_blocks(r: StepRequest, block_size: int) -> bool:
    """Whether these rows are a part of a prompt whose shapes are likely to come again: whole blocks."""
    return r.is_prefill and r.num_computed % block_size == 0 and r.num_tokens % block_size == 0


def prompt_step(tokens: int, vocab_size: int, blocks: int) -> StepInput:
    """One prompt of `tokens` tokens in KV blocks 1.., sampled at its end."""
    ids = (np.arange(tokens) % vocab_size).astype(np.int32)
    request = StepRequest(
        request_id="measured",
        slot=0,
        token_ids=ids,
        lookback=ids[:0],
        num_computed=0,
        is_prefill=True,
        block_ids=np.arange(1, blocks + 1, dtype=np.int32),
        sample=SampleSpec(),
    )
    return StepInput(0, [request])


def spans_of(requests: Sequence[StepRequest]) -> list[Span]:
    return [
        Span(
            slot=r.slot,
            start=r.num_computed,
            end=r.num_computed + r.num_tokens,
            is_prefill=r.is_prefill,
            window_start=r.window_start,
            write_start=r.kv_write_start,
            block_ids=np.asarray(r.block_ids, np.int64),
        )
        for r in requests
    ]
