"""The two builders of a rank's view of a step against each other: a decode step planned from arrays by
`build_decode_batch` must be, in every field, the step that `build_batch` plans from its requests like any other.

All fields are compared as they are, new ones too, but for those of `BY_MEANING`. There the shapes of a decode step
follow from the number of its rows, so what the fields *say* is compared: which ring rows, step rows and open rows a row
reads, and which row every slot is left with. `what_shapes_cost` states all that may differ then:

- a step is filled up with rows of no request: at position 0, in a spare slot and in block 0, the null block
- every row makes an entry; one that is not to be written goes to slot 0, in the null block
- at ratio 2 every row leaves an open row; one that is not to be kept goes to the spare slot

What is fetched for a row and not wanted is checked by `assert_fetched`. Both deal rows to ranks in the same order.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paraflash.cache.window import Span
from paraflash.config.model import ModelConfig, load_config
from paraflash.engine.decode_step import decode_step, padded_rows
from paraflash.engine.messages import StepRequest, columns_of
from paraflash.engine.step_rows import spans_of
from paraflash.kernels.interface import IndexRows
from paraflash.model.batch import Entries, LocalBatch, Pairs, Windows, build_batch, plan_of
from paraflash.model.decode_batch import build_decode_batch, dealt
from paraflash.parallel.mesh import Group, Mesh
from paraflash.parallel.plan import Plan, own_part

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"
BLOCK = 64
SLOTS = 12
SPARE = SLOTS  # slot of no request
NULL = np.zeros(1, np.int64)  # a block table of the null block alone
BY_MEANING = re.compile(
    r"plan|windows\.(prior_slots|table|row_start|tail_rows|tail_slots)"
    r"|entries\.\d\.(rows|positions|slots|own_slots|gather\.(counts|local|padded|total|_full))"
    r"|entries\.\d\.pairs\.(gather\.(counts|local|padded|total|_full)|open_slots|send_rows|first|second)"
    r"|entries\.\d\.pairs\.(keep_rows|keep_slots)"
)


@dataclass
class Step:
    """What a builder makes of a step: the batch of each rank, and of which request (by its number) each rank's rows
    are. Rows that fill up come with the numbers after the requests."""

    batches: list[LocalBatch]
    local: list[list[int]]


@cache
def model_of(ratios: tuple[int, ...], owners: tuple[int, ...], window: int, topk: int) -> ModelConfig:
    schedule = {
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "kv_source_layer_ids": list(owners),
        "index_source_layer_ids": list(owners),
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    return load_config(NARROW, {"text_config": schedule | {"sliding_window": window, "index_topk": topk}})


def rank_of(world: int, rank: int) -> Mesh:
    return Mesh(rank, Group("tp", 1, 0), Group("pcp", world, rank), torch.device("cpu"))


def usual_step(spans: Sequence[Span], model: ModelConfig, world: int) -> Step:
    plan = plan_of(spans, world)
    batches = [build_batch(spans, plan, model, rank_of(world, r), BLOCK) for r in range(world)]
    return Step(batches, [rows.tolist() for rows in plan.rows])


def planned_step(requests: list[StepRequest], rows: int, model: ModelConfig, world: int) -> Step:
    step = decode_step(columns_of(requests), rows, SPARE, BLOCK)
    batches = [build_decode_batch(step, model, rank_of(world, r), BLOCK, SPARE) for r in range(world)]
    counts, order = dealt(rows, world)
    return Step(batches, [order[own_part(counts, r)].tolist() for r in range(world)])


def filled(spans: Sequence[Span], rows: int) -> list[Span]:
    """The same with requests in the place of the rows that fill up."""
    return [*spans, *(Span(SPARE, 0, 1, False, 0, 0, NULL) for _ in range(rows - len(spans)))]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All fields in `value`, however deep, by their path."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield path, (type(value), value.dtype, tuple(value.shape), value.tolist())
    elif isinstance(value, dict) or (hasattr(value, "__dict__") and not isinstance(value, (ModelConfig, Group, Plan))):
        parts = value if isinstance(value, dict) else vars(value)
        names = [f.name for f in fields(value)] if is_dataclass(value) else list(parts)
        yield path, (type(value), names)
        for name in names:
            yield from leaves(parts[name], f"{path}.{name}".removeprefix("."))
    else:
        yield path, value


def assert_same_fields(found: Any, wanted: Any) -> None:
    either = [{p: x for p, x in leaves(value) if not BY_MEANING.fullmatch(p)} for value in (found, wanted)]
    for path in sorted({*either[0], *either[1]}):
        assert either[0].get(path, "missing") == either[1].get(path, "missing"), path


def at(names: Sequence[Any], index: Tensor) -> list[Any]:
    assert all(0 <= i < len(names) for i in index.flatten().tolist()), "points behind the rows"
    return [names[i] for i in index.tolist()]


def received(step: Step, rank: int, parts: Sequence[Windows | Pairs]) -> list[int]:
    """Rows [ local | sent by all ranks ] on a rank; parts: what says what each rank sends."""
    counts = tuple(len(part.send_rows) for part in parts)
    assert all(part.gather.counts == counts for part in parts)
    return step.local[rank] + [
        row for rows, part in zip(step.local, parts, strict=True) for row in at(rows, part.send_rows)
    ]


def linked_entries(e: Entries, rows: list[int]) -> list[tuple[int, int, Any]]:
    """Of each entry that a rank makes: the row of its last token, the position of its first one, the pair it is of."""
    pairs: list[Any] = [None] * len(e.rows)
    if e.pairs is not None:  # whose rows are local or open: requests are not split, and the outbox leaves later
        linked = [("open", slot) for slot in e.pairs.open_slots.tolist()] + rows
        pairs = list(zip(at(linked, e.pairs.first), at(linked, e.pairs.second), strict=True))
    return list(zip(at(rows, e.rows), e.positions.tolist(), pairs, strict=True))


def meaning(step: Step, rank: int) -> dict[str, Any]:
    """What the fields of `BY_MEANING` say: `reads` of each row, and else pairs of a slot and what it is left with."""
    b, mine = step.batches[rank], step.local[rank]
    w = b.windows
    keys = [("ring", slot) for slot in w.prior_slots.tolist()] + mine + [None]
    table = torch.where(w.table == -1, len(keys) - 1, w.table)
    index = table[w.row_start[:, None] + torch.arange(w.window)]
    rows = received(step, rank, [x.windows for x in step.batches])
    found: dict[str, Any] = {
        "reads": [(row, at(keys, window)) for row, window in zip(mine, index, strict=True)],
        "ring": list(zip(w.tail_slots.tolist(), at(rows, w.tail_rows), strict=True)),
    }
    for ratio, e in b.entries.items():
        every = [linked_entries(x.entries[ratio], of) for x, of in zip(step.batches, step.local, strict=True)]
        assert e.gather.counts == tuple(len(made) for made in every)
        found[f"pool {ratio}"] = list(zip(e.slots.tolist(), [x for made in every for x in made], strict=True))
        found[f"own pool {ratio}"] = list(zip(e.own_slots.tolist(), every[rank], strict=True))
        if e.pairs is not None:
            sent: list[Any] = [x.entries[ratio].pairs for x in step.batches]
            kept = at(received(step, rank, sent), e.pairs.keep_rows)
            found["open"] = list(zip(e.pairs.keep_slots.tolist(), kept, strict=True))
    return {name: sorted(said, key=str) for name, said in found.items()}


def what_shapes_cost(spans: Sequence[Span], count: int, mine: Sequence[int], model: ModelConfig) -> dict[str, Any]:
    """What a decode step's `meaning` has beyond that of its first `count` rows, which are of requests."""
    fills = range(count, len(spans))
    found: dict[str, Any] = {
        "reads": [(row, [None] * (model.window - 1) + [row]) for row in mine if row in fills],
        "ring": [(SPARE * model.window, row) for row in fills if model.window > 1],
    }
    for ratio in {layer.ratio for layer in model.layers} - {0}:
        idle = {}  # entries that are not to be written, by row
        for row, s in enumerate(spans):
            even = s.start % 2 == 0
            if row in fills or s.start < s.write_start or (ratio == 2 and even):
                pair = None if ratio == 1 else (row if even else ("open", s.slot), row)
                idle[row] = (0, (row, s.start // ratio * ratio, pair))
        found[f"pool {ratio}"] = list(idle.values())
        found[f"own pool {ratio}"] = [idle[row] for row in mine if row in idle]
        if ratio == 2:
            found["open"] = [(SPARE, row) for row, s in enumerate(spans) if row in fills or s.start % 2]
    return found


def of_requests(rows: IndexRows, own: int, count: int) -> IndexRows:
    """The same without rows and requests that fill up, which come last, and without the bound `total`."""
    rows = replace(rows, segments=rows.segments[:own], visible=rows.visible[:own], total=0)
    rows = replace(rows, visible_host=rows.visible_host[:own], row_request=rows.row_request[:own])
    return replace(rows, block_tables=rows.block_tables[:count], counts=rows.counts[:count], starts=rows.starts[:count])


def assert_fetched(batch: LocalBatch, mine: Sequence[Span], window: int) -> None:
    """All W-1 ring rows before each row and an open row, wanted or not, are of its request or of the spare slot."""
    before = [s.slot * window + p % window for s in mine for p in range(s.start - window + 1, s.start)]
    assert batch.windows.prior_slots.tolist() == before
    for e in batch.entries.values():
        if e.pairs is not None:
            assert e.pairs.open_slots.tolist() == [s.slot if s.start % 2 else SPARE for s in mine]


def compare(found: Step, requests: list[StepRequest], rows: int, model: ModelConfig, world: int) -> None:
    spans, count = spans_of(requests), len(requests)
    alone, full = usual_step(spans, model, world), usual_step(filled(spans, rows), model, world)
    assert found.local == full.local
    assert [[row for row in local if row < count] for local in found.local] == alone.local
    for rank, (batch, mine) in enumerate(zip(found.batches, found.local, strict=True)):
        assert_same_fields(batch, full.batches[rank])
        assert batch.plan is None, "of use to prompts only"
        wanted, more = meaning(alone, rank), what_shapes_cost(filled(spans, rows), count, mine, model)
        assert wanted.keys() == more.keys()
        assert meaning(found, rank) == {name: sorted(wanted[name] + more[name], key=str) for name in wanted}
        assert_fetched(batch, [filled(spans, rows)[row] for row in mine], model.window)
        own = len(alone.local[rank])
        assert batch.positions[:own].tolist() == [spans[row].start for row in alone.local[rank]]
        for ratio, index in alone.batches[rank].index_rows.items():
            assert_same_fields(of_requests(batch.index_rows[ratio], own, count), of_requests(index, own, count))


MIXED = ((0, 2, 2, 1, 0, 1), (1, 2, 3))  # compress ratios by layer, and the layers that own entries
models = st.builds(
    lambda layers, window, topk: model_of(*layers, window, topk),
    st.sampled_from([((0, 0), ()), ((1, 0, 1), (0,)), ((0, 2, 2), (1, 2)), MIXED, MIXED]),
    st.sampled_from([1, 2, 5, 16, 128]),
    st.sampled_from([1, 8, 64, 512]),
)
near_borders = st.builds(lambda n, d: max(0, n + d), st.sampled_from([0, 64, 128, 192, 320]), st.integers(-2, 2))
rows_of_requests = st.tuples(
    near_borders | st.integers(0, 400),  # position
    st.sampled_from([0, 0, 1, 4, 20, 127]),  # how far before it the windows begin; 0: at position 0
    st.sampled_from(["none", "some", "all"]),  # which of its tokens' entries were there already
    st.integers(0, 2),  # blocks beyond the position's
)


def requests_of(rows: list[tuple[int, int, str, int]]) -> list[StepRequest]:
    none = np.zeros(0, np.int32)
    written = {"none": lambda p: 0, "some": lambda p: p // BLOCK * BLOCK, "all": lambda p: (p // BLOCK + 1) * BLOCK}
    return [
        StepRequest(
            request_id=str(i),
            slot=(7 * i + 3) % SLOTS,
            token_ids=np.array([5], np.int32),
            lookback=none,
            num_computed=position,
            is_prefill=False,
            block_ids=(1 + 20 * i + np.arange(position // BLOCK + 1 + more)[::-1]).astype(np.int32),
            kv_write_start=written[there](position),
            window_start=max(0, position - back) if back else 0,
        )
        for i, (position, back, there, more) in enumerate(rows)
    ]


@settings(max_examples=300, deadline=None)
@given(st.lists(rows_of_requests, min_size=1, max_size=SLOTS), models, st.sampled_from([1, 2, 4]), st.booleans())
def test_a_decode_step_from_arrays_is_the_step_that_its_requests_make(
    rows: list[tuple[int, int, str, int]], model: ModelConfig, world: int, fills: bool
) -> None:
    requests = requests_of(rows)
    count = padded_rows(len(rows), world) if fills else len(rows)
    compare(planned_step(requests, count, model, world), requests, count, model, world)


@pytest.mark.parametrize("world", [1, 2])
def test_no_number_of_a_batch_can_be_another_one_unseen(world: int) -> None:
    model = model_of((0, 2, 1), (1, 2), 3, 8)
    requests = requests_of([(70, 0, "some", 0), (5, 0, "none", 1), (66, 0, "all", 0)])
    step = copy.deepcopy(planned_step(requests, 4, model, world))  # arrays of one number each, none shared
    compare(step, requests, 4, model, world)

    def tensors(value: Any) -> Iterator[Tensor]:
        for x in value.values() if isinstance(value, dict) else vars(value).values():
            if isinstance(x, Tensor):
                yield x
            elif isinstance(x, (dict, Windows, Entries, Pairs, IndexRows)):
                yield from tensors(x)

    for x in [x for batch in step.batches for x in tensors(batch)]:
        for place in np.ndindex(*x.shape):
            x[place] += 1
            with pytest.raises((AssertionError, IndexError)):
                compare(step, requests, 4, model, world)
            x[place] -= 1
