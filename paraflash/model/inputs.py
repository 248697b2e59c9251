"""All that a step's forward pass reads besides weights, caches and Engram rows, as one value and as one tensor.

`Inputs` is built on the host. `Packed` lays its int64 tensors [n] back to back, so that they go to the device in one
copy, and gives the same value with views of any such copy. Its `signature` holds everything else that the forward pass
can see (shapes and numbers): passes of one signature differ in nothing but the content of the copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paraflash.cache.window import Span
from paraflash.model.batch import LocalBatch, Trailing
from paraflash.parallel.exchange import Outbox, RowGather

ALIGNED = 16  # views begin at multiples of so many numbers: kernels are compiled for aligned addresses


@dataclass
class Inputs:
    token_ids: Tensor  # [T]
    batch: LocalBatch
    trailing: Trailing | None
    step: tuple[tuple[int, ...], ...] = ()  # see `step_shape`


def step_shape(spans: Sequence[Span], kept: Sequence[int], window: int) -> tuple[tuple[int, ...], ...]:
    """What the shapes on any rank follow from in a step of whole blocks of prompts, beside the bounds that all ranks
    share. In the signature of every rank it makes a step new to all ranks or to none, as it is without it in a padded
    decode step, whose shapes follow from the number of rows and those bounds."""
    return tuple(
        (
            *(s.length, k, min(s.start, window), min(s.start - s.window_start, window)),
            max(0, min(s.write_start, s.end) - s.start),
        )
        for s, k in zip(spans, kept, strict=True)
    )


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` that the host does not wait for."""
    if device.type == "cuda" and not host.is_pinned():
        host = host.pin_memory()  # a copy from other memory waits for all that the GPU still has to do
    return host.to(device, non_blocking=True)


class Packed:
    """`inputs`, whose tensors are int64 on the host."""

    def __init__(self, inputs: Inputs, pinned: bool = False):
        """pinned: for copies to a GPU (see `to_device`)."""
        leaves: list[Tensor] = []
        notes: list[Hashable] = []
        _collect(inputs, leaves, notes)
        self._inputs, self._places = inputs, dict[int, tuple[int, Tensor]]()  # by id: one in two fields is there once
        size = 0
        for x in leaves:
            if id(x) not in self._places:
                self._places[id(x)] = (size, x)
                size += -(-x.numel() // ALIGNED) * ALIGNED
        self.signature = tuple(notes)
        self.host = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        into = self.host.numpy()
        for at, x in self._places.values():
            into[at : at + x.numel()] = x.numpy().reshape(-1)

    def sent_to(self, device: torch.device) -> Inputs:
        """The inputs in a copy of their own on `device`."""
        return self.on(to_device(self.host, device))

    def on(self, buffer: Tensor) -> Inputs:
        """The inputs as views of `buffer`, a copy of `host`."""
        views = {key: buffer[at : at + x.numel()].view(x.shape) for key, (at, x) in self._places.items()}
        found: Inputs = _rebuilt(self._inputs, views)
        return found


_SEEN: dict[type, tuple[str, ...]] = {}


def _seen_fields(kind: type) -> tuple[str, ...]:
    """What a forward pass may look at in a dataclass; nothing of other types."""
    if kind not in _SEEN:
        shown = fields(kind) if is_dataclass(kind) else ()
        _SEEN[kind] = tuple(f.name for f in shown if not f.metadata.get("host_only"))
    return _SEEN[kind]


def _collect(value: Any, leaves: list[Tensor], notes: list[Hashable]) -> None:
    """Adds the tensors in `value` to leaves, in a fixed order, and what else a forward pass may look at to notes."""
    kind = type(value)
    if kind is Tensor:
        notes.append(value.shape)
        leaves.append(value)
    elif kind is RowGather:
        notes.append(value.counts)
    elif kind is Outbox:
        notes.append(Outbox)
    elif kind is dict:
        notes.append(tuple(value))
        for x in value.values():
            _collect(x, leaves, notes)
    elif seen := _seen_fields(kind):
        for name in seen:
            _collect(getattr(value, name), leaves, notes)
    else:
        notes.append(value)


def _rebuilt(value: Any, views: Mapping[int, Tensor]) -> Any:
    """`value` with views[id(x)] for each tensor x in it."""
    if isinstance(value, Tensor):
        return views[id(value)]
    if isinstance(value, Outbox):
        return Outbox()  # a pass of its own fills one of its own
    if isinstance(value, dict):
        return {key: _rebuilt(x, views) for key, x in value.items()}
    seen = _seen_fields(type(value))
    return replace(value, **{name: _rebuilt(getattr(value, name), views) for name in seen}) if seen else value
