"""Prometheus metrics: vLLM's names behind a prefix of our own (or `vllm`, for dashboards that exist).

Per-request histograms are observed here, in the HTTP process; gauges and engine counters come from the last stats that
the engine sent, read when a scrape asks for them. All times are seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paraflash.engine.request import Times

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FEW = (1, 2, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _TTFT),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _TOKEN),
    "request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first.", _TOKEN),
    "e2e_request_latency_seconds": ("Arrival to end.", _REQUEST),
    "request_queue_time_seconds": ("Arrival to first step.", _REQUEST),
    "request_prefill_time_seconds": ("First step to first token.", _REQUEST),
    "request_decode_time_seconds": ("First token to last token.", _REQUEST),
    "request_inference_time_seconds": ("First step to last token.", _REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNT),
    "request_generation_tokens": ("Output tokens of a request.", _COUNT),
    "request_params_max_tokens": ("max_tokens of a request.", _COUNT),
    "request_params_n": ("n of a request.", _FEW),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, those from the prefix cache left out.", _COUNT),
    "request_num_preemptions": ("Preemptions of a request.", _FEW),
    "iteration_tokens_total": ("Prompt and output tokens of an engine step.", _STEP),
}
_GAUGES = {  # metric: key of the engine's stats, text
    "num_requests_running": ("running", "Requests that the engine is running."),
    "num_requests_waiting": ("waiting", "Requests that wait for the engine."),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV blocks in use, 0 to 1."),
}
_ENGINE_COUNTERS = {
    "num_preemptions": ("preemptions", "Preemptions."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
}


class _EngineCollector(Collector):
    """Turns the engine's latest stats into samples at scrape time."""

    def __init__(self, prefix: str, labels: dict[str, str], stats: Callable[[], dict[str, Any]], info: dict[str, str]):
        self.prefix, self.labels, self.stats, self.info = prefix, labels, stats, info

    def collect(self) -> Iterator[Metric]:
        stats, names, values = self.stats(), list(self.labels), list(self.labels.values())
        for name, (key, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=names)
            gauge.add_metric(values, float(stats.get(key, 0)))
            yield gauge
        for name, (key, text) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=names)
            counter.add_metric(values, float(stats.get(key, 0)))
            yield counter
        asleep = GaugeMetricFamily(
            f"{self.prefix}:engine_sleep_state", "1 for the state it is in.", labels=[*names, "sleep_state"]
        )
        asleep.add_metric([*values, "awake"], 1.0)
        yield asleep
        config = GaugeMetricFamily(
            f"{self.prefix}:cache_config_info", "KV cache settings.", labels=[*names, *self.info]
        )
        config.add_metric([*values, *self.info.values()], 1.0)
        yield config
        times = CounterMetricFamily(
            f"{self.prefix}:step_time_seconds",
            "Time of engine steps by component, rank 0.",
            labels=[*names, "component"],
        )
        for component, seconds in sorted(stats.get("timings", {}).items()):
            times.add_metric([*values, component], float(seconds))
        yield times


class Metrics:
    """`stats` returns the engine's latest stats; `info` are the labels of cache_config_info."""

    def __init__(self, prefix: str, model_name: str, stats: Callable[[], dict[str, Any]], info: dict[str, str]):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        names = list(self._labels)
        self.registry.register(_EngineCollector(prefix, self._labels, stats, info))
        self._histograms = {
            name: Histogram(f"{prefix}:{name}", text, names, registry=self.registry, buckets=buckets).labels(
                **self._labels
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, names, registry=self.registry).labels(**self._labels)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests whose prefill is done.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Output tokens.")
        self._success = Counter(
            f"{prefix}:request_success", "Finished requests.", [*names, "finished_reason"], registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._window: deque[tuple[float, float, float]] = deque(maxlen=11)  # time, prompt tokens, output tokens
        self._prompt_total = self._output_total = 0.0

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def request_taken(self, n: int, max_tokens: int | None) -> None:
        self.observe("request_params_n", n)
        if max_tokens is not None:
            self.observe("request_params_max_tokens", max_tokens)

    def tokens_arrived(self, count: int, now: float, last: float | None, arrival: float) -> None:
        """`count` output tokens of one request came at `now`; the ones before at `last` (None: there are none)."""
        self.generation_tokens.inc(count)
        self._output_total += count
        if last is None:
            self.observe("time_to_first_token_seconds", now - arrival)
        else:
            self.observe("inter_token_latency_seconds", now - last)

    def prefill_done(self, prompt_tokens: int, cached: int) -> None:
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(cached)
        self._prompt_total += prompt_tokens

    def request_finished(
        self,
        reason: str,
        prompt: int,
        generated: int,
        cached: int,
        preemptions: int,
        latency: float,
        times: Times | None,
    ) -> None:
        """`times` are the engine's moments of the request; None if it never got to a step."""
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self.observe("e2e_request_latency_seconds", latency)
        self.observe("request_prompt_tokens", prompt)
        self.observe("request_generation_tokens", generated)
        self.observe("request_num_preemptions", preemptions)
        if times is None or times.scheduled is None:
            return
        self.observe("request_queue_time_seconds", times.scheduled - times.arrival)
        if times.first_token is None:
            return
        self.observe("request_prefill_kv_computed_tokens", prompt - cached)
        self.observe("request_prefill_time_seconds", times.first_token - times.scheduled)
        if times.finished is not None:
            decode = times.finished - times.first_token
            self.observe("request_decode_time_seconds", decode)
            self.observe("request_inference_time_seconds", times.finished - times.scheduled)
            if generated > 1:
                self.observe("request_time_per_output_token_seconds", decode / (generated - 1))

    def step_done(self, tokens: int) -> None:
        if tokens > 0:
            self.observe("iteration_tokens_total", tokens)

    def tick(self) -> None:
        """Call about once a second: keeps the window that `throughput` looks at."""
        self._window.append((time.monotonic(), self._prompt_total, self._output_total))

    def throughput(self) -> tuple[float, float]:
        """Prompt and output tokens per second over the last ten ticks."""
        if len(self._window) < 2:
            return 0.0, 0.0
        (t0, p0, g0), (t1, p1, g1) = self._window[0], self._window[-1]
        return ((p1 - p0) / (t1 - t0), (g1 - g0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
