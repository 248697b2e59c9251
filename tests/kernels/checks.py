"""One check per operation: `kernels` against the reference, at any sizes. Each returns nothing and asserts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paraflash.cache.records import Mxfp8Record, Nvfp4Record, PlainRecord, Record
from paraflash.kernels.reference import reference_kernels
from tests.kernels.cases import Maker, Sizes, differing, experts, index_rows, near, plain_pool, values_of

REFERENCE = reference_kernels()
# bf16 stores 8 significant bits; sums of many products differ by their order on top.
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 4e-3}


def check_norm_and_streams(kernels: Any, m: Maker, s: Sizes) -> None:
    limit = LIMIT[m.dtype]
    streams = m.normal(s.rows, s.streams, s.hidden)
    weight, pre = m.normal(s.hidden), m.normal(s.rows, s.streams, dtype=torch.float32)
    near(kernels.rms_norm(streams, weight, 1e-20), REFERENCE.rms_norm(streams, weight, 1e-20), limit)
    mixes = s.streams * (s.streams + 2)
    fn = m.normal(mixes, s.streams * s.hidden, scale=(s.streams * s.hidden) ** -0.5, dtype=torch.float32)
    scale, base = m.normal(3, dtype=torch.float32), m.normal(mixes, dtype=torch.float32)
    found = kernels.hc_mixes(streams, fn, scale, base, 20, 1e-6, 1e-20)
    wanted = REFERENCE.hc_mixes(streams, fn, scale, base, 20, 1e-6, 1e-20)
    for a, b in zip(found, wanted, strict=True):
        near(a, b, 2e-5)
    _, post, comb = wanted
    collapsed = REFERENCE.hc_collapse(streams, pre, weight, 1e-20)
    near(kernels.hc_collapse(streams, pre, weight, 1e-20), collapsed, limit)
    y = m.normal(s.rows, s.hidden)
    near(kernels.hc_expand(y, streams, post, comb), REFERENCE.hc_expand(y, streams, post, comb), limit)
    for count in range(1, 6):
        parts = list(torch.stack([y + i * streams[:, 0] for i in range(count)]))
        assert torch.equal(kernels.total(parts), REFERENCE.total(parts)), "the bits of one sum after another"
    u = m.normal(s.rows, (s.streams + 1) * s.hidden)
    q_weight, k_weight = m.normal(s.streams, s.hidden), m.normal(s.streams, s.hidden)
    found = kernels.engram_write(streams, u, q_weight, k_weight, 1e-20)
    near(found, REFERENCE.engram_write(streams, u, q_weight, k_weight, 1e-20), limit)


def check_rope(kernels: Any, m: Maker, s: Sizes) -> None:
    x, table = m.normal(s.rows, s.heads, s.head_dim), m.rotary(s.rows, s.rope)
    for inverse in (False, True):
        wanted = REFERENCE.rope(x, table, inverse)
        near(kernels.rope(x.clone(), table, inverse), wanted, LIMIT[m.dtype])


def check_tokens_that_lie_apart(kernels: Any, m: Maker, s: Sizes) -> None:
    """Attention with padded heads leaves gaps between tokens: rope and the grouped projection read around them."""
    padded, table = m.normal(s.rows, s.heads + 2, s.head_dim), m.rotary(s.rows, s.rope)
    x = padded[:, : s.heads]
    wanted, behind = REFERENCE.rope(x.contiguous(), table, True), padded[:, s.heads :].clone()
    turned = kernels.rope(x, table, inverse=True)
    near(turned.contiguous(), wanted, LIMIT[m.dtype])
    assert torch.equal(padded[:, s.heads :], behind)
    o = turned.unflatten(1, (2, -1)).flatten(2)
    wo_a = m.normal(2, 32, o.shape[2], scale=o.shape[2] ** -0.5)
    for rounded in (False, True):
        expected = REFERENCE.grouped_output(o.float().contiguous(), wo_a.float(), rounded)
        near(kernels.grouped_output(o, wo_a, rounded), expected.to(m.dtype), LIMIT[m.dtype])


def check_cache_rows(kernels: Any, m: Maker, s: Sizes) -> None:
    record = PlainRecord(s.head_dim, s.head_dim * m.dtype.itemsize, 0, dtype=m.dtype)
    small = PlainRecord(s.index_dim, s.index_dim * m.dtype.itemsize, 0, dtype=m.dtype)
    table = m.rotary(s.rows, s.rope)
    x, weight = m.normal(s.rows, s.head_dim), m.normal(s.head_dim)
    wk, index_weight = m.normal(s.index_dim, s.head_dim, scale=s.head_dim**-0.5), m.normal(s.index_dim)
    for trained in (False, True):
        found = kernels.window_rows(x, weight, 1e-20, table, record, trained).view(m.dtype)
        wanted = REFERENCE.window_rows(x, weight, 1e-20, table, record, trained).view(m.dtype)
        assert differing(found, wanted) < 2e-3
        found = kernels.latent_rows(x, table, record, trained).view(m.dtype)
        assert differing(found, REFERENCE.latent_rows(x, table, record, trained).view(m.dtype)) < 2e-3
        found = kernels.index_rows(x, wk, index_weight, 1e-20, table, small, trained).view(m.dtype)
        wanted = REFERENCE.index_rows(x, wk, index_weight, 1e-20, table, small, trained).view(m.dtype)
        assert differing(found, wanted) < 5e-3
        q = m.normal(s.rows, s.index_heads, s.index_dim)
        assert differing(kernels.index_queries(q, table, trained), REFERENCE.index_queries(q, table, trained)) < 2e-3
    pairs = m.normal(s.rows, 2 * s.head_dim, dtype=torch.float32), m.normal(s.rows, 2 * s.head_dim, dtype=torch.float32)
    near(kernels.pool_pairs(*pairs), REFERENCE.pool_pairs(*pairs), 1e-6)


def check_linears(kernels: Any, m: Maker, s: Sizes) -> None:
    limit = LIMIT[m.dtype]
    x, weight = m.normal(s.rows, s.hidden), m.normal(s.head_dim, s.hidden, scale=s.hidden**-0.5)
    for rounded in (False, True):
        found, wanted = kernels.linear(x, weight, rounded), REFERENCE.linear(x.float(), weight.float(), rounded)
        near(found, wanted.to(m.dtype), limit)
        again = x.clone()  # another tensor of the same values must not find the first one's copy by chance
        again[:, 0] += 1
        wanted = REFERENCE.linear(again.float(), weight.float(), rounded).to(m.dtype)
        near(kernels.linear(again, weight, rounded), wanted, limit)
    near(kernels.linear_fp32(x, weight), REFERENCE.linear_fp32(x, weight), 2e-5)
    o, wo_a = m.normal(s.rows, 4, s.head_dim), m.normal(4, 64, s.head_dim, scale=s.head_dim**-0.5)
    for rounded in (False, True):
        wanted = REFERENCE.grouped_output(o.float(), wo_a.float(), rounded)
        near(kernels.grouped_output(o, wo_a, rounded), wanted.to(m.dtype), limit)
    gate, up = m.normal(s.rows, s.inner, scale=8.0), m.normal(s.rows, s.inner, scale=8.0)
    near(kernels.swiglu(gate, up, 10.0), REFERENCE.swiglu(gate, up, 10.0), limit)


def check_rounded_copies(kernels: Any, m: Maker, s: Sizes) -> None:
    """What producers leave for the next linear is what rounding their output gives."""
    limit, weight = LIMIT[m.dtype], m.normal(64, s.hidden, scale=s.hidden**-0.5)
    kernels.linear(m.normal(s.rows, s.hidden), weight, True)  # from here on copies are wanted
    streams, pre = m.normal(s.rows, s.streams, s.hidden), m.normal(s.rows, s.streams, dtype=torch.float32)
    norm, wide = m.normal(s.hidden), m.normal(s.rows, s.hidden, scale=5.0)
    for x in (
        kernels.rms_norm(wide, norm, 1e-20),
        kernels.hc_collapse(streams, pre, norm, 1e-20),
        kernels.swiglu(wide, wide.flip(0), 10.0),
    ):
        found = kernels.linear(x, weight, True)
        near(found, REFERENCE.linear(x.float(), weight.float(), True).to(m.dtype), limit)


def check_attention(kernels: Any, m: Maker, s: Sizes, arena: bool) -> None:
    """Windows and chosen entries with gaps, rows without any entry, and a layer without a pool."""
    from paraflash.cache.pool import Arena, RecordPool

    record = PlainRecord(s.head_dim, s.head_dim * m.dtype.itemsize, 0, dtype=m.dtype)
    pages, entries, prior = 1 + 4 * s.chosen // 32, 32, 5
    ring = plain_pool(m, 3, s.window, s.head_dim)
    step_rows = record.encode(m.normal(s.rows, s.head_dim))
    place = Arena(record, 7 + pages * entries, prior + s.rows, m.device) if arena else None
    if place is not None:
        place.take(7)  # a pool that does not begin at row 0
    pool = RecordPool(record, pages, entries, m.device, arena=place)
    pool.write(torch.arange(pages * entries, device=m.device), record.encode(m.normal(pages * entries, s.head_dim)))
    prior_slots = m.integers(0, 3 * s.window, prior)
    window_index = m.integers(0, prior + s.rows, s.rows, s.window)
    window_index[:, : s.window // 3] = -1
    slots = m.integers(0, pages * entries, s.rows, s.chosen)
    slots[:, s.chosen * 3 // 4 :] = -1
    slots[0] = -1
    q, sink = m.normal(s.rows, s.heads, s.head_dim), m.normal(s.heads, dtype=torch.float32)
    scale = s.head_dim**-0.5
    keys, wanted_keys = (
        kernels.window_keys(ring, prior_slots, step_rows),
        REFERENCE.window_keys(ring, prior_slots, step_rows),
    )
    for which, chosen in ((pool, slots), (None, None)):
        found = kernels.attend(q, keys, window_index, which, chosen, sink, scale)
        wanted = REFERENCE.attend(q.float(), wanted_keys, window_index, which, chosen, sink, scale)
        near(found, wanted.to(m.dtype), LIMIT[m.dtype])


def check_selection(
    kernels: Any, m: Maker, s: Sizes, lengths: list[int], counts: list[int], blocks: int, size: int
) -> None:
    """Several requests in one step, rows that see nothing, candidates published and applied."""
    entries = 32
    pages = 2 + sum(-(-n // entries) for n in lengths)
    pool = plain_pool(m, pages, entries, s.index_dim, rounded=True)
    rows, loose = (index_rows(m, lengths, counts, entries, pages, more) for more in (0, 333))
    total = sum(counts)
    from paraflash import formats

    q = formats.round_index(m.normal(total, s.index_heads, s.index_dim))
    weights = m.normal(total, s.index_heads, dtype=torch.float32)
    scale = s.index_dim**-0.5 * s.index_heads**-0.5
    wanted, masks = REFERENCE.select_entries(q, weights, pool, rows, s.chosen, scale, publish=(blocks, size))
    narrowed, _ = REFERENCE.select_entries(q, weights, pool, rows, s.chosen, scale, candidates=masks)
    for given in (rows, loose):
        found, published = kernels.select_entries(q, weights, pool, given, s.chosen, scale, publish=(blocks, size))
        compare_choice(found, wanted)
        found, _ = kernels.select_entries(q, weights, pool, given, s.chosen, scale, candidates=published)
        compare_choice(found, narrowed)


def compare_choice(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same sets, but for entries whose scores differ in the last bits of the sum."""
    assert ((found >= 0).sum(1) == (wanted >= 0).sum(1)).all()
    high = int(max(found.max(), wanted.max())) + 2
    a = torch.zeros(len(found), high, dtype=torch.bool, device=found.device).scatter_(1, found + 1, True)[:, 1:]
    b = torch.zeros(len(found), high, dtype=torch.bool, device=found.device).scatter_(1, wanted + 1, True)[:, 1:]
    assert float((a != b).sum()) <= 2e-3 * float(b.sum()) + 1


