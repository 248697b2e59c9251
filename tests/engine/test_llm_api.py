"""The Python API over workers without a model: forms of prompts, outputs, stops, errors, and several engines in turn.

The fake model answers with the last id plus one, so the prompt [5] gives 6, 7, 8, ...
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paraflash.engine.llm as llm_module
from paraflash import LLM, SamplingParams
from paraflash.config.engine import Refused
from paraflash.config.model import ConfigError
from paraflash.engine.cli import add_arguments, run
from paraflash.engine.engine import CachesDiffer, EngineCore
from paraflash.engine.executor import EngineDeadError
from paraflash.engine.request import RequestRefused
from paraflash.engine.tokenizer import TokenizerError

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"
FAKES = "fake_runners"


@pytest.fixture(autouse=True)
def fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    use_runner(monkeypatch, "FakeRunner")


def use_runner(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    core = partial(EngineCore, runner_factory=f"{FAKES}:{name}", mesh_factory=f"{FAKES}:rank_as_mesh")
    monkeypatch.setattr(llm_module, "EngineCore", core)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(NARROW, device="cpu", step_timeout=20.0) as made:
        yield made


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **fields})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_outputs_come_in_the_order_of_the_prompts_with_vllms_fields(llm: LLM) -> None:
    got = llm.generate([{"prompt_token_ids": [50]}, {"prompt_token_ids": [5, 6, 7]}], greedy(), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [[51, 52, 53, 54], [8, 9, 10, 11]]
    first = got[0]
    assert (first.prompt, first.prompt_token_ids, first.finished, first.num_cached_tokens) == (None, [50], True, 0)
    out = first.outputs[0]
    assert (out.index, out.finish_reason, out.stop_reason, out.logprobs, out.cumulative_logprob) == (
        0, "length", None, None, None,
    )  # fmt: skip
    assert out.text == llm.get_tokenizer().decode([51, 52, 53, 54])
    assert len({o.request_id for o in got}) == 2
    m = first.metrics
    assert m is not None and m.first_scheduled_time is not None
    assert m.first_token_time is not None and m.last_token_time is not None
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.last_token_time


@pytest.mark.parametrize("prompts", ["ab", ["ab"], {"prompt": "ab"}, [{"prompt": "ab"}]])
def test_texts_are_encoded_and_kept(llm: LLM, prompts: Any) -> None:
    (got,) = llm.generate(prompts, greedy(), use_tqdm=False)
    assert got.prompt == "ab" and got.prompt_token_ids == llm.get_tokenizer().encode("ab").ids


@pytest.mark.parametrize("prompts", [[5, 6], [[5, 6]], {"prompt_token_ids": [5, 6]}, [{"prompt_token_ids": (5, 6)}]])
def test_token_ids_are_taken_as_they_are(llm: LLM, prompts: Any) -> None:
    (got,) = llm.generate(prompts, greedy(), use_tqdm=False)
    assert got.prompt_token_ids == [5, 6] and got.outputs[0].token_ids == [7, 8, 9, 10]


def test_one_params_for_all_or_one_each(llm: LLM) -> None:
    got = llm.generate([[5], [5]], [greedy(max_tokens=1), greedy(max_tokens=3)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in got] == [1, 3]
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[5], [5]], [greedy()], use_tqdm=False)
    assert llm.generate([], greedy()) == []
    assert len(llm.generate([[5]], use_tqdm=False)[0].outputs[0].token_ids) == 16  # the default of max_tokens


def test_n_samples_of_one_prompt(llm: LLM) -> None:
    (got,) = llm.generate([[5]], greedy(n=3), use_tqdm=False)
    assert [(o.index, o.token_ids) for o in got.outputs] == [(i, [6, 7, 8, 9]) for i in range(3)]


def test_the_end_of_sequence_token_ends_an_answer_without_being_shown(llm: LLM) -> None:
    (got,) = llm.generate([[383 - 2]], greedy(max_tokens=20), use_tqdm=False)  # 382, 383, 0, 1 = eos
    out = got.outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([382, 383, 0, 1], "stop", None)
    assert out.text == llm.get_tokenizer().decode([382, 383])
    (got,) = llm.generate([[383 - 2]], greedy(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert got.outputs[0].token_ids == [382, 383, 0, 1, 2, 3]


def test_stop_token_ids_and_stop_strings(llm: LLM) -> None:
    (got,) = llm.generate([[5]], greedy(max_tokens=20, stop_token_ids=[9]), use_tqdm=False)
    out = got.outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([6, 7, 8, 9], "stop", 9)
    stop = llm.get_tokenizer().decode([8, 9])
    (got,) = llm.generate([[5]], greedy(max_tokens=20, stop=[stop]), use_tqdm=False)
    out = got.outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([6, 7, 8, 9], "stop", stop)
    assert out.text == llm.get_tokenizer().decode([6, 7])
    assert llm.core.stats()["kv_usage"] == 0 and not llm.core.has_unfinished()


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([[5], []], ValueError, "the prompt is empty"),
        ("", ValueError, "the prompt is empty"),
        ({"prompt_token_ids": [384]}, ValueError, "token id 384; integers from 0 to 383"),
        ({"prompt_token_ids": [-1]}, ValueError, "token id -1"),
        ({"prompt_token_ids": [2**40]}, ValueError, "token id 1099511627776"),
        ({"prompt_token_ids": [1.5]}, ValueError, r"token id 1\.5"),
        ({"prompt_token_ids": [True]}, ValueError, "token id True"),
        ({"prompt_token_ids": [5] * 256}, ValueError, "maximum context length is 256 tokens. However, your prompt"),
        ({"prompt_token_ids": [[5]]}, ValueError, r"token id \[5\]"),
        ({}, ValueError, "neither prompt nor prompt_token_ids"),
        ({"prompt": 5}, TypeError, "prompt 5; a text"),
        ({"prompt": "a", "multi_modal_data": {}}, ValueError, "multi_modal_data.*only text"),
        (5, TypeError, "prompts is int"),
        ([None], TypeError, "prompt 0 is NoneType"),
        (b"text", TypeError, "prompts is bytes"),
        ([b"text"], TypeError, "prompt 0 is bytes"),
        ({"prompt_token_ids": 5}, TypeError, "prompt 1 has prompt_token_ids 5; a list of token ids"),
        ({"prompt_token_ids": "text"}, TypeError, "prompt 1 has prompt_token_ids 'text'; a list of token ids"),
    ],
)  # fmt: skip
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompt: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        llm.generate([[5], prompt] if isinstance(prompt, dict) else prompt, greedy(), use_tqdm=False)
    assert not llm.core.has_unfinished() and llm.core.stats()["steps"] == 0
    assert llm.generate([[5]], greedy(), use_tqdm=False)[0].outputs[0].token_ids == [6, 7, 8, 9]


@pytest.mark.parametrize("params", [{"max_tokens": 1}, "x", [None], [{}], 5])
def test_what_is_no_sampling_params_is_named(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match=r"sampling_params is .*; a SamplingParams or a list with one per prompt"):
        llm.generate([[5]], params, use_tqdm=False)


def test_a_tokenizer_that_is_not_there_is_told_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paraflash.engine.llm.EngineCore", None)
    with pytest.raises(TokenizerError, match=r"/nowhere/tokenizer\.json does not exist"):
        LLM(NARROW, device="cpu", tokenizer="/nowhere")


def test_an_unknown_keyword_is_named_with_what_was_meant() -> None:
    with pytest.raises(TypeError, match="no option 'tensor_paralel_size'; did you mean tensor_parallel_size"):
        LLM(NARROW, tensor_paralel_size=2)


def test_options_that_are_refused_say_so_before_a_process_starts() -> None:
    with pytest.raises(Refused, match="speculative decoding"):
        LLM(NARROW, speculative_config={"method": "mtp"})
    with pytest.raises(Refused, match="pipeline"):
        LLM(NARROW, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        LLM(NARROW / "nothing")


def test_torch_dtypes_and_nothing_values_are_understood() -> None:
    import torch

    with LLM(str(NARROW), dtype=torch.float32, hf_overrides=None, trust_remote_code=True, device="cpu") as llm:
        assert llm.config.dtype == "float32"


def test_an_engine_with_two_ranks_and_one_after_another() -> None:
    pids: list[int] = []
    for _ in range(2):
        llm = LLM(NARROW, device="cpu", prefill_context_parallel_size=2, check_caches=True)
        assert llm.generate([[5]], greedy(), use_tqdm=False)[0].outputs[0].token_ids == [6, 7, 8, 9]
        pids += llm.core.info()["pids"]
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate([[5]], greedy(), use_tqdm=False)
    assert len(set(pids)) == 4 and gone(pids)


def test_an_engine_that_is_dropped_ends_its_workers() -> None:
    llm = LLM(NARROW, device="cpu")
    pids = llm.core.executor.pids
    del llm
    gc.collect()
    assert gone(pids)


def test_a_killed_worker_fails_generate_and_every_later_one(llm: LLM) -> None:
    pid = llm.core.executor.pids[0]
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineDeadError, match=rf"rank 0 \(pid {pid}\).*SIGKILL"):
        for _ in range(10**6):
            llm.generate([[5]], greedy(ignore_eos=True, max_tokens=200), use_tqdm=False)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate([[5]], greedy(), use_tqdm=False)
    assert time.monotonic() - start < 2


def test_caches_that_differ_between_context_parallel_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    use_runner(monkeypatch, "CachesDiffer")
    options: dict[str, Any] = {"device": "cpu", "prefill_context_parallel_size": 2}
    with LLM(NARROW, **options) as llm:
        llm.generate([[5]], greedy(), use_tqdm=False)
    with (
        LLM(NARROW, check_caches=True, **options) as llm,
        pytest.raises(CachesDiffer, match="after step 0 the caches of rank 1 differ from those of rank 0"),
    ):
        llm.generate([[5]], greedy(), use_tqdm=False)


def test_tensor_parallel_ranks_may_hold_different_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    use_runner(monkeypatch, "CachesDiffer")
    with LLM(NARROW, device="cpu", tensor_parallel_size=2, check_caches=True) as llm:
        llm.generate([[5]], greedy(), use_tqdm=False)


def test_info_tells_topology_and_capacity() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}
    with LLM(NARROW, device="cpu", num_gpu_blocks_override=3, **options) as llm:
        info = llm.core.info()
    assert (info["tensor_parallel_size"], info["prefill_context_parallel_size"], info["world_size"]) == (2, 2, 4)
    assert info["kv_capacity_tokens"] == 2 * 64 and info["max_model_len"] == 128
    assert len(info["ranks"]) == len(set(info["pids"])) == 4
    assert json.loads(json.dumps(info)) == info


def test_the_progress_bar_counts_generations(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5], [6]], greedy())
    assert "2/2" in capfd.readouterr().err
    llm.generate([[5], [6]], greedy(), use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_a_wrong_grammar_is_refused_with_its_field(llm: LLM) -> None:
    from paraflash.engine.sampling_params import StructuredOutputs

    params = greedy(structured_outputs=StructuredOutputs(json={"type": "nonsense"}))
    with pytest.raises(RequestRefused, match="structured_outputs: Unsupported type") as error:
        llm.generate([[5]], params, use_tqdm=False)
    assert error.value.field == "structured_outputs"
    assert not llm.core.has_unfinished()


def generate_command(*words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(NARROW), "--device", "cpu", "--quiet", *words]))


def test_the_command_prints_an_answer_per_prompt(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('a line\n\n{"prompt_token_ids": [5]}\n{not json\n')
    words = ("--prompt", "one", "two", "--prompt-file", str(tmp_path / "prompts"), "--max-tokens", "3", "--json")
    assert generate_command(*words) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two", "a line", None, "{not json"]
    assert lines[3]["outputs"][0]["token_ids"] == [6, 7, 8]
    assert generate_command("--prompt", "one", "--max-tokens", "3") == 0
    assert capfd.readouterr().out.startswith("--- one\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no prompt is given"),
        (("--prompt", "a", "--temperature", "nan"), "temperature is nan"),
        (("--prompt", "a", "-pp", "2"), "pipeline"),
        (("--prompt", "a", "--speculative-config", '{"method": "mtp"}'), "speculative"),
        (("--prompt-file", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    words: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate_command(*words) == 2
    error = capfd.readouterr().err.strip()
    assert text in error and "\n" not in error


def test_a_prompt_file_is_text_with_one_prompt_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"\xff\xfe")
    assert generate_command("--prompt-file", str(path)) == 2
    assert f"--prompt-file {path} is not UTF-8 text" in capfd.readouterr().err
    text = "one\u2028still one\x85"  # separators that only a newline is not
    path.write_text(f"two\n{json.dumps({'prompt': text}, ensure_ascii=False)}\n", encoding="utf-8")
    assert generate_command("--prompt-file", str(path), "--max-tokens", "1", "--json") == 0
    assert [json.loads(line)["prompt"] for line in capfd.readouterr().out.split("\n") if line] == ["two", text]


def test_the_golden_tokens_come_out_of_a_script_with_two_ranks(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    expected = load_file(NARROW / "expected_plain.safetensors")
    ids, greedy_ids = expected["prompt.4.input_ids"].tolist(), expected["prompt.4.greedy"].tolist()
    script = tmp_path / "script.py"
    script.write_text(
        "from paraflash import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        f"    with LLM({str(NARROW)!r}, device='cpu', dtype='float32', kv_cache_rounding='none',\n"
        "             swa_bounded_replay=False, prefill_context_parallel_size=2, max_num_batched_tokens=24) as llm:\n"
        f"        out = llm.generate([{{'prompt_token_ids': {ids}}}],\n"
        "            SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1))[0]\n"
        "    print(out.outputs[0].token_ids, out.outputs[0].finish_reason)\n"
        "    best = [max(p, key=lambda t: p[t].logprob) for p in out.outputs[0].logprobs]\n"
        "    print(best, len(out.prompt_logprobs), out.prompt_logprobs[0])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(NARROW.parents[3])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines() == [f"{greedy_ids} length", f"{greedy_ids} {len(ids)} None"], done.stderr
