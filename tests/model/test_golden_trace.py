"""Every intermediate value that the golden files hold, through the paged caches, whole and in chunks (mode R0)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config
from paraflash.engine.messages import StepInput, StepRequest
from paraflash.parallel.mesh import init_mesh

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from logits_runner import LogitsRunner

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
TRACED = [
    "streams", "pre_mix", "attn_out", "ffn_out", "latent_prerope", "topk", "candidate_mask",
    "router_indices", "router_weights", "engram.hash_ids",
]  # fmt: skip


def load_runner(name: str, rounding: str = "none", kv_cache_dtype: str = "float32") -> LogitsRunner:
    folder = GOLDEN / name
    model = load_config(folder)
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_rounding=rounding,
        max_num_seqs=2,
        num_gpu_blocks_override=8,
    )
    runner = LogitsRunner(config, model, init_mesh(0, 1, 1, "cpu"))
    runner.load()
    return runner


def prefill(runner: LogitsRunner, ids: np.ndarray, chunk: int) -> torch.Tensor:
    """Logits [n, vocab] of a prompt run in chunks."""
    rows = []
    for start in range(0, len(ids), chunk):
        new = ids[start : start + chunk]
        request = StepRequest(
            "x", 1, new, ids[max(0, start - 3) : start], start, True, np.array([4, 2, 7], np.int32),
            prompt_logprobs=1, prompt_targets=np.zeros(len(new), np.int32),
        )  # fmt: skip
        output = runner.execute(StepInput(0, [request]))
        assert output is not None
        rows += [torch.from_numpy(row) for row in output.prompt_logprobs["x"]]
    return torch.stack(rows)


def entry_sets(rows: torch.Tensor) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in rows]


@pytest.mark.parametrize("name", ["narrow", "narrow_fp8", "wide"])
@pytest.mark.parametrize("chunk", [200, 7])
def test_every_traced_value_agrees(name, chunk):
    golden = load_file(GOLDEN / name / "expected_plain.safetensors")
    ids = golden[f"prompt.{int(golden['trace.prompt'])}.input_ids"].numpy().astype(np.int32)
    runner = load_runner(name)
    runner.poison()
    runner.start_probe(TRACED)
    prefill(runner, ids, chunk)
    seen = runner.take_probe()
    compared = 0
    for key, want in golden.items():
        name_of = key.removeprefix("trace.")
        if name_of == key or name_of not in seen:
            continue
        parts = [v for v in seen[name_of] if v is not None]
        if name_of.endswith("topk"):
            assert entry_sets(torch.cat(parts)) == entry_sets(want), key
        elif name_of.endswith("candidate_mask"):
            rows = [row for masks in parts for mask in masks for row in mask]
            for t, row in enumerate(rows):
                # Later chunks know later entries; blocks beyond the row's last visible one never count.
                assert torch.equal(row.nonzero()[:, 0], want[t, : len(row)].nonzero()[:, 0]), (key, t)
        elif name_of == "engram.hash_ids":
            assert np.array_equal(np.concatenate(parts), want.numpy()), key
        elif name_of.endswith("router_indices"):
            assert torch.equal(torch.cat(parts).sort(1).values, want.long().sort(1).values), key
        elif name_of.endswith("router_weights"):
            assert torch.allclose(torch.cat(parts).sort(1).values, want.sort(1).values, atol=1e-4), key
        else:
            assert torch.allclose(torch.cat(parts), want, atol=2e-4, rtol=1e-4), key
        compared += 1
    layers = len(runner.model_config.layers)
    assert compared >= 6 * layers, f"only {compared} values were compared"


@pytest.mark.parametrize("name", ["narrow", "narrow_fp8", "wide"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "nvfp4_ds_mla"])
def test_mode_r_logits_agree_where_the_prompt_is_stable(name, kv_cache_dtype):
    # Chunks of 16: the golden files measured stability for pieces of 7 and 16; other pieces find other borders.

    golden = load_file(GOLDEN / name / "expected.safetensors")
    stability = json.loads((GOLDEN / name / "stability.json").read_text())
    runner = load_runner(name, "trained", kv_cache_dtype)
    for i, stable in enumerate(s["stable"] for s in stability):
        logits = prefill(runner, golden[f"prompt.{i}.input_ids"].numpy().astype(np.int32), 16)
        want = golden[f"prompt.{i}.logits"]
        if stable:
            assert (logits - want).abs().max() < 2e-3, f"prompt {i}"
        else:
            cosine = torch.nn.functional.cosine_similarity(logits, want)
            assert cosine.mean() > 0.98 and cosine.min() > 0.85, f"prompt {i}"
            assert (logits.argmax(1) == want.argmax(1)).float().mean() > 0.85, f"prompt {i}"


def test_the_trained_cache_records_change_nothing_that_the_trained_rounding_does_not():
    ids = np.arange(5, 100, dtype=np.int32)
    exact = prefill(load_runner("narrow_fp8", "trained", "float32"), ids, 23)
    records = prefill(load_runner("narrow_fp8", "trained", "nvfp4_ds_mla"), ids, 23)
    assert torch.equal(exact, records)
