"""From logits to tokens, on rank 0: each row [vocab] of a step's sampled rows with its `SampleSpec`.

Order: logit bias, grammar, banned ids, penalties, then greedy choice or temperature, min-p, top-k, top-p and a draw.
The draw takes the token with the largest log-probability plus Gumbel noise, and the noise is a hash of (seed, step,
token id). So a token depends on its own row, seed and step alone: neither the batch nor the device changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paraflash.engine.messages import Int32, Sampled, SampleSpec, TokenLogprobs

NEVER = -torch.inf
_MAX_SCALE = 1e30  # of repetition penalties: a logit times it is finite, so that no allowed token becomes NEVER
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64: the step of the SplitMix64 stream
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class BadLogits(RuntimeError):
    """A row of logits holds NaN or +inf, or the request's own settings leave no token to choose."""


def sample(logits: Tensor, specs: Sequence[SampleSpec], vocab_size: int) -> list[Sampled]:
    """Chooses one token per row.

    logits: float32 [n, V] with V >= vocab_size, not changed; columns past vocab_size are padding. Raises `BadLogits`.
    """
    raw = logits[:, :vocab_size]
    check_finite(raw)
    scores = raw
    if any(_changes_scores(spec) for spec in specs):
        scores = raw.clone()
        for row, spec in zip(scores, specs, strict=True):
            if _changes_scores(spec):
                _apply_request_rules(row, spec)
    drawn = [i for i, spec in enumerate(specs) if spec.temperature > 0]
    tokens = scores.argmax(dim=-1)  # the lowest id among equals
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [specs[i] for i in drawn])
    ids = tokens.tolist()
    wanted = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
    found: dict[int, TokenLogprobs] = {}
    if wanted:
        tops = [specs[i].logprobs or 0 for i in wanted]
        found = dict(zip(wanted, _logprobs(raw[wanted], tokens[wanted], tops), strict=True))
    return [Sampled(token, found.get(i)) for i, token in enumerate(ids)]


def prompt_logprobs(logits: Tensor, targets: Tensor, top: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens: float32 [n, V] and int64 [n] -> one entry per row with `top` best ids."""
    check_finite(logits)
    return _logprobs(logits, targets, [top] * len(logits))


def check_finite(logits: Tensor) -> None:
    """Raises `BadLogits` for NaN or +inf; -inf is a token that is never chosen."""
    if len(logits) == 0:
        return
    best = logits.amax(dim=-1)  # NaN wins a maximum
    bad = ~torch.isfinite(best)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise BadLogits(f"the logits of row {row} have the maximum {best[row].item()}; the model's output is broken")


def _logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax of the logits as the model gave them; rank 1 is the best token."""
    if len(logits) == 0:
        return []
    norm = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    ranks = ((logits > own).sum(dim=-1) + 1).tolist()
    values = (own - norm)[:, 0].tolist()
    best, ids = logits.topk(min(max(tops), logits.shape[1]), dim=-1)
    top_values, top_ids = (best - norm).tolist(), ids.tolist()
    return [
        TokenLogprobs(token, values[i], ranks[i], top_ids[i][: tops[i]], top_values[i][: tops[i]])
        for i, token in enumerate(tokens.tolist())
    ]


def _penalised(spec: SampleSpec) -> bool:
    return spec.presence_penalty != 0 or spec.frequency_penalty != 0 or spec.repetition_penalty != 1


def _changes_scores(spec: SampleSpec) -> bool:
    return bool(spec.logit_bias) or spec.bitmask is not None or spec.banned_ids is not None or _penalised(spec)


def _apply_request_rules(row: Tensor, spec: SampleSpec) -> None:
    """Bias, grammar, banned ids and penalties on one row [vocab], in place."""
    device = row.device
    if spec.logit_bias:
        ids = torch.tensor(list(spec.logit_bias), device=device)
        row[ids] += torch.tensor(list(spec.logit_bias.values()), dtype=row.dtype, device=device)
    if spec.bitmask is not None:
        row.masked_fill_(~unpack_bitmask(spec.bitmask, len(row)).to(device), NEVER)
    if spec.banned_ids is not None:
        banned = torch.from_numpy(spec.banned_ids).long().to(device)
        kept = row.clone()
        kept[banned] = NEVER
        # A grammar that has come to its end allows only the stop tokens that `min_tokens` bans: the grammar wins.
        if kept.max() > NEVER:
            row.copy_(kept)
    if _penalised(spec):
        _apply_penalties(row, spec)
    if row.max() == NEVER:
        raise BadLogits("the request's grammar and bias allow no token at all")


def unpack_bitmask(bitmask: Int32, vocab_size: int) -> Tensor:
    """int32 [ceil(vocab / 32)] -> bool [vocab]; token i is bit i % 32 of word i // 32."""
    bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), bitorder="little", count=vocab_size)
    return torch.from_numpy(bits.astype(bool))


