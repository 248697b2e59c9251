"""What is settled once, when a request arrives: whether it can ever run, how long it may get, and its seed."""

from __future__ import annotations

import hashlib

from paraflash.engine.blocks import BlockPool
from paraflash.engine.request import Request, RequestRefused


def fitting_max_tokens(request: Request, vocab_size: int, max_model_len: int, pool: BlockPool) -> int:
    """How many tokens the request may generate: its max_tokens, clipped to the context.

    Without a max_tokens it is what context and KV pool leave. Raises `RequestRefused` for ids outside the vocabulary,
    a prompt that fills the context, and a request that even the empty pool could not hold.
    """
    length = request.prompt_len
    if length == 0:
        raise RequestRefused("prompt_token_ids", "the prompt is empty; at least one token is needed")
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= vocab_size:
        raise RequestRefused(
            "prompt_token_ids",
            f"the prompt has token id {low if low < 0 else high}; ids from 0 to {vocab_size - 1} are allowed",
        )
    if length >= max_model_len:
        raise RequestRefused(
            "input_tokens",
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {length} "
            "input tokens, and at least one output token must fit as well.",
        )
    tokens = pool.capacity * pool.block_size
    pool_text = f"the whole KV cache holds {tokens} ({pool.capacity} blocks of {pool.block_size})"
    if length > tokens:
        raise RequestRefused("input_tokens", f"Your prompt contains {length} input tokens, but {pool_text}.")
    room = tokens - length + 1  # the last token's own KV is never needed
    if request.params.max_tokens is None:
        return min(max_model_len - length, room)
    max_tokens = min(request.params.max_tokens, max_model_len - length)
    if max_tokens > room:
        raise RequestRefused(
            "max_tokens",
            f"A prompt of {length} tokens and max_tokens {max_tokens} need {length + max_tokens - 1} tokens of KV, "
            f"but {pool_text}; use a max_tokens of at most {room}.",
        )
    return max_tokens


def seed_of(request: Request, engine_seed: int) -> int:
    """A non-negative 63-bit seed; without one of its own, a request's follows from the order of arrival."""
    seed = request.params.seed
    if seed is None:
        text = f"{engine_seed}/{request.arrival}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return seed & (2**63 - 1)
