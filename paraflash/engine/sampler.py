"""From logits to tokens, on rank 0: each row [vocab] of a step's sampled rows with its `SampleSpec`.

Order: logit bias, grammar, banned ids, penalties, then greedy choice or temperature, min-p, top-k, top-p and a draw.
The draw takes the token with the largest log-probability plus Gumbel noise, and the noise is a hash of (seed, step,
token id). So a token depends on its own row, seed and step alone: neither the batch nor the device changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paraflash.engine.messages import Int32, Sampled, SampleSpec, TokenLogprobs
from paraflash.model.inputs import to_device

NEVER = -torch.inf
_MAX_SCALE = 1e30  # of repetition penalties: a logit times it is finite, so that no allowed token becomes NEVER
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64: the step of the SplitMix64 stream
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class BadLogits(RuntimeError):
    """A row of logits holds NaN or +inf, or the request's own settings leave no token to choose."""


def sample(logits: Tensor, specs: Sequence[SampleSpec], vocab_size: int) -> list[Sampled]:
    """Chooses one token per row. Without rules on single tokens the host waits for the device once: for the tokens,
    the best logits and what else is reported.

    logits: float32 [n, V] with V >= vocab_size, not changed; columns past vocab_size are padding. Raises `BadLogits`.
    """
    raw = logits[:, :vocab_size]
    scores, ruled = raw, [(i, spec) for i, spec in enumerate(specs) if spec.has_rules]
    if ruled:
        check_finite(raw)
        scores = raw.clone()
        for i, spec in ruled:
            _apply_request_rules(scores[i], spec)
    best, tokens = scores.max(dim=-1)  # the lowest id among equals; NaN wins
    drawn = [i for i, spec in enumerate(specs) if spec.temperature > 0]
    if drawn:
        tokens = _on_rows(tokens, drawn, specs, lambda rows, own: _draw(_at(scores, rows), own))
    wanted = [i for i, spec in enumerate(specs) if spec.logprobs is not None]
    tops = [specs[i].logprobs or 0 for i in wanted]
    rows = _rows_index(wanted, len(specs), raw.device)
    reported = _measure(_at(raw, rows), _at(tokens, rows), max(tops)) if wanted else []
    ids, best, *numbers = _fetch([tokens, best, *reported])
    _refuse_broken(best)
    found = dict(zip(wanted, _report(numbers, tops), strict=True)) if wanted else {}
    return [Sampled(token, found.get(i)) for i, token in enumerate(ids.tolist())]


def _on_rows(
    tokens: Tensor,
    rows: list[int],
    specs: Sequence[SampleSpec],
    choose: Callable[[Tensor | None, list[SampleSpec]], Tensor],
) -> Tensor:
    """`tokens` [n] with those of some rows replaced by choose(rows, their specs)."""
    index = _rows_index(rows, len(specs), tokens.device)
    chosen = choose(index, [specs[i] for i in rows])
    return chosen if index is None else tokens.index_copy(0, index, chosen)


def _rows_index(rows: list[int], count: int, device: torch.device) -> Tensor | None:
    """Row numbers on the device; None for all of `count` rows."""
    return None if len(rows) == count else to_device(torch.tensor(rows, dtype=torch.int64), device)


def _at(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _fetch(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the host, for which it waits once."""
    if not tensors[0].is_cuda:
        return tensors
    on_host = [x.to("cpu", non_blocking=True) for x in tensors]
    torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return on_host


def prompt_logprobs(logits: Tensor, targets: Tensor, top: int) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens: float32 [n, V] and int64 [n] -> one entry per row with `top` best ids."""
    check_finite(logits)
    return _report(_fetch(_measure(logits, targets, top)), [top] * len(logits)) if len(logits) else []


def check_finite(logits: Tensor) -> None:
    """Raises `BadLogits` for NaN or +inf; -inf is a token that is never chosen."""
    if len(logits):
        _refuse_broken(logits.amax(dim=-1).cpu())


def _refuse_broken(best: Tensor) -> None:
    """best [n] on the host: the maximum of each row of logits, which NaN wins."""
    bad = ~torch.isfinite(best)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise BadLogits(f"the logits of row {row} have the maximum {best[row].item()}; the model's output is broken")


def _measure(logits: Tensor, tokens: Tensor, top: int) -> list[Tensor]:
    """Of the log-softmax of the logits as the model gave them: the tokens' ids, values and ranks (1 is the best) [n],
    ids and values of the `top` best [n, top]."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    best, ids = logits.topk(min(top, logits.shape[1]), dim=-1)
    return [tokens, (own - norm)[:, 0], ranks, ids, best - norm]


def _report(measured: list[Tensor], tops: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, value, rank, ids[:top], values[:top])
        for token, value, rank, ids, values, top in zip(*(x.tolist() for x in measured), tops, strict=True)
    ]


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
    if spec.is_penalised:
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
    device, vocab = scores.device, scores.shape[1]
    numbers = np.array([(_int64(s.seed), s.step, s.top_k if s.top_k > 0 else vocab) for s in specs], np.int64)
    shares = np.array([(s.temperature, s.min_p, s.top_p) for s in specs], np.float64)
    both = to_device(torch.from_numpy(np.hstack([numbers, shares.view(np.int64)])), device)  # one copy
    seeds, steps, top_k = both[:, :3].split(1, 1)
    temperature, min_p, top_p = both[:, 3:].view(torch.float64).split(1, 1)
    scores = scores / temperature.to(scores.dtype)
    if any(spec.min_p > 0 for spec in specs):
        # p >= min_p * p_max, in logs; min_p 0 gives -inf, which keeps all.
        floor = min_p.to(scores.dtype).log()
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor, NEVER)
    cut = [i for i, spec in enumerate(specs) if spec.top_k > 0 or spec.top_p < 1]
    if cut:
        rows = _rows_index(cut, len(specs), device)
        kept = _cut_tail(*(_at(x, rows) for x in (scores, top_k, top_p)))
        scores = kept if rows is None else scores.index_copy(0, rows, kept)
    return (scores.double() + gumbel_noise(seeds, steps, vocab)).argmax(dim=-1)


def _cut_tail(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the top_k [n, 1] best tokens, and of those the fewest whose probability reaches top_p [n, 1]; the rest
    become -inf."""
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)  # among equals the lower id comes first
    ordered = ordered.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= top_k, NEVER)
    probs = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probs.cumsum(dim=-1) - probs
    drop = (before >= top_p) & (top_p < 1)
    drop[:, 0] = False
    return torch.empty_like(scores).scatter_(1, ids, ordered.masked_fill(drop, NEVER))


def gumbel_noise(seeds: Tensor, steps: Tensor, vocab: int) -> Tensor:
    """float64 [n, vocab] standard Gumbel noise, a hash of seed, step (int64 [n, 1]) and token id.

    Each row is a SplitMix64 stream that starts at a hash of seed and step.
    """
    start = _mix(_mix(seeds + _GOLDEN) ^ (steps * _GOLDEN))
    bits = _mix(start + torch.arange(1, vocab + 1, device=seeds.device) * _GOLDEN)
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
