"""The checkpoint's tokenizer.json: text to ids, and the exact bytes of each token.

The byte view is what streaming and grammars need: a token of a byte-level BPE may hold part of a character.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer


class TokenizerError(ValueError):
    """tokenizer.json is missing, broken, or of a kind that paraflash does not read."""


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads `folder/tokenizer.json` (or that file itself). Raises `TokenizerError`."""
    path = Path(folder)
    path = path if path.is_file() else path / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist; --tokenizer names a folder with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def bos_to_add(folder: str | Path, bos_token_id: int) -> int | None:
    """The BOS id where tokenizer_config.json beside tokenizer.json asks for one (`add_bos_token`), else None."""
    path = Path(folder)
    path = (path.parent if path.is_file() else path) / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} must hold one JSON object")
    return bos_token_id if settings.get("add_bos_token") else None


def encode(tokenizer: Tokenizer, text: str, bos: int | None) -> list[int]:
    """Ids of a prompt, with what the post-processor of tokenizer.json adds, and `bos` in front unless it is there."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
    return [bos, *ids] if bos is not None and ids[:1] != [bos] else ids


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character; this is the way back."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token id; b"" for ids without a token."""

    table: list[bytes]
    special: frozenset[int]  # control tokens, not shown with skip_special_tokens

    def __getitem__(self, token_id: int) -> bytes:
        return self.table[token_id] if token_id < len(self.table) else b""


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """The bytes that `tokenizer.decode` would join. Made once per tokenizer. Raises `TokenizerError`."""
    kept = _tables.get(id(tokenizer))
    if kept is not None and kept[0] is tokenizer:
        return kept[1]
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise TokenizerError(f"the decoder of tokenizer.json is {decoder.get('type')!r}; byte-level BPE is needed")
    alphabet = byte_of_character()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        try:
            table[token_id] = bytes([alphabet[c] for c in token])
        except KeyError:  # an added token, written as plain text
            table[token_id] = token.encode()
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    made = TokenBytes(table, special)
    _tables.clear()
    _tables[id(tokenizer)] = (tokenizer, made)
    return made


_tables: dict[int, tuple[Tokenizer, TokenBytes]] = {}  # the newest tokenizer's
