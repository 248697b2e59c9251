"""Typed fields of a decoded config.json; every error names the field, the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any


class ConfigError(ValueError):
    """A field of config.json is missing or wrong; the message names the field."""


class Fields:
    """Reads typed fields of one JSON object and names the field in every error."""

    def __init__(self, data: dict[str, Any], where: str):
        self.data, self.where = data, where

    def get(self, name: str, default: Any) -> Any:
        if name in self.data and self.data[name] is not None:
            return self.data[name]
        if default is not None:
            return default
        raise ConfigError(f"{self.where}.{name} is missing")

    def integer(self, name: str, default: int | None = None, low: int = 0) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{self.where}.{name} is {value!r}; an integer of at least {low} is needed")
        return value

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        """A finite number of at least 0, or above `above`."""
        value = self.get(name, default)
        number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
        if not number or not (value >= 0 if above is None else value > above):
            needed = "of at least 0" if above is None else f"above {above:g}"
            raise ConfigError(f"{self.where}.{name} is {value!r}; a number {needed} is needed")
        return float(value)

    def token(self, name: str, default: int, vocab_size: int) -> int:
        value = self.integer(name, default)
        if value >= vocab_size:
            raise ConfigError(f"{self.where}.{name} is {value}; an id below vocab_size {vocab_size} is needed")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}.{name} is {value!r}; true or false is needed")
        return value

    def integers(self, name: str, default: list[int] | None = None) -> list[int]:
        value = self.get(name, default)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{self.where}.{name} is {value!r}; a list of integers is needed")
        return value

    def only(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(name, default)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise ConfigError(f"{self.where}.{name} is {value!r}; paraflash supports {', '.join(map(repr, allowed))}")
        return value
