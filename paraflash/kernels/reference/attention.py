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
CACHED_ELEMENTS = 1 << 19  # the same for `attend` on a CPU: 2 MB, which stay in its cache from gather to products


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


def entry_slots(requests: Tensor, count: int, rows: IndexRows) -> Tensor:
    """Pool slots [n, count] of entries 0..count-1 of n requests."""
    entry = torch.arange(count, device=rows.block_tables.device)
    return rows.block_tables[requests[:, None], entry // rows.entries] * rows.entries + entry % rows.entries


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    """fp32 scores [n, r, entries] of r rows in each of n requests: q [n, r, heads, di], weights [n, r, heads],
    keys [n, entries, di], visible [n, r]; -inf where an entry is not yet visible."""
    dots = (q.float().flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3]).relu_()
    scores = (dots * (weights.float() * scale)[..., None]).sum(2)
    hidden = torch.arange(keys.shape[1], device=q.device) >= visible[..., None]
    return scores.masked_fill_(hidden, -math.inf)


def scored_together(rows: IndexRows, width: int) -> list[tuple[int, int, list[int], int]]:
    """(first row, end row, requests, entries): neighbouring requests with equally many rows, as decode rows are.

    width: elements that an entry of a request takes.
    """
    groups: list[tuple[int, int, list[int], int]] = []
    for first, end, request in rows.segments:
        entries = int(rows.visible_host[end - 1])  # the last row of a segment sees most
        if groups:
            start, last, requests, most = groups[-1]
            n, most = len(requests) + 1, max(most, entries)
            if last - start == len(requests) * (end - first) and n * most * width <= QUERY_CHUNK_ELEMENTS:
                groups[-1] = (start, end, [*requests, request], most)
                continue
        groups.append((first, end, [request], entries))
    return groups


def candidate_mask(scores: Tensor, visible: Tensor, blocks: int, size: int) -> Tensor:
    """Entries [.., entries] in the kept blocks of each row; the newest visible block is always kept."""
    entries = scores.shape[-1]
    count = -(-entries // size)
    padded = torch.nn.functional.pad(scores, (0, count * size - entries), value=-math.inf)
    best = padded.unflatten(-1, (count, size)).amax(-1)
    newest = torch.arange(count, device=scores.device) == ((visible - 1) // size)[..., None]
    best = best.masked_fill_(newest, math.inf)
    # Equal blocks (a score of exactly 0 is common after the ReLU): the newer one is kept.
    value, block = lowest_first_topk(best.flip(-1), min(blocks, count))
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, count - 1 - block, value > -math.inf)
    return kept.repeat_interleave(size, -1)[..., :entries]


def lowest_first_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row; equal scores go to the lower index."""
    value, index = scores.sort(dim=-1, descending=True, stable=True)
    return value[..., :k], index[..., :k]


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
    chosen = torch.full((q.shape[0], topk), -1, dtype=torch.int64, device=q.device)
    masks: list[Tensor] = []  # [rows, entries] of each group
    for number, (first, end, requests, count) in enumerate(scored_together(rows, max(q.shape[1:]))):
        shape = (len(requests), (end - first) // len(requests))
        keys = pool.read(entry_slots(torch.tensor(requests, device=q.device), count, rows))
        parts = [x[first:end].unflatten(0, shape) for x in (q, weights, rows.visible, chosen)]
        mask = torch.zeros(*shape, count, dtype=torch.bool, device=q.device)
        step = max(1, QUERY_CHUNK_ELEMENTS // max(1, shape[0] * count * q.shape[1]))
        for a in range(0, shape[1], step):
            part_q, part_weights, visible, part_chosen = (x[:, a : a + step] for x in parts)
            scores = index_scores(part_q, part_weights, keys, visible, scale)
            if publish is not None and count:
                mask[:, a : a + step] = candidate_mask(scores, visible, *publish)
            if candidates is not None:
                allowed = candidates[number].unflatten(0, shape)[:, a : a + step]
                scores.masked_fill_(~allowed, -math.inf)
            value, index = lowest_first_topk(scores, min(topk, count))
            part_chosen[..., : index.shape[-1]] = torch.where(value > -math.inf, index, -1)
        masks.append(mask.flatten(0, 1))
    return chosen, masks if publish is not None else None


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
    elements = CACHED_ELEMENTS if q.device.type == "cpu" else QUERY_CHUNK_ELEMENTS
    step = max(1, elements // (width * q.shape[-1]))
    for a in range(0, q.shape[0], step):
        part = slice(a, a + step)
        index = window_index[part]
        # index_select copies whole rows: several times as fast as indexing with a tensor on a CPU.
        k = keys.index_select(0, index.clamp_min(0).flatten()).unflatten(0, index.shape)
        allowed = index >= 0
        if pool is not None and slots is not None:
            chosen = slots[part]
            k = torch.cat([k, pool.read(chosen.clamp_min(0))], 1)
            allowed = torch.cat([allowed, chosen >= 0], 1)
        logits = (q[part].float() @ k.mT) * scale  # [T, H, keys]
        logits.masked_fill_(~allowed[:, None], -math.inf)
        sinks = sink.float().view(1, -1, 1).expand(logits.shape[0], -1, 1)
        probs = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        if q.is_cuda or not allowed.all():  # whatever stands in unused places may not be a number
            k.masked_fill_(~allowed[..., None], 0)
        out[part] = (probs @ k).to(q.dtype)
    return out


def grouped_output(o: Tensor, wo_a: Tensor, round_input: bool) -> Tensor:
    x = round_activation(o) if round_input else o
    return (x.transpose(0, 1) @ wo_a.mT).transpose(0, 1).flatten(1)
