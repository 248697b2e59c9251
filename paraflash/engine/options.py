"""Options of vLLM that are no settings of paraflash: each is refused with a reason, or accepted because it changes
nothing here. The command line and `LLM(...)` share this table, so that a launch command written for vLLM either works
or says what to leave out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paraflash.config.engine import Refused

logger = logging.getLogger(__name__)


def _unset(value: Any) -> bool:
    return value in (None, False, {}, [], "", 0)


def anything(value: Any) -> bool:
    return True


def only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _no_media(value: Any) -> bool:
    return not value or (isinstance(value, dict) and not any(value.values()))


@dataclass(frozen=True)
class ForeignOption:
    """`accepts(value)` says whether the value means what paraflash does anyway; every other value is refused."""

    kind: type  # type of the value: bool, int, float, str or dict (JSON on the command line)
    accepts: Callable[[Any], bool]
    reason: str  # one sentence: why it is refused, or has no effect
    short: tuple[str, ...] = ()


_ONE_NODE = "paraflash runs on one node; use more GPUs of one node through -tp and -pcp"

FOREIGN_OPTIONS: dict[str, ForeignOption] = {
    "speculative_config": ForeignOption(
        dict, _unset, "speculative decoding is not supported; leave it out, the model then decodes one token a step"
    ),
    "kv_transfer_config": ForeignOption(
        dict, _unset, "KV transfer between instances is not supported; let one instance prefill and decode"
    ),
    "enable_lora": ForeignOption(
        bool, _unset, "LoRA adapters are not supported; merge the adapter into the checkpoint"
    ),
    "lora_modules": ForeignOption(
        str, _unset, "LoRA adapters are not supported; merge the adapter into the checkpoint"
    ),
    "limit_mm_per_prompt": ForeignOption(
        dict, _no_media, "images and video are not supported; set every limit to 0 and send text only"
    ),
    "enable_dbo": ForeignOption(
        bool, _unset, "microbatching (dual batch overlap) is not supported; raise --max-num-batched-tokens instead"
    ),
    "ubatch_size": ForeignOption(
        int, only(None, 0, 1), "microbatching is not supported; raise --max-num-batched-tokens instead"
    ),
    "enable_chunked_prefill": ForeignOption(
        bool, only(None, True), "prefill is always chunked; raise --max-num-batched-tokens to take a prompt whole"
    ),
    "cp_kv_cache_interleave_size": ForeignOption(
        int, only(None, 1), "every context parallel rank holds the whole KV cache, nothing is interleaved; use 1"
    ),
    "nnodes": ForeignOption(int, only(None, 1), _ONE_NODE),
    "node_rank": ForeignOption(int, only(None, 0), _ONE_NODE),
    "quantization": ForeignOption(
        str, _unset, "the checkpoint's own quantization_config decides how weights are stored; leave it out"
    ),
    "scheduling_policy": ForeignOption(
        str, only(None, "fcfs"), "requests are served first come, first served; use fcfs"
    ),
    "language_model_only": ForeignOption(bool, only(None, True), "only the language model is ever loaded; leave it on"),
    "tokenizer_mode": ForeignOption(
        str, only(None, "auto", "deepseek_v41"), "the tokenizer.json of the model is used; use auto or deepseek_v41"
    ),
    "distributed_executor_backend": ForeignOption(
        str, only(None, "mp"), "workers are always processes of this node; use mp"
    ),
    "trust_remote_code": ForeignOption(bool, anything, "has no effect: no code of a checkpoint is ever run"),
    "safetensors_load_strategy": ForeignOption(
        str, anything, "has no effect: each rank maps the files and reads its shard"
    ),
    "compilation_config": ForeignOption(
        dict, anything, "has no effect: nothing is compiled by torch; --enforce-eager turns CUDA graphs off", ("-cc",)
    ),
}


def check_foreign_options(given: dict[str, Any]) -> None:
    """Checks options by their Python names (`enable_lora`). Raises `Refused` for a value that is not accepted."""
    for name, value in given.items():
        option = FOREIGN_OPTIONS[name]
        if not option.accepts(value):
            raise Refused(f"--{name.replace('_', '-')} {value!r}: {option.reason}")
        if option.accepts is anything and not _unset(value):
            logger.info("--%s %s", name.replace("_", "-"), option.reason)
