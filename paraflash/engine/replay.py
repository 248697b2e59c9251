"""Bounded replay as the scheduler sees it: how far a prefix hit goes back, and which rows the decoder layers need.

The layers after the last KV owner (the decoder) leave nothing behind but sliding windows. So of a prompt's chunk only
the trailing window goes through them, and none of it where the next chunk is longer than a window: that one's decoder
windows start inside it, and nobody reads earlier ones (model.md 5.2).

    window 4, chunks of 6, 6, 3 rows, all of one prompt; kept rows as K, dropped ones as a dot

    ......|..KKKK|KKK     the second chunk keeps its window because the third is short and reads back into it
"""

from __future__ import annotations

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig


def rewind_rows(config: EngineConfig, model: ModelConfig) -> int:
    """How many rows before the end of a prefix hit are run again to rebuild the sliding windows.

    With bounded replay one window, as model.md 5.1 defines. Without, all that can reach the windows at the hit's end:
    a window latent of layer l depends on the windows below it, W-1 rows further back a layer.
    """
    return model.window if config.swa_bounded_replay else model.num_layers * (model.window - 1)


def drops_rows(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether prompt rows may leave out the decoder: it is wanted, there is a decoder, and no Engram layer in it."""
    owner = model.last_kv_owner
    decoder = [layer for layer in model.layers if layer.index > owner]
    return (
        bool(config.swa_bounded_replay)
        and owner >= 0
        and bool(decoder)
        and max(model.engram_layers, default=-1) < owner
    )


def certain_rows(config: EngineConfig) -> int:
    """Rows that the oldest prompt gets in every step, however many requests decode beside it.

    Any prompt is the oldest in the end, so one that waits for as many rows does not wait for ever.
    """
    rows = (config.max_num_batched_tokens or 0) - (config.max_num_seqs or 0) + 1
    threshold = config.long_prefill_token_threshold
    return min(rows, threshold) if threshold > 0 else rows


def kept_rows(rows: int, rest: int, window: int, certain: int) -> int:
    """Trailing rows of a prompt's chunk of `rows` rows that go through the decoder; `rest` rows of it come after.

    None, if the next chunk can be made longer than the window; the scheduler must then make it so.
    """
    return 0 if min(rest, certain) > window else min(rows, window)
