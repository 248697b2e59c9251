"""The figures of a run against an example that is computed by hand."""

import math

import pytest

from paraflash.bench.arrivals import Arrivals
from paraflash.bench.stats import Outcome, Wave, format_block, peak_concurrency, summarize


def outcome(start: float, *arrivals: float, prompt: int = 10, tokens: int | None = None) -> Outcome:
    count = len(arrivals) if tokens is None else tokens
    return Outcome(
        sent_tokens=prompt,
        start=start,
        chunk_times=list(arrivals),
        prompt_tokens=prompt,
        completion_tokens=count,
        finish_reason="length",
    )


# Two waves: [A, B] lasting 2 s and [C, one failure] lasting 3 s.
A = outcome(100.0, 100.1, 100.3, 100.5)  # ttft 100, itl 200 200, tpot 200, e2el 500
B = outcome(100.0, 100.3, 101.3)  # ttft 300, itl 1000, tpot 1000, e2el 1300
C = outcome(200.0, 200.2, prompt=20)  # ttft 200, one token: no tpot, e2el 200
FAILED = Outcome(sent_tokens=10, start=200.0, error="HTTP 500: no")
WAVES = [Wave([A, B], 2.0), Wave([C, FAILED], 3.0)]


def test_figures_equal_those_computed_by_hand():
    r = summarize(WAVES)
    assert (r["completed"], r["failed"], r["duration"]) == (3, 1, 5.0)
    assert (r["total_input_tokens"], r["total_output_tokens"]) == (40, 6)
    assert r["request_throughput"] == pytest.approx(0.6)
    assert r["input_throughput"] == pytest.approx(8.0)
    assert r["output_throughput"] == pytest.approx(1.2)
    assert r["total_token_throughput"] == pytest.approx(9.2)
    assert r["mean_ttft_ms"] == pytest.approx(200.0)
    assert r["median_ttft_ms"] == pytest.approx(200.0)
    assert r["std_ttft_ms"] == pytest.approx(math.sqrt(20000 / 3))
    assert r["p99_ttft_ms"] == pytest.approx(298.0)  # 200 + 0.98 * 100, linear between the two largest
    assert r["mean_tpot_ms"] == pytest.approx(600.0)
    assert r["mean_itl_ms"] == pytest.approx(1400 / 3)
    assert r["median_itl_ms"] == pytest.approx(200.0)
    assert r["mean_e2el_ms"] == pytest.approx(2000 / 3)
    assert r["request_goodput"] is None


def test_per_request_lists_keep_the_place_of_a_failed_request():
    r = summarize(WAVES)
    assert r["input_lens"] == [10, 10, 20, 10]
    assert r["output_lens"] == [3, 2, 1, 0]
    assert r["ttfts"] == pytest.approx([0.1, 0.3, 0.2, 0.0])
    assert [len(i) for i in r["itls"]] == [2, 1, 0, 0]
    assert r["latencies"] == pytest.approx([0.5, 1.3, 0.2, 0.0])
    assert r["start_times"] == [0.0, 0.0, 100.0, 100.0]
    assert r["errors"] == ["", "", "", "HTTP 500: no"]


def test_goodput_counts_requests_within_every_limit():
    # ttft <= 200 holds for A and C, tpot <= 500 too (C has a single token, so no time per further token)
    assert summarize(WAVES, goals={"ttft": 200.001, "tpot": 500.0})["request_goodput"] == pytest.approx(2 / 5)
    assert summarize(WAVES, goals={"e2el": 250.0})["request_goodput"] == pytest.approx(1 / 5)


def test_peak_output_throughput_counts_tokens_per_second_of_the_run():
    # first second: A's three tokens and B's first
    assert summarize(WAVES)["max_output_tokens_per_s"] == 4.0


def test_an_event_with_several_tokens_counts_as_all_of_them():
    r = summarize([Wave([outcome(0.0, 0.5, 1.5, tokens=8)], 2.0)])
    assert r["total_output_tokens"] == 8
    assert r["max_output_tokens_per_s"] == 4.0
    assert r["mean_tpot_ms"] == pytest.approx(1000 / 7)


