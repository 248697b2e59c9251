"""paraflash: a serving engine for DeepSeek-V4.1-Flash with prefill context parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paraflash.engine.llm import LLM
    from paraflash.engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # The engine imports torch; `import paraflash` and `paraflash --help` need not wait for it.
    if name == "LLM":
        from paraflash.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from paraflash.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'paraflash' has no attribute {name!r}")
