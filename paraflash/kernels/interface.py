"""The operations a forward pass is made of; `reference` and `cuda` each implement all of them.

T = rows on this rank in this step (may be 0), K = residual streams, D = hidden size, H = local heads, d = head_dim.
"x dtype" is the activation dtype (fp32 or bf16); everything inside an operation is computed in fp32. The reference
reads like the formulas of model.md; every cuda operation is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paraflash.cache.pool import RecordPool
from paraflash.cache.records import Record

HOST_ONLY = {"host_only": True}  # metadata of dataclass fields that no recorded forward pass looks at


@dataclass
class Rotary:
    """cos and sin [n, rope/2] fp32 of n positions under one frequency rule (model.md 3.4)."""

    cos: Tensor
    sin: Tensor


@dataclass
class IndexRows:
    """Which compressed entries the rows of this rank may choose from, for one compress ratio.

    segments: (first row, end row, request) of rows that belong to one request, covering all T rows in order.
    visible: [T] int64, entries 0..visible-1 of its request a row may use. block_tables: [requests, blocks] int64,
    padded with 0. A row's entry e lies at slot block_tables[request, e // entries] * entries + e % entries.

    What varies from step to step is in tensors; `width` and `total` bound it from above in coarse steps, so that a
    recorded forward pass can run again with other tensors. `visible_host` is for kernels that are never recorded.
    """

    segments: tuple[tuple[int, int, int], ...]
    visible: Tensor
    visible_host: NDArray[np.int64] = field(metadata=HOST_ONLY)
    row_request: Tensor  # [T] int64
    block_tables: Tensor
    entries: int  # entries per block
    counts: Tensor  # [requests] int64, most entries that a row here of each request may use
    starts: Tensor  # [requests] int64, sum of the counts before each request
    width: int  # at least the largest of `counts`
    total: int  # at least the sum of `counts`


@dataclass
class Expert:
    """Local routed experts, stacked; `first` is the id of the first one. Tensors, or FP4 as stored (QuantTensor)."""

    w1: Any  # [E, I, D] gate
    w2: Any  # [E, D, I] down
    w3: Any  # [E, I, D] up
    first: int
    total: int  # routed experts of the model


class Kernels(Protocol):
    name: str
    stored: tuple[str, ...]  # kinds of quantised expert weights that `pack_experts` takes as stored
    why_no_fp8_linears: str  # empty where `pack_linear` keeps FP8 linears in one byte
    info: dict[str, str]  # what runs where there is a choice; state of optional packages

    def pack_linear(self, weight: Any) -> Any:
        """The form of an FP8 linear that `linear` takes: QuantTensor [out, in], of those that `one_byte` names
        (checkpoint/memory.py); called once, the weight may be given up after it. Not where `why_no_fp8_linears`."""

    def linear(self, x: Tensor, weight: Any, round_input: bool = False) -> Tensor:
        """x [T, in] @ weight [out, in]^T -> [T, out] in x dtype; round_input applies model.md 2.4 to x."""

    def linear_fp32(self, x: Tensor, weight: Any) -> Tensor:
        """As `linear` without rounding, fp32 product and result (router, ratio-2 compressor, head)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [.., n] -> x dtype (model.md 3.3)."""

    def hc_mixes(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iters: int, hc_eps: float, rms_eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, K, D] -> pre [T, K], post [T, K], comb [T, K, K], all fp32 (model.md 3.2)."""

    def hc_collapse(self, streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms(sum_k pre[k] * streams[k]) * weight -> [T, D] in x dtype (model.md 3.1)."""

    def hc_expand(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """post[k] * y + sum_j comb[j, k] * streams[j] -> [T, K, D] in x dtype (model.md 3.1)."""

    def rope(self, x: Tensor, rotary: Rotary, inverse: bool = False) -> Tensor:
        """Rotates adjacent pairs of the last rope channels of x [T, .., d] (model.md 3.4)."""

    def window_rows(
        self, kv: Tensor, weight: Tensor, eps: float, rotary: Rotary, record: Record, trained: bool
    ) -> Tensor:
        """Norm, rope, trained rounding, record: kv [T, d] -> bytes [T, record.nbytes] (model.md 3.6)."""

    def pool_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Ratio-2 pooling of fp32 rows [G, 2d] = [kv | score] of the two tokens -> fp32 [G, d] (model.md 3.7)."""

    def latent_rows(self, latent: Tensor, rotary: Rotary, record: Record, trained: bool) -> Tensor:
        """Rope, trained rounding, record: normed latents [G, d] -> bytes [G, record.nbytes] (model.md 3.7)."""

    def index_rows(
        self, latent: Tensor, wk: Any, weight: Tensor, eps: float, rotary: Rotary, record: Record, trained: bool
    ) -> Tensor:
        """Index keys of normed latents before rope: [G, d] -> bytes [G, record.nbytes] (model.md 3.8)."""

    def index_queries(self, q: Tensor, rotary: Rotary, trained: bool) -> Tensor:
        """Rope and trained rounding of index queries [T, heads, di] (model.md 3.9)."""

    def select_entries(
        self,
        q: Tensor,
        weights: Tensor,
        pool: RecordPool,
        rows: IndexRows,
        topk: int,
        scale: float,
        candidates: Any = None,
        publish: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Any]:
        """Top-k compressed entries of each row (model.md 3.9): q [T, heads, di], weights [T, heads] ->
        entries [T, topk] int64, -1 where fewer are allowed, ties to the lower index; and, with publish =
        (blocks, block size), the candidate set to hand to later layers as `candidates` (equal blocks: the newer)."""

    def window_keys(self, ring: RecordPool, prior_slots: Tensor, rows: Tensor) -> Any:
        """Keys of this step's windows: ring rows at prior_slots [n], then the step's own rows (bytes [m, nbytes])."""

    def attend(
        self,
        q: Tensor,
        keys: Any,
        window_index: Tensor,
        pool: RecordPool | None,
        slots: Tensor | None,
        sink: Tensor,
        scale: float,
    ) -> Tensor:
        """Sink attention of q [T, H, d] over window keys window_index [T, W] and pool slots [T, k] (-1: none)
        -> [T, H, d] in x dtype, before the inverse rope (model.md 3.10)."""

    def grouped_output(self, o: Tensor, wo_a: Tensor, round_input: bool) -> Tensor:
        """o [T, G, n] with wo_a [G, rank, n] -> [T, G * rank] in x dtype (model.md 3.10)."""

    def engram_write(self, streams: Tensor, u: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
        """Adds the gated value to all streams: streams [T, K, D], u [T, (K+1) * D] (model.md 3.12)."""

    def route(
        self, h: Tensor, gate: Tensor, bias: Tensor, topk: int, factor: float, renormalise: bool, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Expert ids [T, topk] int64 and weights fp32 (model.md 3.13)."""

    def pack_experts(self, experts: Expert) -> Any:
        """The form of a layer's experts that `experts` takes; called once, `experts` may be given up after it."""

    def experts(
        self,
        h: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Expert,
        limit: float,
        round_input: bool,
        more: Tensor | None = None,
        rounded: bool = False,
    ) -> Tensor:
        """Sum over the local routed experts of each row -> x dtype [T, D]; ids of other ranks add nothing (3.13).

        `more` [T, D] is added before the fp32 sum is rounded. rounded: h has been through `rounded` already.
        """

    def rounded(self, x: Tensor) -> Tensor:
        """x as a linear with `round_input` takes it, without a second rounding there (model.md 2.4)."""

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum of tensors of one shape and dtype, in order, each partial sum rounded to the dtype."""

    def swiglu(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        """silu(min(gate, limit)) * clamp(up, -limit, limit) in x dtype (model.md 3.13)."""
