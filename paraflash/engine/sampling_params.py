"""What a caller may ask of one generation, with vLLM's names, defaults and ranges.

A `SamplingParams` checks itself when it is made; the engine checks it again against the vocabulary and its own limits.
Every refusal is a `BadField` that names the field, the value and what is allowed, NaN included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

INT64 = 2**63


class BadField(ValueError):
    """One field of a request has a value that is not allowed."""

    def __init__(self, field: str, value: Any, allowed: str):
        super().__init__(f"{field} is {value!r}; {allowed} is needed")
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[Any, ...]:
        return BadField, (self.field, self.value, self.allowed)


@dataclass(frozen=True)
class StructuredOutputs:
    """The grammar that an answer must follow; exactly one field is set."""

    json: str | dict[str, Any] | None = None  # JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None and value is not False]
        if len(given) != 1:
            raise BadField("structured_outputs", given, f"exactly one of {', '.join(vars(self))}")


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the context allows
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = field(default=None)
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.seed == -1:  # vLLM's spelling of "no seed"
            self.seed = None
        self.check()

    @property
    def is_penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list, whatever form they were given in."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def check(self, vocab_size: int | None = None, max_logprobs: int | None = None) -> None:
        """Raises `BadField` for the first field out of range; token ids are bounded only if `vocab_size` is given."""
        _integer("n", self.n, 1)
        _number("temperature", self.temperature, 0, 2)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise BadField("top_p", self.top_p, "a number above 0 and at most 1")
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if not (_is_number(self.repetition_penalty) and self.repetition_penalty > 0):
            raise BadField("repetition_penalty", self.repetition_penalty, "a finite number above 0")
        if self.seed is not None:
            _integer("seed", self.seed, -INT64, INT64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadField("min_tokens", self.min_tokens, f"an integer of at most max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, max_logprobs)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise BadField(name, getattr(self, name), "true or false")
        self._check_stops(vocab_size)
        self._check_bias(vocab_size)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise BadField("structured_outputs", self.structured_outputs, "a StructuredOutputs")

    def _check_stops(self, vocab_size: int | None) -> None:
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        listed = isinstance(strings, (list, tuple)) and all(isinstance(s, str) and s for s in strings)
        if strings is not None and not listed:
            raise BadField("stop", self.stop, "a non-empty string or a list of them")
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, (list, tuple)):
                raise BadField("stop_token_ids", self.stop_token_ids, "a list of token ids")
            for token in self.stop_token_ids:
                _token_id("stop_token_ids", token, vocab_size)

    def _check_bias(self, vocab_size: int | None) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise BadField("logit_bias", self.logit_bias, "an object of token ids and numbers")
        for token, bias in self.logit_bias.items():
            _token_id("logit_bias", token, vocab_size)
            _number("logit_bias", bias, -100, 100)


def seed_of_sample(seed: int | None, i: int) -> int | None:
    """The seed of the i-th of n samples: seed + i, past -1, which means "no seed", and around the end of int64."""
    if seed is None:
        return None
    value = seed + i + (seed < -1 <= seed + i)
    return (value + INT64) % (2 * INT64) - INT64


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _number(name: str, value: Any, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):
        raise BadField(name, value, f"a number from {low} to {high}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise BadField(
            name, value, f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        )


def _token_id(name: str, value: Any, vocab_size: int | None) -> None:
    _integer(name, value, 0, INT64 - 1 if vocab_size is None else vocab_size - 1)