def _apply_penalties(row: Tensor, spec: SampleSpec) -> None:
    """Repetition counts prompt and output, presence and frequency the output alone; `history` holds both."""
    if spec.history is None:
        raise ValueError("a penalty is set but SampleSpec.history is missing")
    history = torch.from_numpy(spec.history).long().to(row.device)
    seen = torch.zeros_like(row, dtype=torch.bool)
    seen[history] = True
    scale = min(max(spec.repetition_penalty, 1 / _MAX_SCALE), _MAX_SCALE)
    row.copy_(torch.where(seen, torch.where(row > 0, row / scale, row * scale), row))
    counts = torch.bincount(history[spec.prompt_len :], minlength=len(row)).to(row.dtype)
    row -= spec.frequency_penalty * counts
    row -= spec.presence_penalty * (counts > 0)


def _draw(scores: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Rows with a temperature above 0: [n, vocab] -> token ids int64 [n]."""
    device = scores.device
    scores = scores / torch.tensor([[spec.temperature] for spec in specs], dtype=scores.dtype, device=device)
    if any(spec.min_p > 0 for spec in specs):
        # p >= min_p * p_max, in logs; min_p 0 gives -inf, which keeps all.
        floor = torch.tensor([[spec.min_p] for spec in specs], dtype=scores.dtype, device=device).log()
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor, NEVER)
    cut = [i for i, spec in enumerate(specs) if spec.top_k > 0 or spec.top_p < 1]
    if cut:
        scores[cut] = _cut_tail(scores[cut], [specs[i] for i in cut])
    return (scores.double() + gumbel_noise(specs, scores.shape[1], device)).argmax(dim=-1)


def _cut_tail(scores: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Keeps the top_k best tokens, and of those the fewest whose probability reaches top_p; the rest become -inf."""
    device, vocab = scores.device, scores.shape[1]
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)  # among equals the lower id comes first
    top_k = torch.tensor([[spec.top_k if spec.top_k > 0 else vocab] for spec in specs], device=device)
    ordered = ordered.masked_fill(torch.arange(vocab, device=device) >= top_k, NEVER)
    probs = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probs.cumsum(dim=-1) - probs
    top_p = torch.tensor([[spec.top_p] for spec in specs], dtype=torch.float64, device=device)
    drop = (before >= top_p) & (top_p < 1)
    drop[:, 0] = False
    return torch.empty_like(scores).scatter_(1, ids, ordered.masked_fill(drop, NEVER))


def gumbel_noise(specs: Sequence[SampleSpec], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """float64 [n, vocab] standard Gumbel noise: element (i, t) is a hash of (specs[i].seed, specs[i].step, t).

    Each row is a SplitMix64 stream that starts at a hash of seed and step.
    """
    seeds = torch.tensor([[_int64(spec.seed)] for spec in specs], device=device)
    steps = torch.tensor([[spec.step] for spec in specs], device=device)
    start = _mix(_mix(seeds + _GOLDEN) ^ (steps * _GOLDEN))
    bits = _mix(start + torch.arange(1, vocab + 1, device=device) * _GOLDEN)
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53  # in (0, 1), both ends excluded
    return -(-uniform.log()).log()


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: int64 with wrap-around -> int64."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
