"""A small byte-level BPE tokenizer made in code, with the special tokens of the release at their spellings.

All 256 bytes have a token, so every text round-trips; merges spell common English words; markers come last, as in the
release. Ids 0, 1, 2 are begin of sentence, end of sentence and padding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜image｜>"
# Spellings that the chat encoding of deepseek-recipe writes; they are no text, but only the first three are "special"
# in the sense that decoding drops them.
MARKERS = (
    *(
        "<｜System｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜latest_reminder｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
        IMAGE,
    ),
    *("<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>"),
)
_WORDS = (
    "the The of and to in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she many "
    "some so these would other into has more her two like him see time could no make than first been its who now "
    "people my made over did down only way find use may water long little very after words called just where most "
    "know ing ed er ion es ly ment answer question number total because therefore return function class print "
    "import value result true false null name user system tool call city weather day hour minute money dollar price "
    "left give half twice "
)


def min_tokens() -> int:
    """The smallest vocabulary that holds the bytes and all markers."""
    return 3 + 256 + len(MARKERS)


def _byte_letters() -> list[str]:
    """The printable letter of each byte in byte-level BPE; unprintable bytes are moved above U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, moved = {b: chr(b) for b in printable}, 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(moved)
            moved += 1
    return [letters[b] for b in range(256)]


def _merges(room: int) -> list[tuple[str, str]]:
    """The first `room` merges that spell the words, each with a leading blank, letter by letter."""
    merges: dict[tuple[str, str], None] = {}
    made: set[str] = set()
    for word in _WORDS.split():
        piece = "Ġ"
        for letter in word:
            if piece + letter not in made:
                if len(merges) == room:
                    return list(merges)
                merges[(piece, letter)] = None
                made.add(piece + letter)
            piece += letter
    return list(merges)


def build_tokenizer(max_tokens: int) -> Any:
    """A `tokenizers.Tokenizer` with at most `max_tokens` ids; raises ValueError below `min_tokens()`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if max_tokens < min_tokens():
        raise ValueError(f"text_config.vocab_size is {max_tokens}; the bytes and markers need at least {min_tokens()}")
    merges = _merges(max_tokens - min_tokens())
    tokens = [BOS, EOS, PAD, *_byte_letters(), *(a + b for a, b in merges), *MARKERS]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (BOS, EOS, PAD)])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKERS])
    return tokenizer


def save_tokenizer(folder: Path, max_tokens: int) -> Any:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json; returns the tokenizer."""
    tokenizer = build_tokenizer(max_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