def check_stored_rows(kernels: Any, m: Maker, s: Sizes, name: str) -> None:
    """A cache of another dtype: its rows are read by slot, attended to and scored as the reference decodes them."""
    from paraflash.cache.pool import RecordPool
    from paraflash.cache.records import kv_format
    from paraflash.kernels.cuda.records import read_rows

    fmt, entries = kv_format(name, s.head_dim, s.rope, s.index_dim), 32
    pages = 5 + 3 * s.chosen // entries
    every = torch.arange(pages * entries, device=m.device)

    def filled(record: Any) -> RecordPool:
        pool = RecordPool(record, pages, entries, m.device)
        pool.write(every, record.encode(m.normal(pages * entries, record.dim, scale=3.0, dtype=torch.float32)))
        return pool

    for record in (fmt.latent, fmt.window, fmt.index):
        pool, slots = filled(record), m.integers(-1, pages * entries, 77)
        out = torch.empty(77, record.dim, dtype=m.dtype, device=m.device)
        read_rows(pool, slots, out)
        wanted = pool.read(slots.clamp_min(0)).masked_fill(slots[:, None] < 0, 0)
        assert torch.equal(out.float(), wanted)

    ring = RecordPool(fmt.window, 3, s.window, m.device)
    step_rows = fmt.window.encode(m.normal(s.rows, s.head_dim, dtype=torch.float32))
    prior = m.integers(0, 3 * s.window, 5)
    window_index = m.integers(-1, 5 + s.rows, s.rows, s.window)
    slots = m.integers(-1, pages * entries, s.rows, s.chosen)
    q, sink = m.normal(s.rows, s.heads, s.head_dim), m.normal(s.heads, dtype=torch.float32)
    keys, scale, pool = kernels.window_keys(ring, prior, step_rows), s.head_dim**-0.5, filled(fmt.latent)
    for which, chosen in ((pool, slots), (None, None)):
        found = kernels.attend(q, keys, window_index, which, chosen, sink, scale)
        own = REFERENCE.window_keys(ring, prior, step_rows)
        wanted = REFERENCE.attend(q.float(), own, window_index, which, chosen, sink, scale)
        near(found, wanted.to(m.dtype), LIMIT[m.dtype])

    lengths, counts = [2 * s.chosen + 3, s.chosen // 2], [3, 2]
    rows = index_rows(m, lengths, counts, entries, pages)
    q, weights = m.normal(5, s.index_heads, s.index_dim), m.normal(5, s.index_heads, dtype=torch.float32)
    q = kernels.index_queries(q, m.rotary(5, s.rope // 2), True)
    keys = filled(fmt.index)
    wanted = REFERENCE.select_entries(q, weights, keys, rows, s.chosen, 0.1)[0]
    loose = replace(rows, width=2 * rows.width, total=2 * rows.total)
    for given in (rows, loose):
        compare_choice(kernels.select_entries(q, weights, keys, given, s.chosen, 0.1)[0], wanted)


def check_every_code(m: Maker) -> None:
    """All e4m3 codes with scales from small to large, all e2m1 codes with all scales: read as they are decoded."""
    from paraflash.cache.pool import RecordPool
    from paraflash.kernels.cuda.records import read_rows

    numbers = torch.arange(256, dtype=torch.uint8, device=m.device)
    codes = numbers[(numbers & 127) != 127]  # e4m3 has no number there
    eights = torch.cat([codes, codes[:2]]).repeat(64, 1)
    exponents = torch.arange(127 - 32, 127 + 32, dtype=torch.uint8, device=m.device)[:, None].repeat(1, 8)
    scales = codes[:, None].repeat(1, 32)
    for record, raw in (
        (Mxfp8Record(256, 256, 8), torch.cat([eights, exponents], 1)),
        (Nvfp4Record(512, 256, 32), torch.cat([numbers.repeat(len(scales), 1), scales], 1)),
    ):
        pool, slots = RecordPool(record, 4, 64, m.device), torch.arange(len(raw), device=m.device)
        pool.write(slots, raw)
        out = torch.empty(len(raw), record.dim, dtype=m.dtype, device=m.device)
        read_rows(pool, slots, out)
        assert torch.equal(out.float(), record.decode(raw))


def check_decode_rows(kernels: Any, m: Maker, s: Sizes, entries: int, name: str = "fp8_ds_mla") -> None:
    """Stored rows as in decoding: each row's ring rows and its own; gaps, a row without a chosen entry, a short one."""
    from paraflash.cache.pool import RecordPool
    from paraflash.cache.records import kv_format

    fmt, pages = kv_format(name, s.head_dim, s.rope, s.index_dim), 3 + 2 * s.chosen // entries

    def filled(record: Record, pages: int, entries: int) -> RecordPool:
        pool = RecordPool(record, pages, entries, m.device)
        x = m.normal(pages * entries, s.head_dim, dtype=torch.float32) * m.normal(pages * entries, 1).float().exp()
        pool.write(torch.arange(pages * entries, device=m.device), record.encode(x))
        return pool

    ring, pool = filled(fmt.window, s.rows + 1, s.window), filled(fmt.latent, pages, entries)
    newest, reach = m.integers(0, 10 * s.window, s.rows, 1), s.window - 1
    newest[2:3] = s.window // 3
    request = torch.randperm(s.rows, generator=m.generator, device=m.device)[:, None]
    back = torch.arange(reach, device=m.device) - reach
    prior = (request * s.window + (newest + back) % s.window).flatten()
    step_rows = fmt.window.encode(m.normal(s.rows, s.head_dim, dtype=torch.float32))
    own = torch.arange(s.rows, device=m.device)[:, None]
    window_index = torch.cat([own * reach + torch.arange(reach, device=m.device), s.rows * reach + own], 1)
    window_index[:, :reach][newest + back < 0] = -1
    slots = m.integers(-1, pages * entries, s.rows, s.chosen)
    slots[:, s.chosen * 3 // 4 :] = -1
    slots[1:2] = -1
    q, sink = m.normal(s.rows, s.heads, s.head_dim), m.normal(s.heads, dtype=torch.float32)
    keys, scale = kernels.window_keys(ring, prior, step_rows), s.head_dim**-0.5
    wanted_keys = REFERENCE.window_keys(ring, prior, step_rows)
    for which, chosen in ((pool, slots), (pool, torch.full_like(slots, -1)), (None, None)):
        found = kernels.attend(q, keys, window_index, which, chosen, sink, scale)
        wanted = REFERENCE.attend(q.float(), wanted_keys, window_index, which, chosen, sink, scale)
        near(found.contiguous(), wanted.to(m.dtype), LIMIT[m.dtype])


def check_router(kernels: Any, m: Maker, s: Sizes) -> None:
    h, gate = m.normal(s.rows, s.hidden), m.normal(s.experts, s.hidden, scale=s.hidden**-0.5)
    bias = m.normal(s.experts, scale=0.1, dtype=torch.float32)
    for renormalise in (True, False):
        ids, weights = kernels.route(h, gate, bias, s.topk, 1.5, renormalise, 1.0)
        wanted_ids, wanted = REFERENCE.route(h, gate, bias, s.topk, 1.5, renormalise, 1.0)
        same = (ids == wanted_ids).all(1)
        assert same.double().mean() > 0.99
        near(weights[same], wanted[same], 1e-5)
    tied = torch.zeros(s.rows, s.hidden, device=m.device, dtype=m.dtype)
    ids, _ = kernels.route(tied, gate, torch.zeros_like(bias), s.topk, 1.5, True, 1.0)
    assert (ids == torch.arange(s.topk, device=m.device)).all()


def check_experts(kernels: Any, m: Maker, s: Sizes, local: int, first: int, fp8: bool = False) -> None:
    """fp8: the products take FP8 inputs, which costs nothing where inputs are rounded anyway."""
    h = m.normal(s.rows, s.hidden)
    ids = torch.rand(s.rows, s.experts, generator=m.generator, device=m.device).argsort(1)[:, : s.topk]
    weights = m.normal(s.rows, s.topk, dtype=torch.float32).abs()
    own = experts(m, s, local, first)
    packed, values = kernels.pack_experts(own), values_of(own, m.dtype)
    for rounded in (False, True):
        found = kernels.experts(h, ids, weights, packed, 10.0, rounded)
        # A value that lands on the next e4m3 code is off by up to 1/16, and sums in another order move some there.
        limit = (5 if rounded else 2) * LIMIT[m.dtype]
        if fp8 and not rounded:
            limit = 7e-2  # e4m3 keeps four bits: 2.6e-2 of a value, and two products and SwiGLU add up
        near(found, REFERENCE.experts(h, ids, weights, values, 10.0, rounded), limit)
        found = kernels.experts(h, ids, weights, packed, 10.0, rounded, h)
        near(found, REFERENCE.experts(h, ids, weights, values, 10.0, rounded, h), limit)
        if rounded:  # rows that another rank has rounded
            sent = kernels.rounded(h).clone()
            assert torch.equal(kernels.experts(sent, ids, weights, packed, 10.0, rounded, h, True), found)
