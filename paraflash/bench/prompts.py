"""Random prompts of an exact length, the same for the same seed whatever the server.

The completions API takes token ids, so a prompt of n tokens is n ids drawn from a `TokenPool`: ids that the model has
and that are no special tokens. The chat API takes text only; there a text is grown until the server's own tokenizer
counts the wanted length, template included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from paraflash.bench import client as http

# Text whose tokens stand in for a vocabulary where nothing else is known of it.
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog while seven wizards quietly box a jumping vixen. "
    "In 1987, 4 of 26 rivers rose by 350 cm; engineers measured flow, depth and speed at dawn. "
    "def total(values): return sum(value * 2 for value in values if value > 0)  # positive only "
    "Pay $12.50 (or 15%) before Friday, said the letter from Oslo, and nobody laughed. "
)


class NoVocabulary(ValueError):
    """Nothing tells which token ids the model has; the message says which flag helps."""


@dataclass(frozen=True)
class TokenPool:
    ids: NDArray[np.int64]  # sorted, without repeats
    source: str  # where they come from, for the printed header

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(i) for i in self.ids[rng.integers(0, len(self.ids), count)]]


@dataclass(frozen=True)
class Prompt:
    content: list[int] | str  # token ids, or the text of a chat message
    tokens: int  # length in tokens, template included
    output_tokens: int


def pool_from_size(vocab_size: int) -> TokenPool:
    """The middle four fifths of a vocabulary of which only the size is known: special ids stand at its ends."""
    if vocab_size < 10:
        raise NoVocabulary(f"vocab-size is {vocab_size}; at least 10 is needed")
    return TokenPool(np.arange(vocab_size // 10, vocab_size - vocab_size // 10), f"a vocabulary of {vocab_size}")


def _config_ids(config: dict[str, Any]) -> tuple[int | None, set[int]]:
    """Vocabulary size and every special id that a config.json names, nested objects included."""
    size, special = config.get("vocab_size"), set()
    for key, value in config.items():
        if isinstance(value, dict):
            inner_size, inner = _config_ids(value)
            special |= inner
            size = inner_size if key == "text_config" and inner_size else size
        elif key.endswith("_token_id"):
            special |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    return size, special


def pool_from_folder(path: Path) -> TokenPool | None:
    """Reads `tokenizer.json` and `config.json` of a model folder (or a tokenizer.json itself); None if neither exists.

    Only ids that decode to ordinary text are kept: those of the tokenizer's vocabulary that are not added tokens.
    """
    folder = path if path.is_dir() else path.parent
    tokenizer_file = folder / "tokenizer.json" if path.is_dir() else path
    config_file = folder / "config.json"
    size, special = _config_ids(json.loads(config_file.read_text("utf-8"))) if config_file.is_file() else (None, set())
    if tokenizer_file.is_file():
        data = json.loads(tokenizer_file.read_text("utf-8"))
        vocab = data["model"]["vocab"]
        known = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
        special |= {token["id"] for token in data.get("added_tokens", [])}
        ids = sorted(i for i in known - special if size is None or i < size)
        if ids:
            return TokenPool(np.array(ids), "the tokenizer's vocabulary")
    return pool_from_size(size) if size else None


async def pool_from_server(client: httpx.AsyncClient, model: str) -> TokenPool | None:
    """The ids that the server's /tokenize gives for a sample text; None if there is no such endpoint."""
    try:
        answer = await http.post(client, "/tokenize", {"model": model, "prompt": _SAMPLE, "add_special_tokens": False})
    except http.ServerProblem:
        return None
    ids = sorted({i for i in answer.get("tokens", []) if isinstance(i, int)})
    return TokenPool(np.array(ids), "ids that /tokenize gave for a sample text") if len(ids) >= 8 else None