def test_peak_concurrency_is_that_of_one_instant():
    assert peak_concurrency([A, B, C]) == 2
    back_to_back = [outcome(0.0, 1.0), outcome(1.0, 2.0)]
    assert peak_concurrency(back_to_back) == 1


def test_no_successful_request_gives_zeros_and_no_nan():
    r = summarize([Wave([FAILED], 1.0)])
    assert (r["completed"], r["failed"]) == (0, 1)
    assert all(v == 0.0 for k, v in r.items() if k.endswith("_ms"))
    assert "Mean TTFT (ms):                          0.00" in format_block(r)


def test_counts_fall_back_to_what_was_sent_and_received():
    bare = Outcome(sent_tokens=7, start=0.0, chunk_times=[0.1, 0.2], finish_reason="stop")
    r = summarize([Wave([bare], 1.0)])
    assert (r["total_input_tokens"], r["total_output_tokens"], r["prompt_lengths_unverified"]) == (7, 2, 1)


def test_a_wrong_prompt_length_is_listed_with_both_counts():
    wrong = outcome(0.0, 0.1, prompt=11)
    wrong.sent_tokens = 10
    assert summarize([Wave([A, wrong], 1.0)])["prompt_length_mismatches"] == [{"request": 1, "sent": 10, "server": 11}]


def test_block_has_the_lines_widths_and_order_of_vllm():
    r = summarize(WAVES, goals={"ttft": 1000.0})
    text = format_block(r, ("ttft", "tpot", "itl", "e2el"), (99.0,), max_concurrency=4, request_rate=2.0)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:14] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           2.00",
        "Benchmark duration (s):                  5.00",
        "Total input tokens:                      40",
        "Total generated tokens:                  6",
        "Request throughput (req/s):              0.60",
        "Request goodput (req/s):                 0.60",
        "Output token throughput (tok/s):         1.20",
        "Peak output token throughput (tok/s):    4.00",
        "Peak concurrent requests:                2.00",
        "Total token throughput (tok/s):          9.20",
    ]
    assert lines[14:] == [
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00",
        "Median TTFT (ms):                        200.00",
        "P99 TTFT (ms):                           298.00",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          600.00",
        "Median TPOT (ms):                        600.00",
        "P99 TPOT (ms):                           992.00",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           466.67",
        "Median ITL (ms):                         200.00",
        "P99 ITL (ms):                            984.00",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          666.67",
        "Median E2EL (ms):                        500.00",
        "P99 E2EL (ms):                           1284.00",
        "==================================================",
    ]


def test_block_leaves_out_what_was_not_asked_for():
    text = format_block(summarize(WAVES, (50.0, 99.9)), ("ttft",), (50.0, 99.9))
    for absent in ("concurrency:", "configured", "goodput", "TPOT", "E2EL"):
        assert absent not in text
    assert "P50 TTFT (ms):" in text and "P99.9 TTFT (ms):" in text


def test_poisson_gaps_have_the_rate_as_mean_and_are_repeatable():
    times = Arrivals(rate=50.0).times(4000, [1])
    assert times[0] == 0.0 and times == sorted(times)
    assert 3999 / times[-1] == pytest.approx(50.0, rel=0.06)
    assert times == Arrivals(rate=50.0).times(4000, [1])
    assert times != Arrivals(rate=50.0).times(4000, [2])


def test_high_burstiness_makes_gaps_even():
    even = Arrivals(rate=10.0, burstiness=1e6).times(20, [0])
    assert even == pytest.approx([i / 10 for i in range(20)], rel=0.02)


def test_infinite_rate_sends_all_at_once():
    assert Arrivals().times(3, [0]) == [0.0, 0.0, 0.0]


def test_ramp_goes_from_its_first_to_its_last_rate():
    linear = Arrivals(ramp="linear", ramp_start=1.0, ramp_end=9.0)
    assert [linear.rate_at(i, 5) for i in range(5)] == [1.0, 3.0, 5.0, 7.0, 9.0]
    doubling = Arrivals(ramp="exponential", ramp_start=1.0, ramp_end=16.0)
    assert [doubling.rate_at(i, 5) for i in range(5)] == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])
