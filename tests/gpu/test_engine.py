"""The golden models on a GPU: the ranks of a topology are threads that share it, so shapes and caches are true ones.

fp32 steps must give the golden logits of mode R0; bf16 steps take the fast kernels and must stay close to mode R.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from in_process import Meeting, ThreadGroup

from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config
from paraflash.engine.messages import StepInput, StepRequest
from paraflash.engine.runner import ModelRunner
from paraflash.parallel.mesh import Mesh

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


class Runner(ModelRunner):
    """Gives the raw logits of all rows of a step."""

    def _prompt_logprobs(self, rows: Tensor, request: StepRequest, offsets: np.ndarray) -> list:
        logits = self.transformer.logits(rows)  # on every rank: there is a collective in it
        return list(logits.float().cpu()) if self.mesh.rank == 0 else []


def logits_of(
    name: str, tp: int, pcp: int, dtype: str, kv: str, rounding: str, chunks: list[list[int]], device: str = "cuda"
) -> Tensor:
    """Logits [tokens, vocab] of one request that runs in these chunks of token ids, beside a second, equal request."""
    model = load_config(GOLDEN / name)
    config = EngineConfig(
        model=str(GOLDEN / name),
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv,
        kv_cache_rounding=rounding,
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        max_num_batched_tokens=512,
        max_num_seqs=2,
        num_gpu_blocks_override=20,
        enforce_eager=tp * pcp > 1,  # threads meet on the host
    )
    tps, pcps = [Meeting(tp) for _ in range(pcp)], [Meeting(pcp) for _ in range(tp)]
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    runners = []
    for rank in range(tp * pcp):
        groups = (
            ThreadGroup("tp", tp, rank % tp, meeting=tps[rank // tp]),
            ThreadGroup("pcp", pcp, rank // tp, meeting=pcps[rank % tp]),
        )
        runners.append(Runner(config, model, Mesh(rank, *groups, place)))
    rows: list[Tensor] = []
    with ThreadPoolExecutor(len(runners)) as pool:
        list(pool.map(lambda r: r.load(), runners))
        done: list[int] = []
        for chunk in chunks:
            ids = np.array(chunk, np.int32)
            requests = [
                StepRequest(
                    request_id=str(slot),
                    slot=slot,
                    token_ids=ids,
                    lookback=np.array(done[-3:], np.int32),
                    num_computed=len(done),
                    is_prefill=True,
                    block_ids=np.arange(1 + 8 * slot, 9 + 8 * slot, dtype=np.int32),
                    prompt_logprobs=1,
                    prompt_targets=np.zeros(len(ids), np.int32),
                )
                for slot in (0, 1)
            ]
            step = StepInput(0, requests)
            outputs = [pool.submit(r.execute, step) for r in runners]
            found, *_ = [o.result() for o in outputs]
            assert found is not None
            rows += found.prompt_logprobs["1"]
            done += chunk
        hashes = list(pool.map(lambda r: r.cache_hash(), runners))
    assert len(set(hashes)) == 1, "all ranks hold the same caches"
    return torch.stack(rows)


def prompt_of(golden: dict[str, Tensor], number: int, sizes: list[int]) -> list[list[int]]:
    ids, chunks = golden[f"prompt.{number}.input_ids"].tolist(), []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return [c for c in [*chunks, ids] if c]


@pytest.mark.parametrize("tp,pcp", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["narrow_fp8", "wide"])
def test_fp32_steps_give_the_golden_logits(name: str, tp: int, pcp: int) -> None:
    golden = load_file(GOLDEN / name / "expected_plain.safetensors")
    found = logits_of(name, tp, pcp, "float32", "float32", "none", prompt_of(golden, 6, [41, 1, 50]))
    assert (found - golden["prompt.6.logits"]).abs().max() < 2e-4


@pytest.mark.parametrize("kv", ["bfloat16", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("tp,pcp", [(1, 1), (1, 2)])
def test_bf16_steps_are_as_near_to_the_golden_logits_as_the_reference(kv: str, tp: int, pcp: int) -> None:
    """bf16 moves the logits of a random model far (decisions flip), on the CPU's reference kernels just as much."""
    golden = load_file(GOLDEN / "wide" / "expected.safetensors")
    wanted, chunks = golden["prompt.6.logits"], prompt_of(golden, 6, [41, 1, 50])

    def row_errors(*args: object) -> Tensor:
        found = logits_of("wide", *args)  # type: ignore[arg-type]
        return (found - wanted).norm(dim=1) / wanted.norm(dim=1)

    cuda = row_errors(tp, pcp, "bfloat16", kv, "trained", chunks)
    reference = row_errors(1, 1, "bfloat16", kv, "trained", chunks, "cpu")
    assert cuda.median() < 1.15 * reference.median()
    assert cuda.quantile(0.9) < 1.15 * reference.quantile(0.9)
