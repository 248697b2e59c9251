"""Optional GPU packages: looked up once, with the reason where one is missing, and the one place that knows versions.

FlashMLA brings sparse attention (64 or 128 heads), DeepGEMM the index logits, humming FP4 expert products. Everything
also runs without them, on Triton and PyTorch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

log = logging.getLogger("paraflash.kernels")


@dataclass
class Packages:
    """sparse_attention(q, kv, indices, scale, sink, lengths) -> o; paged_attention: see `_paged_attention`;
    index_logits(q, k, k_scale, w, start, end, width) -> fp32 [T, >= width], column 0 at a row's own start; humming: the
    module. None where not available."""

    sparse_attention: Callable[..., Tensor] | None = None
    paged_attention: Callable[..., Tensor] | None = None
    index_logits: Callable[..., Tensor] | None = None
    humming: Any = None
    notes: dict[str, str] = field(default_factory=dict)  # package -> version, or why it is not used


def _load(name: str, module: str, notes: dict[str, str]) -> Any:
    try:
        found = importlib.import_module(module)
        notes[name] = importlib.metadata.version(name)
        return found
    except Exception as error:  # a package built for another torch fails in many ways; each means "not available"
        notes[name] = f"not used ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        return None


def find_packages() -> Packages:
    """Imports what is there. Never raises; `notes` says what happened."""
    found = Packages()
    flash = _load("sgl-flash-mla", "flash_mla", found.notes)
    if flash is not None and flash.has_legacy():
        found.sparse_attention = _sparse_attention(flash)
        found.paged_attention = _paged_attention(flash)
    gemm = _load("sgl-deep-gemm", "deep_gemm", found.notes)
    if gemm is not None:
        found.index_logits = _index_logits(gemm, found.notes)
    found.humming = _load("humming-kernels", "humming.layer", found.notes)
    return found


def _sparse_attention(flash: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor, lengths: Tensor) -> Tensor:
        return flash.flash_mla_sparse_fwd(
            q, kv, indices, scale, 512, sink, lengths, use_legacy=True, return_log2_lse=False
        )[0]

    return run


def _paged_attention(flash: Any) -> Callable[..., Tensor]:
    """run(q, pages, index, more_pages, more_index, scale, sink) -> o [T, 64, 512]: q [T, 64, 512] bf16 over 584-byte
    records, pages [n, entries, 1, 584] uint8 by index [T, k] int32 (-1: none, k a multiple of 64), and more_pages by
    more_index likewise or None.

    How the kernel shares its work out over the GPU depends on shapes alone as long as no lengths are given. The package
    finds it out on the device at a first call; it is kept for all later ones. A CUDA graph that is captured before that
    finds it out anew each time: what a capture writes is not there until it is replayed.
    """
    plans: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def run(
        q: Tensor,
        pages: Tensor,
        index: Tensor,
        more_pages: Tensor | None,
        more_index: Tensor | None,
        scale: float,
        sink: Tensor,
    ) -> Tensor:
        shapes = (q.device, len(q), index.shape[1], None if more_index is None else more_index.shape[1])
        plan, _ = flash.get_mla_metadata()
        known = plans.get(shapes)
        if known is not None:
            plan.tile_scheduler_metadata, plan.num_splits = known
        o, _ = flash.flash_mla_with_kvcache(
            q.unsqueeze(1),
            pages,
            None,
            None,
            512,
            plan,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=index.unsqueeze(1),
            attn_sink=sink,
            extra_k_cache=more_pages,
            extra_indices_in_kvcache=None if more_index is None else more_index.unsqueeze(1),
            use_legacy=True,
        )
        if known is None and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            plans[shapes] = plan.tile_scheduler_metadata, plan.num_splits
        return cast(Tensor, o.squeeze(1))

    return run


def _index_logits(gemm: Any, notes: dict[str, str]) -> Callable[..., Tensor] | None:
    """0.1.x and 0.2.x name and order the arguments differently; both can give rows that begin at their own start."""
    old = getattr(gemm, "fp8_mqa_logits", None)
    if notes["sgl-deep-gemm"].startswith("0.1.") and old is not None:
        return lambda q, k, s, w, a, b, width: old(q, (k, s), w, a, b, clean_logits=False, max_seqlen_k=width)
    new = getattr(gemm, "fp8_fp4_mqa_logits", None)
    if new is not None:
        return lambda q, k, s, w, a, b, width: new((q, None), (k, s), w, a, b, max_seqlen_k=width)
    notes["sgl-deep-gemm"] += ", not used (no fp8 MQA logits)"
    return None
