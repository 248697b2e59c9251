"""`paraflash bench serve` against the scripted server: prompts, counting, timing, reporting."""

import json
from pathlib import Path

import fake_openai
import pytest

from paraflash.bench.client import base_url_of
from paraflash.bench.prompts import pool_from_folder, pool_from_size, random_prompts
from paraflash.cli import main

F3_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
    "latencies", "start_times", "errors", "max_output_tokens_per_s", "max_concurrent_requests",
} | {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "narrow"


def bench(url: str, *flags: str, folder: Path | None = None) -> tuple[int, dict]:
    """Runs the command; returns its exit status and the result file."""
    save = ["--save-result", "--result-dir", str(folder), "--result-filename", "r.json"] if folder else []
    status = main(["bench", "serve", "--base-url", url, "--disable-tqdm", *flags, *save])
    return status, json.loads((folder / "r.json").read_text()) if folder else {}


def prompts_of(script: fake_openai.Script) -> list[list[int]]:
    return [request["prompt"] for request in script.requests]


SMALL = ("--random-input-len", "33", "--random-output-len", "4", "--num-prompts", "5", "--vocab-size", "1000")


def test_prompts_have_the_exact_length_and_counts_agree_with_the_server(url, script, tmp_path, capsys):
    status, result = bench(url, *SMALL, "--ignore-eos", folder=tmp_path)
    assert status == 0
    assert [len(p) for p in prompts_of(script)] == [33] * 5
    assert all(r["ignore_eos"] and r["max_tokens"] == 4 and r["stream"] for r in script.requests)
    assert result["total_input_tokens"] == 165 == script.prompt_tokens
    assert result["total_output_tokens"] == 20 == script.generated
    assert result["server_counters"] == {"prompt_tokens": 165.0, "generation_tokens": 20.0}
    assert result.keys() >= F3_KEYS
    assert "WARNING" not in capsys.readouterr().out


def test_a_seed_gives_the_same_prompts_and_another_gives_others(url, script):
    for seed in ("3", "3", "4"):
        bench(url, *SMALL, "--seed", seed)
    first, second, third = (prompts_of(script)[i : i + 5] for i in (0, 5, 10))
    assert sorted(first) == sorted(second) != sorted(third)


def test_waves_and_warm_ups_never_repeat_a_prompt_and_only_waves_count(url, script, tmp_path):
    flags = ("--num-waves", "3", "--num-warmup-waves", "2", "--num-warmups", "2")
    status, result = bench(url, *SMALL, *flags, folder=tmp_path)
    assert status == 0
    assert len({tuple(p) for p in prompts_of(script)}) == len(script.requests) == 2 + 5 * 5
    assert result["completed"] == 15 and len(result["wave_durations"]) == 3
    assert result["duration"] == pytest.approx(sum(result["wave_durations"]))


def test_measured_prompts_do_not_depend_on_the_warm_up(url, script):
    bench(url, *SMALL)
    bench(url, *SMALL, "--num-warmups", "1", "--num-warmup-waves", "1")
    assert sorted(prompts_of(script)[:5]) == sorted(prompts_of(script)[-5:])


def test_a_prefix_is_shared_and_comes_on_top_of_the_input_length(url, script):
    bench(url, *SMALL, "--random-prefix-len", "10")
    prompts = prompts_of(script)
    assert {len(p) for p in prompts} == {43}
    assert len({tuple(p[:10]) for p in prompts}) == 1 and len({tuple(p[10:]) for p in prompts}) == 5


def test_a_prompt_length_mismatch_is_reported(url, script, tmp_path, capsys):
    script.count_offset = 1
    status, result = bench(url, *SMALL, folder=tmp_path)
    assert status == 0
    assert (
        "WARNING: prompt length mismatch in 5 of 5 requests: sent 33, server counted 34 (5 x)"
        in capsys.readouterr().out
    )
    assert result["prompt_length_mismatches"][0] == {"request": 0, "sent": 33, "server": 34}


def test_missing_usage_is_reported_as_unverified(url, script, capsys):
    script.usage = False
    assert bench(url, *SMALL)[0] == 0
    assert "the server gave no usage for 5 requests" in capsys.readouterr().out


def test_timings_are_those_of_the_script(url, script, tmp_path):
    script.ttft, script.itl = 0.2, 0.05
    _, result = bench(url, *SMALL, folder=tmp_path)
    assert 200 <= result["mean_ttft_ms"] < 1000
    assert 50 <= result["median_itl_ms"] < 250
    assert result["mean_tpot_ms"] == pytest.approx(result["mean_itl_ms"], rel=0.01)
    assert 350 <= result["mean_e2el_ms"] == pytest.approx(result["mean_ttft_ms"] + 3 * result["mean_itl_ms"])


def test_a_finish_reason_in_an_event_of_its_own_is_not_a_token(url, script, tmp_path):
    script.bare_end = True
    _, result = bench(url, *SMALL, folder=tmp_path)
    assert all(len(itls) == 3 for itls in result["itls"])


def test_line_separators_within_a_token_do_not_cut_the_event(url, script, tmp_path):
    script.letter = "\u2028\x85\u2029"
    status, result = bench(url, *SMALL, "--save-detailed", folder=tmp_path)
    assert (status, result["failed"]) == (0, 0)
    assert all(text.count("\u2028\x85\u2029") == 4 for text in result["generated_texts"])


def test_max_concurrency_holds(url, script, tmp_path):
    script.ttft = 0.05
    _, result = bench(url, *SMALL, "--max-concurrency", "2", folder=tmp_path)
    assert script.peak == 2
    assert result["max_concurrent_requests"] == 2


def test_request_rate_spreads_the_requests(url, script, tmp_path):
    flags = ("--request-rate", "20", "--burstiness", "1000000")
    _, result = bench(url, *SMALL, *flags, folder=tmp_path)
    starts = sorted(result["start_times"])
    assert all(start >= 0.05 * i - 0.02 for i, start in enumerate(starts))  # late on a busy machine, never early
    assert starts[-1] < 2.0


def test_some_failures_are_counted_and_shown(url, script, tmp_path, capsys):
    script.fail_from = 4
    status, result = bench(url, *SMALL, "--max-concurrency", "1", folder=tmp_path)
    assert status == 0
    assert (result["completed"], result["failed"]) == (3, 2)
    assert "Failed: 2 x HTTP 400: max_tokens is wrong" in capsys.readouterr().out


def test_a_stream_that_ends_early_is_a_failure(url, script, tmp_path):
    script.cut_at_token = 2
    status, result = bench(url, *SMALL, folder=tmp_path)
    assert status == 1
    assert set(result["errors"]) == {"the stream ended before the answer did"}


def test_exit_status_says_that_all_failed(url, script):
    script.fail_from = 0
    assert bench(url, *SMALL)[0] == 1


def test_no_server_is_one_clear_line(capsys):
    assert bench("http://127.0.0.1:9", *SMALL)[0] == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err


def test_chat_prompts_have_the_exact_length_template_included(url, script, tmp_path, capsys):
    _, result = bench(url, *SMALL[:6], "--backend", "openai-chat", folder=tmp_path)
    assert result["input_lens"] == [33] * 5 and result["prompt_length_mismatches"] == []
    assert result["total_output_tokens"] == 20
    assert all(len(itls) == 3 for itls in result["itls"])  # the event that only names the role is no token
    assert "WARNING" not in capsys.readouterr().out


def test_chat_without_a_tokenizer_says_what_to_use_instead(url, script, capsys):
    script.no_tokenize = True
    assert bench(url, *SMALL, "--backend", "openai-chat")[0] == 2
    assert "--backend openai" in capsys.readouterr().err


def test_ids_come_from_the_folder_that_the_server_names(url, script):
    script.root = str(GOLDEN)
    assert bench(url, *SMALL[:6])[0] == 0
    assert {i for p in prompts_of(script) for i in p} <= set(range(3, 384))


def test_ids_come_from_the_tokenize_endpoint_if_nothing_else_is_known(url, script):
    assert bench(url, *SMALL[:6])[0] == 0
    assert all(100 <= i < 1100 for p in prompts_of(script) for i in p)


def test_unknown_ids_are_refused_with_the_flag_that_helps(url, script, capsys):
    script.no_tokenize = True
    assert bench(url, *SMALL[:6])[0] == 2
    assert "--vocab-size" in capsys.readouterr().err


def test_special_ids_are_never_drawn():
    pool = pool_from_folder(GOLDEN)
    assert pool is not None and pool.ids.min() == 3 and pool.ids.max() == 383
    drawn = {i for p in random_prompts(pool, 50, 200, 1, seed=0) for i in p.content}
    assert not drawn & {0, 1, 2, 385}
    assert pool_from_size(1000).ids.min() == 100 and pool_from_size(1000).ids.max() == 899


def test_lengths_vary_by_the_given_share():
    prompts = random_prompts(pool_from_size(100), 300, 100, 10, seed=0, range_ratio=0.2)
    assert {p.tokens for p in prompts} == set(range(80, 121))
    assert all(len(p.content) == p.tokens for p in prompts)
    assert {p.output_tokens for p in prompts} == {8, 9, 10, 11, 12}


@pytest.mark.parametrize(
    "flags",
    [
        ("--random-range-ratio", "1"),
        ("--num-prompts", "0"),
        ("--goodput", "itl:5"),
        ("--percentile-metrics", "ttft,foo"),
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--extra-body", "[1]"),
        ("--seed", "-1"),
    ],
)
def test_bad_flags_are_refused(url, flags):
    with pytest.raises(SystemExit) as stop:
        bench(url, *SMALL, *flags)
    assert stop.value.code == 2


def test_result_file_holds_label_metadata_and_texts(url, tmp_path):
    _, result = bench(
        url,
        *SMALL,
        "--label",
        "a",
        "--metadata",
        "gpu=H20",
        "--save-detailed",
        "--goodput",
        "ttft:5000",
        folder=tmp_path,
    )
    assert (result["label"], result["gpu"], result["model_id"]) == ("a", "H20", "fake")
    assert len(result["generated_texts"]) == 5 and result["finish_reasons"] == ["length"] * 5
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://[", "http://:80", "ftp://x", "http://a:b", "http://a:0"]
)
def test_a_url_that_cannot_be_reached_at_all_is_refused(url):
    with pytest.raises(ValueError, match="is needed") as error:
        base_url_of(url)
    assert url in str(error.value)
