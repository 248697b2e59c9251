"""Log-probabilities in the two shapes of the API: parallel lists for completions, one object per token for chat."""

from __future__ import annotations

import math
from typing import Any

from paraflash.engine.messages import TokenLogprobs
from paraflash.server.tokens import TextTokenizer

LOWEST = -9999.0  # JSON has no infinity; a token that was impossible shows this, as vLLM's does


def finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST


def _name(tokenizer: TextTokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def chat_logprobs(tokenizer: TextTokenizer, rows: list[TokenLogprobs], top: int, as_ids: bool) -> list[dict[str, Any]]:
    """`content` of a chat choice's logprobs: one entry per output token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": _name(tokenizer, token_id, as_ids), "logprob": finite(logprob), "bytes": list(data)}

    return [
        {
            **entry(row.token_id, row.logprob),
            "top_logprobs": [entry(t, p) for t, p in zip(row.top_ids[:top], row.top_logprobs[:top], strict=True)],
        }
        for row in rows
    ]


class CompletionLogprobs:
    """Builds the `logprobs` object of a completion choice, piece by piece."""

    def __init__(self, tokenizer: TextTokenizer, top: int, as_ids: bool):
        self._tokenizer, self._top, self._as_ids = tokenizer, top, as_ids
        self._offset = 0

    def piece(self, rows: list[TokenLogprobs | None], token_ids: list[int]) -> dict[str, Any]:
        """The lists for these tokens. A None row (the first token of a prompt) has no probability."""
        tokens, offsets, chosen, tops = [], [], [], []
        for token_id, row in zip(token_ids, rows, strict=True):
            tokens.append(_name(self._tokenizer, token_id, self._as_ids))
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.token_text(token_id))
            chosen.append(None if row is None else finite(row.logprob))
            tops.append(None if row is None or not self._top else self._top_of(row))
        return {"tokens": tokens, "text_offset": offsets, "token_logprobs": chosen, "top_logprobs": tops}

    def _top_of(self, row: TokenLogprobs) -> dict[str, float]:
        """The best tokens, and the chosen one if it is not among them."""
        pairs = [
            *zip(row.top_ids[: self._top], row.top_logprobs[: self._top], strict=True),
            (row.token_id, row.logprob),
        ]
        out: dict[str, float] = {}
        for token_id, logprob in pairs:
            out.setdefault(_name(self._tokenizer, token_id, self._as_ids), finite(logprob))
        return out


def merge_pieces(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One `logprobs` object from those of consecutive pieces."""
    names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    return {name: [value for piece in pieces for value in piece[name]] for name in names}


def prompt_logprobs(
    tokenizer: TextTokenizer, prompt: list[int], rows: list[TokenLogprobs], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token a map of token id to logprob, rank and text; None for the first."""
    out: list[dict[str, Any] | None] = [None] * min(1, len(prompt))
    for row in rows:
        entries = {
            str(t): {"logprob": finite(p), "rank": rank, "decoded_token": tokenizer.token_text(t)}
            for rank, (t, p) in enumerate(zip(row.top_ids[:top], row.top_logprobs[:top], strict=True), 1)
        }
        own = {"logprob": finite(row.logprob), "rank": row.rank, "decoded_token": tokenizer.token_text(row.token_id)}
        out.append({**entries, str(row.token_id): own})
    return out
