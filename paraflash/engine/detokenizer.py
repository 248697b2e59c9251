"""Token ids to text, as they arrive: whole characters only, and nothing that a stop string might still take back.

    bytes of new tokens -> complete characters -> up to the first stop string -> text that may be shown

However the ids are cut into pieces, the pieces' text joins to the same string. Shared by `LLM` and the server.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.tokenizer import token_bytes


class Detokenizer:
    """Text of one generation. `hidden_ids` are tokens that are never shown, besides what `params` hides."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, hidden_ids: Iterable[int] = ()):
        self._bytes = token_bytes(tokenizer)
        self._hidden = frozenset(hidden_ids) | (self._bytes.special if params.skip_special_tokens else frozenset())
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(params.stop_strings)
        self.num_tokens = 0  # fed so far, up to the one that completed a stop string
        self.stopped: str | None = None

    def feed(self, token_ids: Sequence[int], finish_reason: str | None = None) -> tuple[str, str | None]:
        """Takes new ids; returns the text that may be shown now and the stop string if one was found.

        With a finish reason everything held back comes out. Where the engine stopped at a token (`stop`), that token
        is the last id and is shown only if stop strings are. After a stop string, further ids are ignored.
        """
        shown: list[str] = []
        for i, token in enumerate(token_ids):
            if self.stopped is not None:
                break
            self.num_tokens += 1
            ends_here = finish_reason == "stop" and i == len(token_ids) - 1
            data = b"" if token in self._hidden or (ends_here and not self._keep_stop) else self._bytes[token]
            text = self._utf8.decode(data)
            if self.num_tokens <= self._min_tokens:
                shown.append(self._stops.release() + text)  # too early to stop
            else:
                shown.append(self._advance(text))
        if finish_reason is not None and self.stopped is None:
            shown.append(self._advance(self._utf8.decode(b"", final=True)))
            if self.stopped is None:
                shown.append(self._stops.release())
        return "".join(shown), self.stopped

    def _advance(self, text: str) -> str:
        shown, self.stopped = self._stops.push(text)
        return shown + self.stopped if self.stopped is not None and self._keep_stop else shown


class StopStrings:
    """Finds the stop string that is complete first; of several that end together, the longest."""

    def __init__(self, strings: Sequence[str]):
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """New text -> (text before which no stop string can begin any more, the stop string found).

        Where one is found the text ends before it, and the rest is dropped.
        """
        if not self._strings:
            return text, None
        text = self._held + text
        ends = [(at + len(s), at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            _, at, found = min(ends)
            self._held = ""
            return text[:at], found
        keep = max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def release(self) -> str:
        """What is held back, because no stop string can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
