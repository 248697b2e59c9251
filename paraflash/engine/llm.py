"""The Python API: `LLM(model, ...).generate(prompts, SamplingParams(...))`, in the shape of vLLM's.

    with LLM("folder", tensor_parallel_size=2, prefill_context_parallel_size=2) as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text)

The engine core runs in this process, the model in one worker process per rank.
"""

from __future__ import annotations

import difflib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config
from paraflash.engine.detokenizer import Detokenizer
from paraflash.engine.engine import EngineCore
from paraflash.engine.executor import refuse_in_worker_import
from paraflash.engine.options import FOREIGN_OPTIONS, check_foreign_options
from paraflash.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, position
from paraflash.engine.prompts import Prompt, read_prompts
from paraflash.engine.request import Delta
from paraflash.engine.sampling_params import SamplingParams, seed_of_sample
from paraflash.engine.tokenizer import bos_to_add, encode, load_tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass
class _Sample:
    """One of the n generations of a prompt."""

    engine_id: str
    request: RequestOutput
    output: CompletionOutput
    params: SamplingParams
    decoder: Detokenizer


class LLM:
    """Loads a model and generates from it. Keywords are those of `EngineConfig`.

    Raises `Refused`, `ConfigError` or another ValueError for what cannot work, TypeError for an unknown keyword.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        refuse_in_worker_import()
        config = _config(os.fspath(model), options)
        text_model = load_config(config.model, config.hf_overrides)
        folder = config.tokenizer or config.model
        self._tokenizer = load_tokenizer(folder)  # before the workers, which would fail on it late and in many words
        self._bos = bos_to_add(folder, text_model.bos_token_id)
        self.core = EngineCore(config)
        self.config = self.core.config
        self._ids = itertools.count()

    def generate(self, prompts: Any, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Runs all prompts and returns their outputs in order.

        prompts: one or a list of: a text, {"prompt": text}, {"prompt_token_ids": ids}, a list of ids.
        sampling_params: one for all or one per prompt. Every prompt is checked before any runs. Raises ValueError for
        a bad prompt or parameter, `EngineDeadError` if a worker is lost.
        """
        read = read_prompts(prompts, lambda text: encode(self._tokenizer, text, self._bos))
        params = _params_of(sampling_params, len(read))
        outputs: list[RequestOutput] = []
        running: dict[str, _Sample] = {}
        try:
            for prompt, own in zip(read, params, strict=True):
                outputs.append(self._add(prompt, own, running))
            with _Progress(len(running), use_tqdm) as progress:
                while running:
                    for delta in self.core.step():
                        self._take(delta, running, progress)
        finally:
            for engine_id in running:  # after an error or Ctrl-C nothing stays behind
                self.core.abort(engine_id)
        return outputs

    def _add(self, prompt: Prompt, params: SamplingParams, running: dict[str, _Sample]) -> RequestOutput:
        """Queues the n samples of a prompt."""
        request = RequestOutput(str(next(self._ids)), prompt.text, prompt.token_ids, [], metrics=RequestMetrics())
        for i in range(params.n):
            own = replace(
                params, n=1, seed=seed_of_sample(params.seed, i), stop=None
            )  # stop strings are found here; the core has no text
            output = CompletionOutput(i, "", [], logprobs=None if params.logprobs is None else [])
            output.cumulative_logprob = None if params.logprobs is None else 0.0
            sample = _Sample(f"{request.request_id}-{i}", request, output, params, Detokenizer(self._tokenizer, params))
            self.core.add_request(sample.engine_id, prompt.token_ids, own, cache_salt=prompt.cache_salt)
            running[sample.engine_id] = sample
            request.outputs.append(output)
        return request

    def _take(self, delta: Delta, running: dict[str, _Sample], progress: _Progress) -> None:
        sample = running.get(delta.request_id)
        if sample is None:
            return
        output, request = sample.output, sample.request
        text, stop = sample.decoder.feed(delta.token_ids, delta.finish_reason)
        output.text += text
        kept = sample.decoder.num_tokens - len(output.token_ids)  # none after a stop string
        output.token_ids += delta.token_ids[:kept]
        for found in (delta.logprobs or [])[:kept]:
            assert output.logprobs is not None and output.cumulative_logprob is not None
            output.logprobs.append(position(self._tokenizer, found))
            output.cumulative_logprob += found.logprob
        if delta.prompt_logprobs is not None:
            request.prompt_logprobs = [None, *(position(self._tokenizer, found) for found in delta.prompt_logprobs)]
        _note_times(request, delta)
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if stop is not None:
            output.finish_reason, output.stop_reason = "stop", stop
            self.core.abort(delta.request_id)
        if output.finish_reason is not None:
            del running[delta.request_id]
            request.finished = all(o.finished() for o in request.outputs)
        progress.update(kept, output.finish_reason is not None)

    def get_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the model."""
        return self._tokenizer

    def shutdown(self) -> None:
        """Ends the workers. May be called again."""
        core = getattr(self, "core", None)
        if core is not None:
            core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self.shutdown()


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    known = [f.name for f in fields(EngineConfig) if f.name != "model"]
    for name in options:
        if name not in known and name not in FOREIGN_OPTIONS:
            close = difflib.get_close_matches(name, [*known, *FOREIGN_OPTIONS])
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise TypeError(f"LLM has no option {name!r}{hint}")
    check_foreign_options({name: value for name, value in options.items() if name in FOREIGN_OPTIONS})
    settings = {name: value for name, value in options.items() if name in known}
    if settings.get("tokenizer") is not None:
        settings["tokenizer"] = os.fspath(settings["tokenizer"])
    if "dtype" in settings:
        settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
    for name in ("hf_overrides", "engram_config"):
        if settings.get(name, {}) is None:
            del settings[name]
    return EngineConfig(model=model, **settings)


def _params_of(params: Params, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(own, SamplingParams) for own in params):
        raise TypeError(f"sampling_params is {params!r:.100}; a SamplingParams or a list with one per prompt is needed")
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts; one for all or one each is needed"
        )
    return list(params)


def _note_times(request: RequestOutput, delta: Delta) -> None:
    """Folds one sample's moments into its request's."""
    metrics, times = request.metrics, delta.times
    assert metrics is not None
    if not metrics.arrival_time or times.arrival < metrics.arrival_time:
        metrics.arrival_time = times.arrival
        request.num_cached_tokens = delta.num_cached_tokens
    firsts = [t for t in (metrics.first_scheduled_time, times.scheduled) if t is not None]
    metrics.first_scheduled_time = min(firsts, default=None)
    firsts = [t for t in (metrics.first_token_time, times.first_token) if t is not None]
    metrics.first_token_time = min(firsts, default=None)
    metrics.last_token_time = time.monotonic()
    metrics.num_preemptions = max(metrics.num_preemptions, delta.num_preemptions)


class _Progress:
    """A bar of finished generations with the rate of new tokens, on standard error."""

    def __init__(self, total: int, shown: bool):
        self._start = time.monotonic()
        self._tokens = 0
        self._bar: Any = None
        if shown and total:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("Generating", total=total, rate="")

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, tokens: int, finished: bool) -> None:
        self._tokens += tokens
        if self._bar is not None:
            rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
            self._bar.update(self._task, advance=int(finished), rate=f"{rate:.1f} output tokens/s")
