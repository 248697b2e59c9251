"""The reference kernels where they batch what the formulas of model.md write row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paraflash.kernels.interface import Expert
from paraflash.kernels.reference import attention, hyper, moe
from tests.kernels.cases import Maker, index_rows, plain_pool


@pytest.fixture
def maker() -> Maker:
    return Maker(7, "cpu", torch.float32)


def test_sinkhorn_divides_columns_and_rows_in_turn(maker):
    comb = maker.normal(5, 4, 4).softmax(-1) + 1e-6
    want = comb / (comb.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        want = want / (want.sum(2, keepdim=True) + 1e-6)
        want = want / (want.sum(1, keepdim=True) + 1e-6)
    assert torch.allclose(hyper.sinkhorn(comb, 20, 1e-6), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inverse", [False, True])
def test_rope_turns_adjacent_pairs_of_the_last_channels(maker, inverse):
    x, rotary = maker.normal(5, 3, 24), maker.rotary(5, 8)
    got = hyper.rope(x, rotary, inverse)
    assert torch.equal(got[..., :16], x[..., :16])
    for i in range(4):
        cos, sin = rotary.cos[:, i, None], rotary.sin[:, i, None] * (-1 if inverse else 1)
        a, b = x[..., 16 + 2 * i], x[..., 17 + 2 * i]
        assert torch.allclose(got[..., 16 + 2 * i], a * cos - b * sin, atol=1e-6)
        assert torch.allclose(got[..., 17 + 2 * i], a * sin + b * cos, atol=1e-6)


@pytest.mark.parametrize("first", [0, 4, 20])
def test_experts_add_up_the_chosen_ones_of_this_rank(maker, first):
    rows, hidden, inner, topk = 9, 16, 8, 3
    own = Expert(
        maker.normal(4, inner, hidden), maker.normal(4, hidden, inner), maker.normal(4, inner, hidden), first, 24
    )
    h, weights = maker.normal(rows, hidden), maker.normal(rows, topk).abs()
    ids = torch.stack([torch.randperm(9, generator=maker.generator)[:topk] for _ in range(rows)])
    want = torch.zeros(rows, hidden)
    for t in range(rows):
        for expert, weight in zip((ids[t] - first).tolist(), weights[t], strict=True):
            if 0 <= expert < 4:
                a = moe.swiglu(own.w1[expert] @ h[t], own.w3[expert] @ h[t], 1.5) * weight
                want[t] += own.w2[expert] @ a
    assert torch.allclose(moe.experts(h, ids, weights, own, 1.5, False), want, atol=1e-4)


def test_requests_scored_together_choose_what_each_chooses_alone(maker):
    lengths, counts = [70, 3, 41, 0, 50, 50, 33], [1, 1, 1, 1, 6, 6, 2]
    pool = plain_pool(maker, 20, 32, 16)
    rows = index_rows(maker, lengths, counts, 32, 20)
    assert len(attention.scored_together(rows, 16)) == 3
    q, weights = maker.normal(sum(counts), 4, 16), maker.normal(sum(counts), 4)
    chosen, masks = attention.select_entries(q, weights, pool, rows, 5, 0.1, publish=(3, 4))
    again, _ = attention.select_entries(q, weights, pool, rows, 5, 0.1, candidates=masks)
    for first, end, request in rows.segments:
        alone = replace(
            rows,
            segments=((0, end - first, request),),
            visible=rows.visible[first:end],
            visible_host=rows.visible_host[first:end],
            row_request=rows.row_request[first:end],
        )
        part = slice(first, end)
        want, mask = attention.select_entries(q[part], weights[part], pool, alone, 5, 0.1, publish=(3, 4))
        assert torch.equal(chosen[part], want)
        want, _ = attention.select_entries(q[part], weights[part], pool, alone, 5, 0.1, candidates=mask)
        assert torch.equal(again[part], want)
