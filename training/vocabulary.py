"""The miniature's tokenizer: single bytes, the released special tokens, and one token for every word the tasks use.

A word token carries its leading space (" lamp"), digits are always single tokens, and `ignore_merges` lets whole words
stand in the vocabulary without the chain of merges that BPE would need. Any text can be encoded, byte by byte at worst.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT, REMINDER = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
SPECIALS = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, REMINDER, THINK, END_THINK, DSML)
PLAIN_ADDED = (THINK, END_THINK, DSML)  # kept by skip_special_tokens, as in the release

PIECE = r"\d| ?\p{L}+| ?[^\s\p{L}\d]|\s"  # one pre-token: a digit, a word, a mark or one blank
_PIECE = re.compile(r"\d| ?[^\W\d_]+| ?(?:[^\s\w]|_)|\s")

ADJECTIVES = (
    "red blue green black white brown pink gray gold warm cold soft hard tall short long wide thin thick flat "
    "round sharp quick slow loud calm dark light fresh sweet sour dry"
).split()
NOUNS = (
    "fox dog cat cow pig hen duck goose horse sheep goat bear wolf deer lion tiger mouse rat frog toad crab fish "
    "shark whale seal owl hawk crow swan bee ant fly moth snake worm snail boat ship car bus train bike cart van "
    "plane kite drum bell horn harp flute tree bush leaf root seed rose fern moss vine palm oak pine elm"
).split()
VALUES = (
    "lamp stone chair table door wall roof floor desk shelf bowl cup plate fork spoon knife pan pot jar box bag "
    "sack rope chain wire nail screw bolt wheel gear lens clock watch coin ring crown sword bow arrow shield flag "
    "map book page pen ink brush paint cloth silk wool linen shirt coat hat glove boot sock belt scarf tent bed "
    "quilt soap"
).split()
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def pieces(text: str) -> list[str]:
    """Cuts plain ASCII text as the tokenizer's pre-tokenizer does."""
    return _PIECE.findall(text)


def _byte_symbols() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {b: chr(b) for b in plain}
    extra = 0
    for b in range(256):
        if b not in symbols:
            symbols[b] = chr(256 + extra)
            extra += 1
    return symbols


def vocabulary(task_words: list[str]) -> dict[str, int]:
    """Token string -> id: specials, 256 bytes, then " word" tokens in order; `task_words` are plain words."""
    symbols = _byte_symbols()
    vocab = {token: i for i, token in enumerate(SPECIALS)}
    for b in range(256):
        vocab[symbols[b]] = len(vocab)
    spaced = [" " + w for w in (*LETTERS, *ADJECTIVES, *NOUNS, *VALUES)]
    for piece in [*spaced, *task_words]:
        token = "".join(symbols[b] for b in piece.encode())
        vocab.setdefault(token, len(vocab))
    while len(vocab) % 64:  # rows of the embedding shard evenly
        vocab[f"<｜place▁holder▁no▁{len(vocab)}｜>"] = len(vocab)
    return vocab


def tokenizer_json(vocab: dict[str, int]) -> dict[str, Any]:
    """The content of tokenizer.json (Hugging Face `tokenizers` format)."""
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token not in PLAIN_ADDED,
        }
        for token in vocab
        if token in SPECIALS or token.startswith("<｜place")
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PIECE}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocab,
            "merges": [],
        },
    }


def write_tokenizer(folder: Path, vocab: dict[str, int]) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocab), ensure_ascii=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
