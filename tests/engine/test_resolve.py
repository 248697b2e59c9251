"""Defaults, refusals, and the flags and keywords that lead to them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import pytest

from paraflash.config.engine import EngineConfig, Refused
from paraflash.config.model import ModelConfig, load_config
from paraflash.engine.defaults import fit_to_pool, resolve
from paraflash.engine.flags import add_engine_flags, engine_config
from paraflash.engine.options import FOREIGN_OPTIONS, check_foreign_options

NARROW = "tests/data/golden/narrow"


@pytest.fixture(scope="module")
def model(golden: Any) -> ModelConfig:
    return load_config(golden("narrow"))


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest) -> Any:
    return lambda name: request.config.rootpath / "tests" / "data" / "golden" / name


def cpu(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"model": NARROW, "device": "cpu", **fields})


def test_defaults_on_the_cpu(model: ModelConfig) -> None:
    config = resolve(cpu(), model)
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cpu", "bfloat16", "nvfp4_ds_mla")
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (64, 2048, None)
    assert config.swa_bounded_replay and config.enable_prefix_caching and config.tokenizer == NARROW


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_rounding_the_cache_takes_the_compute_dtype(model: ModelConfig, dtype: str) -> None:
    config = resolve(cpu(dtype=dtype, kv_cache_rounding="none"), model)
    assert (config.dtype, config.kv_cache_dtype) == (dtype, dtype)


def test_scheduling_ahead_is_off_on_the_cpu_unless_asked_for(model: ModelConfig) -> None:
    assert resolve(cpu(), model).async_scheduling is False
    assert resolve(cpu(async_scheduling=False), model).async_scheduling is False
    assert resolve(cpu(async_scheduling=True), model).async_scheduling is True


def test_scheduling_ahead_is_on_with_gpus_unless_caches_are_looked_at(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    gpu = EngineConfig(model=NARROW, device="cuda")
    assert resolve(gpu, model).async_scheduling is True
    assert resolve(replace(gpu, async_scheduling=False), model).async_scheduling is False
    assert resolve(replace(gpu, check_caches=True), model).async_scheduling is False
    assert not caplog.text, "nobody asked for it"


def test_scheduling_ahead_is_off_with_a_word_where_caches_are_looked_at_between_steps(
    model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve(cpu(async_scheduling=True, check_caches=True), model).async_scheduling is False
    assert "--async-scheduling is off: --check-caches" in caplog.text


def test_bounded_replay_is_on_unless_results_are_to_be_exact(model: ModelConfig) -> None:
    assert resolve(cpu(), model).swa_bounded_replay is True
    assert resolve(cpu(dtype="float32"), model).swa_bounded_replay is False
    assert resolve(cpu(dtype="float32", swa_bounded_replay=True), model).swa_bounded_replay is True
    assert resolve(cpu(swa_bounded_replay=False), model).swa_bounded_replay is False
    with pytest.raises(Refused, match="swa_bounded_replay is 'yes'"):
        resolve(cpu(swa_bounded_replay="yes"), model)


def test_resolving_twice_changes_nothing(model: ModelConfig) -> None:
    once = resolve(cpu(moe_backend="marlin", max_model_len=-1), model)
    assert resolve(once, model) == once


def test_the_published_vllm_command_resolves(model: ModelConfig) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    words = (
        f"{NARROW} --language-model-only --tokenizer-mode deepseek_v41 --attention-backend FLASHMLA_SPARSE_DSV41 "
        "--kv-cache-dtype fp8_ds_mla --block-size 64 -tp 2 -pcp 2 --enable-expert-parallel "
        "--all2all-backend allgather_reducescatter --moe-backend marlin --max-num-batched-tokens 4096 "
        "--max-num-seqs 8 --gpu-memory-utilization 0.9 --no-enable-prefix-caching --no-swa-bounded-replay "
        "--enforce-eager --no-async-scheduling --trust-remote-code --device cpu"
    ).split()
    args = parser.parse_args([*words, "--engram-config", '{"cpu_offload":true}'])
    config = resolve(engine_config(args), model)
    assert (config.attention_backend, config.moe_backend) == ("reference", "reference")
    assert (config.kv_cache_dtype, config.world_size, config.max_num_batched_tokens) == ("fp8_ds_mla", 4, 4096)
    assert not config.enable_prefix_caching and not config.swa_bounded_replay


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*-tp and -pcp"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2.*replica"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2.*-pcp"),
        ({"tensor_parallel_size": 8}, "does not divide o_groups 4"),
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"tensor_parallel_size": 4, "prefill_context_parallel_size": 4}, "16 ranks for 8 routed experts"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0.*at least 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'"),
        ({"block_size": 128}, "block_size is 128.*64"),
        ({"kv_cache_dtype": "nvfp4_ds_mla", "kv_cache_rounding": "none"}, "bfloat16 or float32"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'.*nvfp4_ds_mla"),
        ({"attention_backend": "TRITON_MLA"}, "attention_backend is 'TRITON_MLA'.*FLASHMLA_SPARSE_DSV41"),
        ({"all2all_backend": "deepep_low_latency"}, "allgather_reducescatter"),
        ({"moe_backend": "aiter"}, "moe_backend is 'aiter'"),
        ({"device": "rocm"}, "device is 'rocm'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 10**6}, "max_model_len is 1000000.*256 positions"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization is nan"),
        ({"step_timeout": math.nan}, "step_timeout is nan"),
        ({"max_logprobs": -1}, "max_logprobs is -1"),
        ({"engram_config": {"gpu": 1}}, "cpu_offload"),
        ({"hf_overrides": []}, "hf_overrides is"),
        ({"enforce_eager": 1}, "enforce_eager is 1"),
        ({"max_num_batched_tokens": 2**70}, "max_num_batched_tokens is"),
    ],
)
def test_what_cannot_work_is_refused_with_the_field_and_the_alternative(
    model: ModelConfig, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        resolve(cpu(**fields), model)


def test_dense_weights_of_a_run_that_cannot_hold_one_byte_are_bf16(model: ModelConfig) -> None:
    assert resolve(cpu(), model).dense_weights == "bf16"
    assert resolve(cpu(dense_weights="bf16"), model).dense_weights == "bf16"
    with pytest.raises(Refused, match="dense_weights is 'int8'; paraflash supports auto, bf16, fp8"):
        resolve(cpu(dense_weights="int8"), model)


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("narrow_fp8", {"device": "cpu"}, "one-byte products run on a GPU, device is cpu"),
        ("narrow_fp8", {"dtype": "float32"}, "one-byte products compute in bfloat16, dtype is float32"),
        ("narrow", {"dtype": "bfloat16"}, "the linears of this checkpoint are not FP8"),
        ("narrow_fp8", {"dtype": "bfloat16"}, None),
    ],
)
def test_one_byte_dense_weights_are_left_to_the_memory_plan_or_refused(
    golden: Any, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any], why: str | None
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = EngineConfig(**{"model": NARROW, "device": "cuda", **fields})
    checkpoint = load_config(golden(name))
    assert resolve(config, checkpoint).dense_weights == ("auto" if why is None else "bf16")
    asked = replace(config, dense_weights="fp8")
    if why is None:
        assert resolve(asked, checkpoint).dense_weights == "fp8"
        return
    with pytest.raises(Refused) as refused:
        resolve(asked, checkpoint)
    assert str(refused.value) == f"dense_weights is fp8: {why}; use --dense-weights bf16 or auto"


def test_heads_that_tensor_parallelism_does_not_divide_are_refused(model: ModelConfig) -> None:
    with pytest.raises(Refused, match="does not divide moe_intermediate_size 66"):
        resolve(cpu(tensor_parallel_size=4), replace(model, moe_intermediate_size=66))


def test_heads_that_the_rounding_of_the_cache_does_not_fit_are_refused(model: ModelConfig) -> None:
    odd = replace(model, head_dim=48)
    with pytest.raises(Refused, match=r"kv_cache_rounding is trained.*multiples of 32, not 48 and 64; use none"):
        resolve(cpu(), odd)
    with pytest.raises(Refused, match=r"fp8_ds_mla needs head_dim.*use bfloat16"):
        resolve(cpu(kv_cache_rounding="none", kv_cache_dtype="fp8_ds_mla"), odd)
    assert resolve(cpu(kv_cache_rounding="none"), odd).kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["attention_backend", "moe_backend"])
def test_the_reference_kernels_are_refused_on_a_gpu(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(Refused, match=f"{name} is reference: those kernels run on the CPU alone; use auto"):
        resolve(EngineConfig(model=NARROW, device="cuda", **{name: "reference"}), model)


class TestCuda:
    """The rules for GPUs, on a machine that may have none."""

    @pytest.fixture(autouse=True)
    def _two_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        monkeypatch.setattr("torch.version.hip", None)

    def resolve(self, model: ModelConfig, **fields: Any) -> EngineConfig:
        return resolve(EngineConfig(model=NARROW, **fields), model)

    def test_defaults(self, model: ModelConfig) -> None:
        config = self.resolve(model)
        assert (config.device, config.kv_cache_dtype, config.max_num_seqs) == ("cuda", "bfloat16", 256)
        assert config.max_num_batched_tokens == 8192

    def test_more_ranks_than_gpus(self, model: ModelConfig) -> None:
        with pytest.raises(Refused, match="needs 4 GPUs, but 2 are visible"):
            self.resolve(model, tensor_parallel_size=2, prefill_context_parallel_size=2)

    def test_float32_cache(self, model: ModelConfig) -> None:
        with pytest.raises(Refused, match="float32 on cuda"):
            self.resolve(model, kv_cache_dtype="float32")

    def test_rocm(self, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.version.hip", "6.4")
        with pytest.raises(Refused, match="ROCm"):
            self.resolve(model)

    def test_graphs_are_off_in_float32(self, model: ModelConfig) -> None:
        assert self.resolve(model, dtype="float32").enforce_eager
        assert not self.resolve(model, dtype="bfloat16", prefill_context_parallel_size=2).enforce_eager

    def test_marlin_means_humming(self, model: ModelConfig) -> None:
        assert self.resolve(model, moe_backend="marlin").moe_backend == "humming"


def test_cuda_without_a_gpu_is_refused(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Refused, match="--device cpu"):
        resolve(EngineConfig(model=NARROW, device="cuda"), model)
    assert resolve(EngineConfig(model=NARROW), model).device == "cpu"


def test_the_context_is_what_model_and_pool_allow(model: ModelConfig) -> None:
    config = resolve(cpu(), model)
    assert fit_to_pool(config, model, num_blocks=1000).max_model_len == 256
    assert fit_to_pool(config, model, num_blocks=3).max_model_len == 128
    assert fit_to_pool(replace(config, max_model_len=200), model, num_blocks=3).max_model_len == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_config", {"method": "mtp"}),
        ("kv_transfer_config", {"kv_connector": "X"}),
        ("enable_lora", True),
        ("limit_mm_per_prompt", {"image": 1}),
        ("enable_dbo", True),
        ("enable_chunked_prefill", False),
        ("cp_kv_cache_interleave_size", 64),
        ("nnodes", 2),
        ("language_model_only", False),
    ],
)
def test_options_of_vllm_that_are_missing_here_are_refused_with_a_reason(name: str, value: Any) -> None:
    with pytest.raises(Refused) as error:
        check_foreign_options({name: value})
    assert name.replace("_", "-") in str(error.value) and FOREIGN_OPTIONS[name].reason in str(error.value)


def test_options_that_change_nothing_are_accepted() -> None:
    check_foreign_options(
        {"trust_remote_code": True, "limit_mm_per_prompt": {"image": 0}, "nnodes": 1, "enable_lora": False}
    )


def flags(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_flags(parser)
    return engine_config(parser.parse_args(["folder", *words]))


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("32k", 32000), ("32K", 32768), ("1M", 1048576), ("25.6k", 25600), ("auto", None), ("-1", None)],
)
def test_lengths_are_read_as_people_write_them(text: str, value: int | None) -> None:
    assert flags(f"--max-model-len={text}").max_model_len == value


@pytest.mark.parametrize("text", ["", "k", "1.0001k", "-5", "4096x", "NaN"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="max-model-len"):
        flags(f"--max-model-len={text}")


def test_flags_that_are_not_given_leave_the_defaults() -> None:
    assert flags() == EngineConfig(model="folder")


def test_json_flags_need_objects() -> None:
    assert flags("--hf-overrides", '{"text_config": {"num_hidden_layers": 2}}').hf_overrides["text_config"]
    for text in ("[1]", "{", "3"):
        with pytest.raises(argparse.ArgumentError):
            flags("--hf-overrides", text)


def test_a_refused_flag_is_refused_when_the_configuration_is_made() -> None:
    with pytest.raises(Refused, match="speculative"):
        flags("--speculative-config", '{"method": "mtp"}')
