"""Recorded forward passes that run again on other inputs, without a GPU: a recorded pass is here the call itself.

What a replay reads are then the tensors of the recorded step with the content of a later one, as on a GPU; numbers that
were looked at on the host stay those of the recorded step. Results must be those of an engine that records nothing.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import in_process
import numpy as np
import pytest
import torch
from in_process import GREEDY, Answer, generate, local_engine
from logits_runner import LogitsRunner
from random_models import random_text_config, write_model
from torch import Tensor

from paraflash.cache.window import Span
from paraflash.config.model import load_config
from paraflash.engine.decode_step import padded_rows
from paraflash.engine.engine import EngineCore
from paraflash.engine.graphs import StepGraphs
from paraflash.engine.messages import StepInput, StepOutput
from paraflash.engine.sampling_params import SamplingParams
from paraflash.kernels.interface import IndexRows
from paraflash.model.batch import build_batch, plan_of
from paraflash.model.decode_batch import DecodeStep, build_decode_batch
from paraflash.model.inputs import Inputs, Packed
from paraflash.parallel.mesh import Group, Mesh

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"


class BoundedKernels:
    """Kernels that take the number of entries from its bound, which recorded passes of one signature share."""

    def __init__(self, kernels: Any):
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def select_entries(
        self, q: Tensor, weights: Tensor, pool: Any, rows: IndexRows, *args: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        most = min(rows.width, rows.block_tables.shape[1] * rows.entries)
        rows = replace(rows, visible_host=np.full(len(q), most))
        found: tuple[Tensor, Any] = self._kernels.select_entries(q, weights, pool, rows, *args, **options)
        return found


class ReplayingRunner(LogitsRunner):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.kernels = BoundedKernels(self.kernels)  # type: ignore[assignment]
        self.graphs = StepGraphs(self.mesh, self._record)
        self.launches: list[int] = []  # of each step: number of the recorded pass that ran, 0 for none

    def _record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        assert self.graphs is not None
        number = self.graphs.captures + 1

        def replay() -> Tensor:
            self.launches[-1] = number
            return run()

        return replay

    def execute(self, step: StepInput) -> StepOutput | None:
        self.launches.append(0)
        return super().execute(step)


Prompts = dict[str, tuple[list[int], SamplingParams]]


@contextmanager
def engine_of(folder: Path, tp: int, pcp: int, runner: Any = ReplayingRunner, **options: Any) -> Iterator[EngineCore]:
    """Caches start as NaN, the null block and the spare slot too; those of all ranks are compared after each step."""
    with mock.patch.object(in_process, "LogitsRunner", runner), local_engine(folder, tp, pcp, **options) as core:
        yield core


def counts_of(core: EngineCore) -> tuple[int, int]:
    """Passes recorded and replayed. NCCL demands of all ranks that they record the same steps and replay the same."""
    runners = core.executor.runners
    for other in runners[1:]:
        assert other.launches == runners[0].launches
    graphs = runners[0].graphs
    return graphs.captures, graphs.replays


def compare(found: dict[str, Answer], wanted: dict[str, Answer]) -> None:
    for name, want in wanted.items():
        answer = found[name]
        if want.rows:
            assert np.abs(np.stack(answer.rows) - np.stack(want.rows)).max() < 1e-4
        assert answer.tokens == want.tokens, name
        assert np.allclose(answer.logprobs, want.logprobs, atol=1e-4)


def ids(r: random.Random, length: int, vocab: int = 270) -> list[int]:
    return [r.randrange(3, vocab) for _ in range(length)]


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("seed", range(400, 406))
def test_replayed_passes_give_what_passes_of_their_own_give(seed: int, tp: int, pcp: int, tmp_path: Path) -> None:
    r = random.Random(seed)
    write_model(tmp_path, random_text_config(seed, tp, pcp), seed)
    prompts = {
        f"r{i}": (ids(r, n), SamplingParams(max_tokens=r.choice([9, 14, 30]), prompt_logprobs=1, logprobs=0, **GREEDY))
        for i, n in enumerate(r.sample([1, 2, 17, 64, 70, 128, 129, 192], 5))
    }
    options = {
        "max_num_batched_tokens": r.choice([64, 128]),
        "num_gpu_blocks_override": r.choice([8, 24]),
        "swa_bounded_replay": bool(seed % 2),
        "enable_prefix_caching": True,
    }
    with engine_of(tmp_path, tp, pcp, LogitsRunner, **options) as core:
        wanted = generate(core, prompts)
    with engine_of(tmp_path, tp, pcp, **options) as core:
        compare(generate(core, prompts), wanted)
        captures, replays = counts_of(core)
    assert 0 < captures < replays


GREEDY_5 = SamplingParams(max_tokens=5, **GREEDY)


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (1, 2)])
def test_decode_steps_of_any_positions_and_any_number_of_rows_of_a_bucket_are_one_pass(
    tp: int, pcp: int, tmp_path: Path
) -> None:
    write_model(tmp_path, random_text_config(7, tp, pcp) | {"index_topk": 64}, 7)
    with engine_of(tmp_path, tp, pcp, num_gpu_blocks_override=40) as core:
        r = random.Random(1)
        prompts = [{f"{n}": (ids(r, n), GREEDY_5) for n in lengths} for lengths in ((3, 4, 7), (1, 5, 12, 20), (9, 30))]
        generate(core, prompts[0])
        assert counts_of(core) == (1, 3), "four decode steps: one runs as it is, one is recorded, and it is replayed"
        generate(core, prompts[1])
        assert counts_of(core) == (1, 7)
        generate(core, prompts[2])  # two rows: a pass of its own
        assert counts_of(core)[1] == 10


@pytest.mark.parametrize(("tp", "pcp"), [(1, 1), (1, 2), (2, 2)])
def test_full_chunks_of_long_prompts_are_replayed(tp: int, pcp: int, tmp_path: Path) -> None:
    write_model(tmp_path, random_text_config(21, tp, pcp) | {"sliding_window": 16}, 21)
    r = random.Random(2)
    prompts = [{f"p{i}": (ids(r, 64 * 16), SamplingParams(max_tokens=1, **GREEDY))} for i in range(3)]
    options = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}
    with engine_of(tmp_path, tp, pcp, LogitsRunner, **options) as core:
        wanted = [generate(core, prompt) for prompt in prompts]
    with engine_of(tmp_path, tp, pcp, **options) as core:
        for prompt, want in zip(prompts, wanted, strict=True):
            compare(generate(core, prompt), want)
        captures, replays = counts_of(core)
    # Contexts double from pass to pass: 1, 2, 3-4, 5-8 and 9-16 chunks, each once as it is, and the rest replayed.
    assert captures <= 8 and replays >= 48 - 2 * captures


def test_kernels_of_the_gpu_look_at_no_number_of_a_step(tmp_path: Path) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off (it is switched on where there is no GPU)")
    pytest.importorskip("triton")
    from paraflash.kernels.cuda import CudaKernels
    from paraflash.kernels.cuda.packages import Packages

    class Runner(ReplayingRunner):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.kernels = CudaKernels(Packages(), torch.float32, "grouped_mm", False, use_cuda_topk=False)

    fields = {
        **dict(compress_ratios=[2, 1, 1], kv_source_layer_ids=[0, 1], index_source_layer_ids=[0, 1, 2]),
        **dict(num_hidden_layers=3, engram_layer_ids=[0], candidate_source_layer_id=1, index_topk=5),
        **dict(candidate_topk_blocks=2, candidate_block_size=4, index_n_heads=4, index_head_dim=32, hidden_size=32),
        **dict(head_dim=32, qk_rope_head_dim=16, hc_mult=2, hc_sinkhorn_iters=2, sliding_window=8),
    }
    write_model(tmp_path, random_text_config(30, 1, 1) | fields, 30)
    r = random.Random(3)
    prompts = {str(n): (ids(r, n), SamplingParams(max_tokens=m, **GREEDY)) for n, m in ((3, 6), (20, 6), (40, 4))}
    with engine_of(tmp_path, 1, 1, LogitsRunner) as core:
        wanted = generate(core, prompts)
    with engine_of(tmp_path, 1, 1, Runner) as core:
        compare(generate(core, prompts), wanted)
        assert counts_of(core)[1] >= 2


def alone() -> Mesh:
    return Mesh(0, Group("tp", 1, 0), Group("pcp", 1, 0), torch.device("cpu"))


def packed(mesh: Mesh, ids_of_step: list[int]) -> Packed:
    span = Span(0, 0, len(ids_of_step), True, 0, 0, np.ones(1, np.int64))
    batch = build_batch([span], plan_of([span], 1), load_config(NARROW), mesh, 64)
    return Packed(Inputs(torch.tensor(ids_of_step), batch, None))


def no_engram() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def test_collectives_are_logged_at_each_replay() -> None:
    mesh = alone()

    def forward(inputs: Inputs, engram: Any) -> Tensor:
        mesh.pcp._note("all_gather", "window", inputs.token_ids, 0.0)
        return inputs.token_ids + 1

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:  # as on a GPU: Python runs at the capture only
        result = run()
        return lambda: result

    graphs = StepGraphs(mesh, capture)
    for logs, wanted in ((False, 0), (False, 0), (True, 1), (True, 1)):
        if logs:
            mesh.start_log()
        graphs.run(packed(mesh, [5, 6]), no_engram, forward)
        assert [c.label for c in mesh.take_log()] == ["window"] * wanted
        mesh.tp.log = mesh.pcp.log = None
    assert graphs.counts() == {"captures": 1, "replays": 3, "held": 1}


def test_a_failed_capture_ends_capturing_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("not permitted")

    graphs = StepGraphs(alone(), refuse)
    with caplog.at_level(logging.WARNING, "paraflash.graphs"):
        for length in (2, 2, 2, 3, 3):
            step = packed(alone(), [1] * length)
            assert graphs.run(step, no_engram, lambda inputs, _: inputs.token_ids + 1).tolist() == [2] * length
    assert [r.getMessage() for r in caplog.records if "not permitted" in r.getMessage()] == [caplog.records[0].message]
    assert graphs.counts() == {"captures": 0, "replays": 0, "held": 0}


def test_a_pass_that_another_rank_cannot_capture_is_replayed_on_none(caplog: pytest.LogCaptureFixture) -> None:
    mesh = alone()
    graphs = StepGraphs(mesh, lambda run: run)
    mesh.agree_min = lambda captured: 0  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "paraflash.graphs"):
        for _ in range(3):
            step = packed(mesh, [4, 5])
            assert graphs.run(step, no_engram, lambda inputs, _: inputs.token_ids + 1).tolist() == [5, 6]
    assert ["another rank" in r.getMessage() for r in caplog.records] == [True]
    assert graphs.counts() == {"captures": 0, "replays": 0, "held": 0}


def test_only_so_many_graphs_are_held() -> None:
    mesh = alone()
    graphs = StepGraphs(mesh, lambda run: run, most=2)
    for length in (1, 2, 3, 1):
        for value in (7, 8, 9):
            step = packed(alone(), [value] * length)
            assert graphs.run(step, no_engram, lambda inputs, _: inputs.token_ids * 2).tolist() == [2 * value] * length
    assert graphs.counts() == {"captures": 4, "replays": 8, "held": 2}, "a dropped one starts anew"
    mesh.close()
    assert graphs.counts()["held"] == 0, "groups cannot be closed before"


def test_padded_rows_are_spread_evenly_and_close_to_what_is_needed() -> None:
    assert [padded_rows(n, 1) for n in (1, 3, 8, 9, 17, 24, 25, 33, 49, 65, 97, 256)] == [
        1, 4, 8, 16, 24, 24, 32, 48, 64, 96, 128, 256,
    ]  # fmt: skip
    assert [padded_rows(n, 4) for n in (1, 4, 5, 64, 65)] == [4, 4, 8, 64, 96]


def test_each_pass_fills_an_outbox_of_its_own() -> None:
    """One that could not be captured must leave nothing for the pass that runs instead."""
    mesh = Mesh(0, Group("tp", 1, 0), Group("pcp", 2, 0), torch.device("cpu"))
    one = np.zeros(1, np.int64)
    step = DecodeStep(slot=one, position=one + 3, window_start=one, write_start=one, tables=np.ones((1, 1), np.int64))
    batch = build_decode_batch(step, load_config(NARROW), mesh, 64, spare_slot=1)
    both = Packed(Inputs(torch.tensor([5]), batch, None))
    first, second = both.on(both.host).batch.outbox, both.on(both.host).batch.outbox
    assert first is not None and second is not None and first is not second
