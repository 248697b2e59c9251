"""Request timings become the serving figures that users of `vllm bench serve` know, and their printed block.

An `Outcome` is one request as the client saw it; a `Wave` is the outcomes of requests that were offered together. All
times are seconds of one monotonic clock; the figures are in ms and tokens/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# metric: (section title, short name, how it is written in a section)
METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


@dataclass
class Outcome:
    """One request as the client saw it. `chunk_times` are the arrivals of the stream events that carried tokens."""

    sent_tokens: int | None = None  # prompt length asked for; None where it is not known in tokens
    start: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None  # as counted by the server
    completion_tokens: int | None = None  # as counted by the server
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    end: float = 0.0  # only needed for failures, which have no last token
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.start

    @property
    def latency(self) -> float:
        return self.chunk_times[-1] - self.start

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def input_tokens(self) -> int:
        """The server's count where it gave one, else what was sent."""
        return self.prompt_tokens if self.prompt_tokens is not None else self.sent_tokens or 0

    @property
    def output_tokens(self) -> int:
        """The server's count where it gave one, else one token per stream event."""
        return self.completion_tokens if self.completion_tokens is not None else len(self.chunk_times)

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass
class Wave:
    outcomes: list[Outcome]
    duration: float  # seconds from the first request's due time to the last answer


def prompt_mismatches(outcomes: Sequence[Outcome]) -> list[dict[str, int]]:
    """Requests whose prompt the server counted differently from what was sent."""
    return [
        {"request": i, "sent": o.sent_tokens, "server": o.prompt_tokens}
        for i, o in enumerate(outcomes)
        if o.ok and o.sent_tokens is not None and o.prompt_tokens is not None and o.sent_tokens != o.prompt_tokens
    ]


def peak_tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """Most output tokens within one second, on a grid of seconds that starts with the first request.

    A stream event that carries several tokens counts as its share of the request's tokens.
    """
    done = [o for o in outcomes if o.ok]
    if not done:
        return 0.0
    first = min(o.start for o in done)
    buckets: dict[int, float] = {}
    for o in done:
        share = o.output_tokens / len(o.chunk_times)
        for t in o.chunk_times:
            buckets[int(t - first)] = buckets.get(int(t - first), 0.0) + share
    return max(buckets.values())


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at one instant."""
    events = sorted([(o.start, 1) for o in outcomes if o.ok] + [(o.start + o.latency, -1) for o in outcomes if o.ok])
    running = peak = 0
    for _, change in events:  # at equal times -1 sorts first: the ended request is no longer in flight
        running += change
        peak = max(peak, running)
    return peak


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"


def describe(seconds: Sequence[float], metric: str, percentiles: Sequence[float]) -> dict[str, float]:
    """{mean,median,std,pNN}_{metric}_ms of a list of seconds; zeros if it is empty."""
    values = np.asarray(seconds if len(seconds) else [0.0], dtype=np.float64) * 1000.0
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {percentile_name(p): np.percentile(values, p) for p in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in found.items()}


def _is_good(outcome: Outcome, goals: dict[str, float]) -> bool:
    reached = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(reached[name] * 1000.0 <= limit for name, limit in goals.items())


def summarize(
    waves: Sequence[Wave], percentiles: Sequence[float] = (99.0,), goals: dict[str, float] | None = None
) -> dict[str, Any]:
    """All figures of a run under the names of vLLM's result file.

    Waves are pooled: latencies of all requests together, and tokens over the sum of the waves' durations, so the pause
    between two waves does not count. `goals` are upper limits in ms for `request_goodput`. Failed requests count as
    failed and in nothing else; their entries in the per-request lists are 0 or empty.
    """
    outcomes = [o for wave in waves for o in wave.outcomes]
    done = [o for o in outcomes if o.ok]
    duration = sum(wave.duration for wave in waves)
    total_input, total_output = sum(o.input_tokens for o in done), sum(o.output_tokens for o in done)

    def per_second(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    origin = min((o.start for o in outcomes), default=0.0)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": per_second(len(done)),
        "request_goodput": per_second(sum(_is_good(o, goals) for o in done)) if goals else None,
        "input_throughput": per_second(total_input),
        "output_throughput": per_second(total_output),
        "total_token_throughput": per_second(total_input + total_output),
        "max_output_tokens_per_s": peak_tokens_per_second(outcomes),
        "max_concurrent_requests": peak_concurrency(outcomes),
    }
    series = {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done if o.tpot is not None],
        "itl": [gap for o in done for gap in o.itls],
        "e2el": [o.latency for o in done],
    }
    for metric, values in series.items():
        result |= describe(values, metric, percentiles)
    return result | {
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens if o.ok else 0 for o in outcomes],
        "ttfts": [o.ttft if o.ok else 0.0 for o in outcomes],
        "itls": [o.itls if o.ok else [] for o in outcomes],
        "latencies": [o.latency if o.ok else 0.0 for o in outcomes],
        "start_times": [o.start - origin for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
        "cached_tokens": sum(o.cached_tokens or 0 for o in done),
        "prompt_length_mismatches": prompt_mismatches(outcomes),
        "prompt_lengths_unverified": sum(o.prompt_tokens is None for o in done),
    }


def _row(label: str, value: int | float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


def format_block(
    result: dict[str, Any],
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99.0,),
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
) -> str:
    """The printed result block of `vllm bench serve`: labels 40 wide, rulers 50 wide."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += [_row("Successful requests:", result["completed"]), _row("Failed requests:", result["failed"])]
    if max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", max_concurrency))
    if math.isfinite(request_rate):
        lines.append(_row("Request rate configured (RPS):", float(request_rate)))
    lines += [
        _row("Benchmark duration (s):", float(result["duration"])),
        _row("Total input tokens:", result["total_input_tokens"]),
        _row("Total generated tokens:", result["total_output_tokens"]),
        _row("Request throughput (req/s):", float(result["request_throughput"])),
    ]
    if result["request_goodput"] is not None:
        lines.append(_row("Request goodput (req/s):", float(result["request_goodput"])))
    lines += [
        _row("Output token throughput (tok/s):", float(result["output_throughput"])),
        _row("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"])),
        _row("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        _row("Total token throughput (tok/s):", float(result["total_token_throughput"])),
    ]
    for metric in metrics:
        title, short = METRICS[metric]
        lines.append(f"{title:-^50}")
        for name in ("mean", "median", *map(percentile_name, percentiles)):
            shown = name.upper() if name.startswith("p") else name.capitalize()
            lines.append(_row(f"{shown} {short} (ms):", float(result[f"{name}_{metric}_ms"])))
    return "\n".join([*lines, "=" * 50])
