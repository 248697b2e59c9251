"""Text to token ids and back for the routes; long texts are encoded in a thread, so the event loop goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paraflash.engine.tokenizer import bos_to_add, load_tokenizer, token_bytes

_LONG_TEXT = 2_000  # characters


class TextTokenizer:
    """`folder` holds tokenizer.json and, if there is one, tokenizer_config.json. Raises `TokenizerError`."""

    def __init__(self, folder: str | Path, bos_token_id: int):
        self.path = Path(folder) / "tokenizer.json"
        self.tokenizer = load_tokenizer(folder)
        self._bytes = token_bytes(self.tokenizer)
        self.special_ids = self._bytes.special
        self.bos = bos_to_add(folder, bos_token_id)

    def id_of(self, token: str) -> int | None:
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        if special and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; `special` adds what the tokenizer puts before every text (BOS)."""
        if len(text) < _LONG_TEXT:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    def decode(self, ids: list[int]) -> str:
        """All tokens as text, special ones too; bytes that are no whole character show as U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode("utf-8", "replace")
