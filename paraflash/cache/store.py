"""All state that lives across steps on one rank: paged compressed KV and index keys, windows, open ratio-2 rows.

Everything here is the same on every PCP and TP rank (one latent is shared by all heads). A block id addresses 64
tokens in the pools of all KV owners alike: 64 entries at ratio 1, 32 at ratio 2. Block 0 is never handed out.
"""

from __future__ import annotations

import hashlib

import torch

from paraflash.cache.pool import Arena, RecordPool
from paraflash.cache.records import KVFormat, PlainRecord
from paraflash.config.model import ModelConfig


def block_bytes(model: ModelConfig, fmt: KVFormat, block_size: int) -> int:
    """Bytes of one block over all KV owners: latents and index keys."""
    return sum(
        record.page_bytes(block_size // layer.ratio) for layer in model.kv_owners for record in (fmt.latent, fmt.index)
    )


def window_bytes(model: ModelConfig, fmt: KVFormat) -> int:
    """Bytes of one request's windows over all layers and its open ratio-2 rows."""
    windows = model.num_layers * fmt.window.page_bytes(model.window)
    return windows + sum(8 * model.head_dim for layer in model.kv_owners if layer.ratio == 2)


class KVCache:
    """latents, index_keys: pool per KV owner. rings: pool per layer, one page per slot. open_rows: fp32
    [slots, 2 * head_dim] per ratio-2 owner, the [kv | score] row of a request's newest unpaired token. Behind the
    slots of requests lie spare ones, which like the null block take what belongs to no request."""

    def __init__(
        self,
        model: ModelConfig,
        fmt: KVFormat,
        num_blocks: int,
        block_size: int,
        slots: int,
        device: torch.device,
        spare_rows: int = 0,
        spare_slots: int = 0,
    ):
        """With spare_rows, plain latents of all owners share one arena with room for so many rows of a step."""
        self.format, self.num_blocks, self.block_size = fmt, num_blocks, block_size
        self.spare_slots = spare_slots
        slots += spare_slots
        owners = model.kv_owners
        arena = None
        if spare_rows and isinstance(fmt.latent, PlainRecord):
            arena = Arena(fmt.latent, sum(num_blocks * (block_size // o.ratio) for o in owners), spare_rows, device)
        self.latents = {
            o.index: RecordPool(fmt.latent, num_blocks, block_size // o.ratio, device, arena) for o in owners
        }
        self.index_keys = {o.index: RecordPool(fmt.index, num_blocks, block_size // o.ratio, device) for o in owners}
        self.rings = [RecordPool(fmt.window, slots, model.window, device) for _ in model.layers]
        self.open_rows = {
            o.index: torch.zeros(slots, 2 * model.head_dim, dtype=torch.float32, device=device)
            for o in owners
            if o.ratio == 2
        }

    def _parts(self) -> list[torch.Tensor]:
        pools = [*self.latents.values(), *self.index_keys.values(), *self.rings]
        return [p.storage for p in pools] + list(self.open_rows.values())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._parts())

    def digest(self) -> str:
        """Hash of every byte that belongs to requests; equal on all PCP ranks after each step."""
        h = hashlib.blake2b(digest_size=16)
        paged = [p.storage[1:] for p in (*self.latents.values(), *self.index_keys.values())]
        by_slot = [p.storage for p in self.rings] + list(self.open_rows.values())
        for part in paged + [x[: len(x) - self.spare_slots] for x in by_slot]:
            h.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()