async def find_pool(
    client: httpx.AsyncClient,
    model: str,
    entries: list[dict[str, Any]],
    vocab_size: int | None = None,
    tokenizer: str | None = None,
) -> TokenPool:
    """Settles the ids to draw from: --vocab-size, --tokenizer, the served model's folder, the server's /tokenize.

    `entries` is the answer of /v1/models, where `root` may be a folder on this machine.
    """
    if vocab_size is not None:
        return pool_from_size(vocab_size)
    if tokenizer is not None:
        pool = pool_from_folder(Path(tokenizer)) if Path(tokenizer).exists() else None
        if pool is None:
            raise NoVocabulary(f"tokenizer is {tokenizer!r}; a folder with a tokenizer.json, or that file, is needed")
        return pool
    for name in [model, *(e.get("root") for e in entries)]:
        if isinstance(name, str) and Path(name).is_dir() and (pool := pool_from_folder(Path(name))):
            return pool
    pool = await pool_from_server(client, model)
    if pool is None:
        raise NoVocabulary("the model's token ids are unknown; give --tokenizer FOLDER or --vocab-size N")
    return pool


def _lengths(rng: np.random.Generator, count: int, mean: int, ratio: float, least: int) -> list[int]:
    """`count` lengths, uniform in [mean * (1 - ratio), mean * (1 + ratio)]; all `mean` for ratio 0."""
    low, high = max(least, int(mean * (1 - ratio))), max(least, int(mean * (1 + ratio)))
    return [int(n) for n in rng.integers(low, high + 1, count)]


def random_prompts(
    pool: TokenPool,
    count: int,
    input_len: int,
    output_len: int,
    *,
    seed: int,
    part: tuple[int, ...] = (),
    prefix_len: int = 0,
    range_ratio: float = 0.0,
) -> list[Prompt]:
    """`count` prompts of prefix_len + input_len ids.

    `part` names the part of a run (a wave), so that no two parts share a prompt, which a prefix cache would answer
    from memory. The prefix, if any, is the same in all parts.
    """
    prefix = pool.draw(np.random.default_rng([seed, 0]), prefix_len)
    rng = np.random.default_rng([seed, 1, *part])
    inputs = _lengths(rng, count, input_len, range_ratio, 1 if prefix_len == 0 else 0)
    outputs = _lengths(rng, count, output_len, range_ratio, 1)
    return [Prompt(prefix + pool.draw(rng, n), prefix_len + n, out) for n, out in zip(inputs, outputs, strict=True)]


def _word(rng: np.random.Generator) -> str:
    return "".join("bdfgklmnprst"[rng.integers(12)] + "aeiou"[rng.integers(5)] for _ in range(rng.integers(1, 4)))


async def chat_prompt(
    client: httpx.AsyncClient, model: str, tokens: int, output_tokens: int, rng: np.random.Generator
) -> Prompt:
    """A chat message that the server's template and tokenizer turn into `tokens` tokens, or as near as words allow.

    Raises ServerProblem if the server cannot count (no /tokenize for messages) or the template alone is longer.
    """

    async def count(words: list[str]) -> int:
        messages = [{"role": "user", "content": " ".join(words)}]
        try:
            answer = await http.post(client, "/tokenize", {"model": model, "messages": messages})
            return int(answer.get("count", len(answer.get("tokens", []))))
        except (http.ServerProblem, TypeError) as problem:
            raise http.ServerProblem(
                f"exact prompt lengths for chat need the server's /tokenize ({problem}); "
                "--backend openai sends token ids instead"
            ) from None

    words: list[str] = []
    have = await count(words)
    if have > tokens:
        raise http.ServerProblem(f"random-input-len is {tokens}, but the chat template alone has {have} tokens")
    per_word = 2.5
    best, best_count = words, have
    for _ in range(24):
        if best_count == tokens:
            break
        missing = tokens - best_count
        step = max(1, int(missing / per_word))
        tried = best + [_word(rng) if missing > 8 else "aeiou"[rng.integers(5)] for _ in range(step)]
        have = await count(tried)
        if have > best_count:
            per_word = max(1.0, (have - best_count) / step)
        if have <= tokens:
            best, best_count = tried, have
        else:
            per_word *= 1.5
    return Prompt(" ".join(best), tokens, output_tokens)
