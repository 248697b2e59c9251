"""Keeps streamed JSON completable: whatever a model writes into a tool call, and wherever it stops, what the client
has received plus `close()` is valid JSON.

`JsonGuard.feed` passes on the longest part of its input that is the beginning of some JSON object and drops the rest.
"""

from __future__ import annotations

import re

_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}


class JsonGuard:
    """One JSON object, fed in pieces of any size."""

    def __init__(self) -> None:
        self._stack: list[str] = []  # open { and [
        self._want = "value"  # value, first (value or ]), key, first_key (key or }), colon, next (, or closer), end
        self._kind = ""  # string, number, literal: what is open; empty between tokens
        self._text = ""  # of the open number or literal
        self._escape = ""  # of the open string, if an escape is open: \\ or \\u12
        self.broken = False

    @property
    def complete(self) -> bool:
        """Whether the object is closed, or given up."""
        return self._want == "end"

    def feed(self, piece: str) -> str:
        """The part of `piece` that the client may have."""
        if self.broken:
            return ""
        for i, char in enumerate(piece):
            if not self._accepts(char):
                self.broken = True
                return piece[:i]
        return piece

    def close(self) -> str:
        """What makes everything passed on so far a whole JSON object."""
        out = ""
        if self._kind == "string":
            out += self._finish_string()
        elif self._kind == "number":
            out += "" if _NUMBER.fullmatch(self._text) else "0"
            self._end_value()
        elif self._kind == "literal":
            out += next(word for word in _LITERALS if word.startswith(self._text))[len(self._text) :]
            self._end_value()
        if self._want == "colon":
            out += ":"
            self._want = "value"
        if not self._stack and self._want != "end":
            out += "{}"
        elif self._want == "key":  # after a comma
            out += '"":null'
        elif self._want == "value":
            out += "null"
        out += "".join(_CLOSERS[opener] for opener in reversed(self._stack))
        self._stack, self._want, self._kind = [], "end", ""
        return out

    def _finish_string(self) -> str:
        rest = ""
        if self._escape:
            rest = "\\" if self._escape == "\\" else "0" * (6 - len(self._escape))
        self._end_string()
        return rest + '"'

    def _end_string(self) -> None:
        was_key, self._kind, self._escape = self._want in ("key", "first_key"), "", ""
        if was_key:
            self._want = "colon"
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._kind, self._text = "", ""
        self._want = "next" if self._stack else "end"

    def _accepts(self, char: str) -> bool:
        if self._kind == "string":
            return self._in_string(char)
        if self._kind == "number":
            if any(_NUMBER.fullmatch(self._text + char + tail) for tail in ("", "0")):
                self._text += char
                return True
            if not _NUMBER.fullmatch(self._text):
                return False
            self._end_value()
        elif self._kind == "literal":
            if not any(word.startswith(self._text + char) for word in _LITERALS):
                return False
            self._text += char
            if self._text in _LITERALS:
                self._end_value()
            return True
        return char in _SPACE or self._between(char)

    def _in_string(self, char: str) -> bool:
        if self._escape == "\\":
            self._escape = "\\u" if char == "u" else ""
            if char not in '"\\/bfnrtu':
                self._escape = "\\"
                return False
        elif self._escape:
            if char not in "0123456789abcdefABCDEF":
                return False
            self._escape = self._escape + char if len(self._escape) < 5 else ""
        elif char == '"':
            self._end_string()
        elif char == "\\":
            self._escape = char
        else:
            return char >= " "
        return True

    def _between(self, char: str) -> bool:
        want = self._want
        if want == "next":
            if char == ",":
                self._want = "key" if self._stack[-1] == "{" else "value"
                return True
            return self._closes(char)
        if want in ("first", "first_key") and self._closes(char):
            return True
        if want in ("key", "first_key"):
            if char == '"':
                self._kind = "string"
            return char == '"'
        if want == "colon":
            if char == ":":
                self._want = "value"
            return char == ":"
        return want in ("value", "first") and self._opens_value(char)

    def _closes(self, char: str) -> bool:
        if char != _CLOSERS[self._stack[-1]]:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _opens_value(self, char: str) -> bool:
        if char == "{":
            self._stack.append(char)
            self._want = "first_key"
            return True
        if not self._stack:
            return False  # arguments are one object
        if char == "[":
            self._stack.append(char)
            self._want = "first"
        elif char == '"':
            self._kind = "string"
        elif char in "-0123456789":
            self._kind, self._text = "number", char
        elif any(word.startswith(char) for word in _LITERALS):
            self._kind, self._text = "literal", char
        else:
            return False
        return True
