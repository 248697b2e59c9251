"""KV production, entry selection and sink attention, as model.md 3.6 to 3.10 write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import Record
from paraflash.formats import round_activation, round_index, round_latent, round_window
from paraflash.kernels.interface import IndexRows, Rotary
from paraflash.kernels.reference.hyper import linear, rms_norm, rope

QUERY_CHUNK_ELEMENTS = 1 << 24  # bounds the gathered keys of `attend` and the scores of `select_entries`


def window_rows(kv: Tensor, weight: Tensor, eps: float, rotary: Rotary, record: Record, trained: bool) -> Tensor:
    x = rope(rms_norm(kv, weight, eps), rotary)
    return record.encode(round_window(x) if trained and not record.trained else x)


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    d = first.shape[-1] // 2
    kv = torch.stack([first[:, :d], second[:, :d]])
    gate = torch.stack([first[:, d:], second[:, d:]]).softmax(0)
    return (gate * kv).sum(0)


def latent_rows(latent: Tensor, rotary: Rotary, record: Record, trained: bool) -> Tensor:
    x = rope(latent, rotary)
    return record.encode(round_latent(x) if trained and not record.trained else x)


def index_rows(
    latent: Tensor, wk: Tensor, weight: Tensor, eps: float, rotary: Rotary, record: Record, trained: bool
) -> Tensor:
    x = rope(rms_norm(linear(latent, wk), weight, eps), rotary)
    return record.encode(round_index(x) if trained and not record.trained else x)


def index_queries(q: Tensor, rotary: Rotary, trained: bool) -> Tensor:
    q = rope(q, rotary)
    return round_index(q) if trained else q


def entry_slots(request: int, count: int, rows: IndexRows) -> Tensor:
    """Pool slots [count] of a request's entries 0..count-1."""
    entry = torch.arange(count, device=rows.block_tables.device)
    return rows.block_tables[request, entry // rows.entries] * rows.entries + entry % rows.entries


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    """fp32 scores [n, entries]; -inf where an entry is not yet visible."""
    dots = torch.einsum("thd,jd->thj", q.float(), keys).relu()
    scores = (dots * (weights.float() * scale)[..., None]).sum(1)
    hidden = torch.arange(keys.shape[0], device=q.device)[None] >= visible[:, None]
    return scores.masked_fill(hidden, -math.inf)


def candidate_mask(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    """Entries [n, entries] in the kept blocks of each row; the newest visible block is always kept."""
    n, entries = scores.shape
    count = -(-entries // size)
    best = (
        torch.nn.functional.pad(scores, (0, count * size - entries), value=-math.inf)
        .unflatten(1, (count, size))
        .amax(-1)
    )
    newest = (visible - 1) // size
    row = torch.arange(n, device=scores.device)[visible > 0]
    best[row, newest[visible > 0]] = math.inf
    # Equal blocks (a score of exactly 0 is common after the ReLU): the newer one is kept.
    value, block = lowest_first_topk(best.flip(-1), min(blocks, count))
    block = count - 1 - block
    kept = torch.zeros(n, count, dtype=torch.bool, device=scores.device).scatter_(1, block, value > -math.inf)
    return kept.repeat_interleave(size, 1)[:, :entries]


def lowest_first_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row; equal scores go to the lower index."""
    value, index = scores.sort(dim=-1, descending=True, stable=True)
    return value[:, :k], index[:, :k]


def select_entries(
    q: Tensor,
    weights: Tensor,
    pool: RecordPool,
    rows: IndexRows,
    topk: int,
    scale: float,
    candidates: Any = None,
    publish: tuple[int, int] | None = None,
) -> tuple[Tensor, Any]:
    entries = torch.full((q.shape[0], topk), -1, dtype=torch.int64, device=q.device)
    masks: list[Tensor] = []
    for number, (first, end, request) in enumerate(rows.segments):
        count = int(rows.visible_host[first:end].max())
        keys = pool.read(entry_slots(request, count, rows))
        published = torch.zeros(end - first, count, dtype=torch.bool, device=q.device)
        step = max(1, QUERY_CHUNK_ELEMENTS // max(1, count * q.shape[1]))
        for a in range(first, end, step):
            b = min(end, a + step)
            scores = index_scores(q[a:b], weights[a:b], keys, rows.visible[a:b], scale)
            if publish is not None and count:
                published[a - first : b - first] = candidate_mask(scores, rows.visible[a:b], *publish)
            if candidates is not None:
                scores = scores.masked_fill(~candidates[number][a - first : b - first], -math.inf)
            value, index = lowest_first_topk(scores, min(topk, count))
            entries[a:b, : index.shape[1]] = torch.where(value > -math.inf, index, -1)
        masks.append(published)
    return entries, masks if publish is not None else None


def window_keys(ring: RecordPool, prior_slots: Tensor, rows: Tensor) -> Tensor:
    return ring.record.decode(torch.cat([ring.read_raw(prior_slots), rows]))


def attend(
    q: Tensor,
    keys: Tensor,
    window_index: Tensor,
    pool: RecordPool | None,
    slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    out = torch.empty_like(q)
    width = window_index.shape[1] + (0 if slots is None else slots.shape[1])
    step = max(1, QUERY_CHUNK_ELEMENTS // (width * q.shape[-1]))
    for a in range(0, q.shape[0], step):
        part = slice(a, a + step)
        index = window_index[part]
        k, allowed = keys[index.clamp_min(0)], index >= 0
        if pool is not None and slots is not None:
            chosen = slots[part]
            k = torch.cat([k, pool.read(chosen.clamp_min(0))], 1)
            allowed = torch.cat([allowed, chosen >= 0], 1)
        logits = torch.einsum("thd,ted->the", q[part].float(), k) * scale
        logits = logits.masked_fill(~allowed[:, None], -math.inf)
        sinks = sink.float().view(1, -1, 1).expand(logits.shape[0], -1, 1)
        probs = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        out[part] = torch.einsum("the,ted->thd", probs, k.masked_fill(~allowed[..., None], 0)).to(q.dtype)
    return out


def grouped_output(o: Tensor, wo_a: Tensor, round_input: bool) -> Tensor:
    return torch.einsum("tgi,goi->tgo", round_activation(o) if round_input else o, wo_a).flatten(1)
