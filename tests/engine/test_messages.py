"""A step is the same after its journey, and a decode step's arrays say what its requests say."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from paraflash.engine.decode_step import decode_step, decode_tokens, decode_windows
from paraflash.engine.messages import Sampled, SampleSpec, StepInput, StepOutput, StepRequest, TokenLogprobs
from paraflash.model.engram_hash import make_windows

RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 2**63 - 1, "step": 9},
    {"logprobs": 0},
    {"presence_penalty": 0.5, "history": np.arange(4, dtype=np.int32), "prompt_len": 2},
    {"repetition_penalty": 1.5, "history": np.arange(3, dtype=np.int32)},
    {"frequency_penalty": -1.0, "history": np.arange(3, dtype=np.int32)},
    {"logit_bias": {3: 1.5}},
    {"bitmask": np.array([-1, 7], np.int32)},
    {"banned_ids": np.array([1, 2], np.int32)},
]


def a_request(number: int, length: int, start: int, rule: dict[str, Any] | None, **more: Any) -> StepRequest:
    r = random.Random(number)
    return StepRequest(
        request_id=f"r{number}",
        slot=number,
        token_ids=np.array([r.randrange(3, 270) for _ in range(length)], np.int32),
        lookback=np.array([r.randrange(3, 270) for _ in range(min(3, start))], np.int32),
        num_computed=start,
        block_ids=np.array([r.randrange(1, 99) for _ in range((start + length - 1) // 64 + 1)], np.int32),
        sample=None if rule is None else SampleSpec(**rule),
        **{"is_prefill": False, "kv_write_start": number % 3 * 64, "window_start": number % 5, **more},
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, (StepRequest, SampleSpec)):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a) is type(b) and bool(a == b)


def test_a_step_arrives_as_it_was_sent() -> None:
    requests = [a_request(i, 1, 10 * i, rule) for i, rule in enumerate(RULES)]
    requests.append(a_request(20, 70, 0, None, is_prefill=True, is_last_chunk=False, kept_rows=0))
    targets = np.array([5, 6, -1], np.int32)
    requests.append(a_request(21, 3, 64, {}, is_prefill=True, prompt_logprobs=0, prompt_targets=targets))
    requests.append(a_request(22, 3, 64, {}, is_prefill=True, prompt_logprobs=2))
    arrived = pickle.loads(pickle.loads(pickle.dumps(pickle.dumps(StepInput(7, requests)))))
    assert arrived.step_id == 7
    assert [r.request_id for r in arrived.requests] == [r.request_id for r in requests]
    for found, wanted in zip(arrived.requests, requests, strict=True):
        assert same(found, wanted), wanted.request_id
    assert pickle.loads(pickle.dumps(StepInput(8, []))).requests == []


def test_a_result_arrives_as_it_was_sent() -> None:
    logprobs = TokenLogprobs(3, -0.5, 1, [3, 4], [-0.5, -1.0])
    for sampled in ({}, {"a": Sampled(3), "b": Sampled(4)}, {"a": Sampled(3, logprobs), "b": Sampled(4)}):
        output = StepOutput(3, sampled, {"c": [logprobs]}, {"tp.sum": 0.5})
        assert pickle.loads(pickle.dumps(output)) == output


@pytest.mark.parametrize("number", range(2))
def test_only_sampled_single_rows_of_answers_make_a_decode_step(number: int) -> None:
    others = {
        "prompt": a_request(9, 1, 5, {}, is_prefill=True),
        "two rows": a_request(9, 2, 5, {}),
        "not sampled": a_request(9, 1, 5, None),
        "reported": a_request(9, 1, 5, {}, prompt_logprobs=0),
    }
    rows = [a_request(i, 1, 4, RULES[i]) for i in range(4)]
    assert StepInput(0, rows).columns.is_decode
    for name, other in others.items():
        assert not StepInput(0, [*rows[:number], other, *rows[number:]]).columns.is_decode, name


@pytest.mark.parametrize("max_ngram", [2, 3, 4])
def test_a_decode_step_has_the_numbers_of_its_requests_and_padding_behind_them(max_ngram: int) -> None:
    starts = [0, 1, 2, 3, 63, 64, 640]
    requests = [a_request(i, 1, start, {}) for i, start in enumerate(starts)]
    columns = pickle.loads(pickle.dumps(StepInput(0, requests))).columns
    tokens = decode_tokens(columns, 8)
    windows = decode_windows(columns, tokens, max_ngram)
    for window, r in zip(windows, requests, strict=False):
        assert window.tolist() == make_windows(r.token_ids, r.lookback, max_ngram)[0].tolist()
    assert windows[7].tolist() == [0] + [-1] * (max_ngram - 1)
    step = decode_step(columns, 8, 50, 64)
    assert step.position.tolist() == [*starts, 0] and step.slot.tolist() == [*range(7), 50]
    assert step.write_start[:7].tolist() == [r.kv_write_start for r in requests] and step.write_start[7] == 0
    assert step.window_start[:7].tolist() == [r.window_start for r in requests] and step.window_start[7] == 0
    assert step.tables.shape == (8, 16), "11 blocks, in powers of two"
    for table, r in zip(step.tables.tolist(), requests, strict=False):
        assert table == [*r.block_ids.tolist(), *[0] * (16 - len(r.block_ids))]
    assert not step.tables[7].any()
