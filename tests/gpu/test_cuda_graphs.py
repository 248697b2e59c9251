"""CUDA graphs on a GPU: an engine that replays passes gives the tokens of one that runs the same passes one by one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs a CUDA device", allow_module_level=True)

from paraflash.checkpoint.synthetic import synthetic_config, write_synthetic
from paraflash.config.engine import EngineConfig
from paraflash.engine import engine
from paraflash.engine.engine import EngineCore
from paraflash.engine.messages import StepInput, StepOutput
from paraflash.engine.runner import ModelRunner
from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.worker import RUNNER
from paraflash.parallel.mesh import Group, Mesh

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
FP32 = {"dtype": "float32", "kv_cache_rounding": "none"}


class OneRank:
    """Stands in for `Executor`: one rank in this process."""

    def __init__(self, config: EngineConfig, model: Any, *_: Any):
        mesh = Mesh(0, Group("tp", 1, 0), Group("pcp", 1, 0), torch.device("cuda", 0))
        self.pids: list[int] = []
        self.runner = ModelRunner(config, model, mesh)
        self.runner.load()
        self.sent: list[StepInput] = []

    def call_all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.runner, method)(*args)]

    def execute(self, step: StepInput) -> StepOutput:
        output = self.runner.execute(step)
        assert output is not None
        return output

    def send(self, step: StepInput) -> None:
        self.sent.append(step)

    def receive(self) -> StepOutput:
        return self.execute(self.sent.pop(0))

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        **{
            "device": "cuda",
            "dtype": "bfloat16",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 200,
            **options,
        },
    )


@contextmanager
def started(folder: Path, **options: Any) -> Iterator[EngineCore]:
    config = config_of(folder, **{"enable_prefix_caching": False, **options})
    with mock.patch.object(engine, "Executor", OneRank):
        core = EngineCore(config)
    try:
        yield core
    finally:
        core.shutdown()


def generate(core: EngineCore, seed: int, longest: int = 1280) -> dict[str, list[int]]:
    """Greedy tokens of requests that come and go: prompts of one token up to several chunks, 40 tokens at most."""
    r = random.Random(seed)
    lengths = [min(n, longest) for n in (1, 700, 30, 256, 1280, 5, 513, 64, 1024, 90)]
    waiting = [(f"r{i}", [r.randrange(3, 270) for _ in range(n)]) for i, n in enumerate(lengths)]
    found: dict[str, list[int]] = {name: [] for name, _ in waiting}
    while waiting or core.has_unfinished():
        if waiting and (r.random() < 0.3 or not core.has_unfinished()):
            name, ids = waiting.pop(0)
            core.add_request(name, ids, SamplingParams(temperature=0.0, max_tokens=r.choice([8, 40]), ignore_eos=True))
        if core.has_unfinished():
            for delta in core.step():
                found[delta.request_id] += delta.token_ids
    return found


TINY = {"index_topk": 64, "index_n_heads": 8}  # index layers choose among more entries than they take
RELEASED = {  # the widths for which the optional packages have kernels
    **TINY,
    "index_n_heads": 32,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 32,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}


def write(folder: Path, fields: dict[str, int]) -> Path:
    config = synthetic_config("tiny", {f"text_config.{name}": value for name, value in fields.items()})
    write_synthetic(folder, config, 1, shards=1, extra_tensors=False)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("released"), RELEASED)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paraflash.graphs"]


@pytest.mark.parametrize("kv", ["bfloat16", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("replay", [False, True], ids=["exact", "bounded replay"])
@pytest.mark.parametrize("name", ["tiny", "released"])
def test_replayed_passes_give_the_tokens_of_unrecorded_ones(
    name: str, kv: str, replay: bool, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Exactly: the same kernels run on the same shapes."""
    folder = request.getfixturevalue(name)
    options: dict[str, Any] = {"kv_cache_dtype": kv, "swa_bounded_replay": replay}
    with started(folder, **options) as core:
        graphs = core.executor.runner.graphs
        found = [generate(core, seed) for seed in (1, 2)]
        counts = graphs.counts()
        print(counts)
    assert not warnings_of(caplog)
    assert counts["captures"] > 3 and counts["replays"] > 3 * counts["captures"]
    with started(folder, **options) as core:
        core.executor.runner.graphs._capture = None  # the same padded steps, each run as it is
        wanted = [generate(core, seed) for seed in (1, 2)]
    assert found == wanted


