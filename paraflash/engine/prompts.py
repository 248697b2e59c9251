"""The forms in which `LLM.generate` takes prompts, brought to one: text and token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass
class Prompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


def read_prompts(prompts: Any, encode: Callable[[str], list[int]]) -> list[Prompt]:
    """One prompt or a list of them: a text, {"prompt": text}, {"prompt_token_ids": ids}, or a list of ids.

    Raises ValueError or TypeError that names what is wrong.
    """
    if isinstance(prompts, (str, dict)) or _is_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise TypeError(f"prompts is {type(prompts).__name__}; a text, a dict, token ids or a list of those is needed")
    return [_read(prompt, encode, i) for i, prompt in enumerate(prompts)]


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, bytes)
        and len(value) > 0
        and all(isinstance(item, int) for item in value)
    )


def _read(prompt: Any, encode: Callable[[str], list[int]], index: int) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt, encode(prompt))
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return Prompt(None, list(prompt))
    if not isinstance(prompt, dict):
        raise TypeError(f"prompt {index} is {type(prompt).__name__}; a text, a dict or token ids is needed")
    for key in prompt:
        if key not in _KEYS:
            why = "; only text is supported" if "multi_modal" in str(key) else f"; {', '.join(_KEYS)} are known"
            raise ValueError(f"prompt {index} has the key {key!r}{why}")
    text, ids, salt = (prompt.get(key) for key in _KEYS)
    if not isinstance(text, (str, type(None))):
        raise TypeError(f"prompt {index} has prompt {text!r}; a text is needed")
    if ids is None and text is None:
        raise ValueError(f"prompt {index} has neither prompt nor prompt_token_ids")
    if ids is not None and (isinstance(ids, (str, bytes)) or not hasattr(ids, "__len__")):
        raise TypeError(f"prompt {index} has prompt_token_ids {ids!r:.100}; a list of token ids is needed")
    return Prompt(text, encode(text or "") if ids is None else list(ids), salt)