def test_graphs_change_no_token_of_an_eager_engine_but_near_ties(tiny: Path) -> None:
    """Decode steps have other shapes without graphs, and sums in another order may turn a near tie."""
    with started(tiny) as core:
        found = generate(core, 3)
    with started(tiny, enforce_eager=True) as core:
        assert core.executor.runner.graphs is None
        wanted = generate(core, 3)
    first = [(found[name][0], tokens[0]) for name, tokens in wanted.items()]
    assert sum(a == b for a, b in first) >= 9, "prompts run in the same shapes"
    same = sum(a == b for name, tokens in wanted.items() for a, b in zip(found[name], tokens, strict=True))
    print(f"{same} of {sum(map(len, wanted.values()))} tokens agree")


def test_steps_made_ahead_give_the_same_tokens(tiny: Path) -> None:
    """In float32, through a worker process; how long a request is may differ, since the draw follows the steps."""

    def tokens(ahead: bool) -> dict[str, list[int]]:
        config = config_of(tiny, **FP32, kv_cache_dtype="bfloat16", async_scheduling=ahead)
        core = EngineCore(config)
        try:
            return generate(core, 8)
        finally:
            core.shutdown()

    found, wanted = tokens(True), tokens(False)
    pairs = [(a, b) for name, of in wanted.items() for a, b in zip(found[name], of, strict=False)]
    same = sum(a == b for a, b in pairs)
    print(f"{same} of {len(pairs)} tokens agree")
    assert len(pairs) > 100 and same >= 0.97 * len(pairs)


def test_golden_models_replay(caplog: pytest.LogCaptureFixture) -> None:
    with started(GOLDEN / "wide") as core:
        generate(core, 4, longest=200)
        assert core.executor.runner.graphs.counts()["replays"] > 10
    assert not warnings_of(caplog)


def test_a_pass_that_cannot_be_captured_runs_as_it_is(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and the tokens of an engine without graphs."""
    options: dict[str, Any] = {**FP32, "kv_cache_dtype": "bfloat16"}
    with started(tiny, **options, enforce_eager=True) as core:
        wanted = generate(core, 5)
    with started(tiny, **options) as core:
        assert core.executor.runner.graphs is None, "graphs are off in float32"
        assert generate(core, 5) == wanted

    def fails(run: Any) -> Any:
        raise RuntimeError("no capture today")

    with started(tiny) as core:
        core.executor.runner.graphs._capture = fails
        tokens = generate(core, 5)
    (warning,) = warnings_of(caplog)
    assert all(tokens.values()) and "no capture today" in warning


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("tp", "pcp", "runner"), [(1, 2, RUNNER), (2, 1, RUNNER), (1, 2, "small_copies:SmallCopiesRunner")]
)
def test_ranks_on_two_gpus_replay_their_collectives(tiny: Path, tp: int, pcp: int, runner: str) -> None:
    def tokens(**options: Any) -> tuple[dict[str, list[int]], list[Any]]:
        sizes = {"tensor_parallel_size": tp, "prefill_context_parallel_size": pcp}
        config = config_of(tiny, **{**sizes, "check_caches": True, **options})
        core = EngineCore(config, runner_factory=runner)
        try:
            found = generate(core, 6)
            return found, [info["graphs"] for info in core.executor.call_all("cache_info")]
        finally:
            core.shutdown()

    found, counts = tokens()
    wanted, _ = tokens(enforce_eager=True, disable_custom_all_reduce=True)
    print(counts)
    assert all(c["captures"] > 3 and c["replays"] > 2 * c["captures"] for c in counts)
    same = sum(a == b for name, t in wanted.items() for a, b in zip(found[name], t, strict=True))
    print(f"{same} of {sum(map(len, wanted.values()))} tokens agree")
    assert sum(found[name][0] == t[0] for name, t in wanted.items()) >= 9
    ahead, _ = tokens(check_caches=False)  # then steps are made ahead
    same = sum(a == b for name, t in wanted.items() for a, b in zip(ahead[name], t, strict=False))
    print(f"{same} of {sum(map(len, wanted.values()))} tokens agree with steps made ahead")
    assert sum(ahead[name][0] == t[0] for name, t in wanted.items()) >= 9
