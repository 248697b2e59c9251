"""Worker processes: they answer, and whatever happens to one of them ends the engine soon and with a clear error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig, load_config
from paraflash.engine.executor import EngineDeadError, Executor, _settle, _Worker
from paraflash.engine.messages import SampleSpec, StepInput, StepRequest

FAKES = "fake_runners"
HERE = Path(__file__).parent
NARROW = HERE.parent / "data" / "golden" / "narrow"


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_config(NARROW)


@contextmanager
def executor(
    model: ModelConfig,
    runner: str = "FakeRunner",
    pcp: int = 2,
    timeout: float = 1.0,
    device: str = "cpu",
    ahead: bool = False,
) -> Iterator[Executor]:
    config = EngineConfig(
        model=str(NARROW),
        device=device,
        prefill_context_parallel_size=pcp,
        step_timeout=timeout,
        max_num_seqs=4,
        async_scheduling=ahead,
    )
    made = Executor(config, model, f"{FAKES}:{runner}", f"{FAKES}:rank_as_mesh", start_timeout=60)
    try:
        yield made
    finally:
        made.shutdown()


def step(request_id: str, ids: tuple[int, ...] = (5, 6), step_id: int = 1) -> StepInput:
    array = np.array(ids, np.int32)
    none = np.zeros(0, np.int32)
    return StepInput(
        step_id, [StepRequest(request_id, 0, array, none, 0, True, np.array([1], np.int32), sample=SampleSpec())]
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_step_is_taken_while_the_one_before_runs(model: ModelConfig) -> None:
    """Also one larger than a pipe holds; answers come in order, and a call waits for them."""
    with executor(model, pcp=2, ahead=True) as ex:
        ex.send(step("sleep:0.5", (1,), 1))
        start = time.monotonic()
        ex.send(step("large", tuple(range(1 << 19)), 2))
        assert time.monotonic() - start < 0.4, "the sender waits for no step"
        with pytest.raises(RuntimeError, match="while 2 steps are in flight"):
            ex.call_all("cache_hash")
        assert [(a.step_id, *a.sampled) for a in (ex.receive(), ex.receive())] == [(1, "sleep:0.5"), (2, "large")]
        assert ex.call_all("collective_log") == [[1, 2], [1, 2]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", [0, 1])
def test_a_worker_that_dies_with_two_steps_in_flight_ends_the_engine(model: ModelConfig, when: int, rank: int) -> None:
    with executor(model, pcp=2, ahead=True) as ex:
        pids, names = ex.pids, ["fine", "fine"]
        names[when] = f"kill:{rank}"
        with pytest.raises(EngineDeadError, match=rf"rank {rank} \(pid {pids[rank]}\) ended during execute.*SIGKILL"):
            for number, name in enumerate(names):
                ex.send(step(name, step_id=number))
            for _ in names:
                ex.receive()
        assert gone(pids)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            ex.send(step("more"))


def test_every_rank_gets_the_step_and_rank_0_answers(model: ModelConfig) -> None:
    with executor(model, pcp=3) as ex:
        assert ex.execute(step("a", (5, 6))).sampled["a"].token_id == 7
        assert ex.call_all("collective_log") == [[1], [1], [1]]
        assert ex.call_all("add", 1, 2) == [3, 4, 5]
        pids = ex.pids
    assert len(set(pids)) == 3 and gone(pids)


def test_a_message_larger_than_a_pipe_holds_arrives(model: ModelConfig) -> None:
    with executor(model) as ex:
        assert ex.execute(step("a", tuple(range(1000)) * 1000)).sampled["a"].token_id == 1000 % 384


def test_the_cores_are_shared_out_among_the_ranks(model: ModelConfig) -> None:
    with executor(model) as ex:
        assert max(ex.call_all("threads")) <= max(1, len(os.sched_getaffinity(0)) // 2)


def test_workers_for_cuda_are_spawned_and_behave_alike(model: ModelConfig) -> None:
    with executor(model, device="cuda", timeout=30) as ex:  # the fake runner uses no GPU
        assert ex.execute(step("a", (5, 6))).sampled["a"].token_id == 7
        check_dead(ex, ex.pids, f"rank 1 (pid {ex.pids[1]})", "SIGKILL", request="kill:1")


def test_a_second_engine_starts_at_once(model: ModelConfig) -> None:
    with executor(model):
        pass
    start = time.monotonic()
    with executor(model):
        assert time.monotonic() - start < 5.0  # far less on an idle machine


def check_dead(ex: Executor, pids: list[int], *words: str, request: str) -> None:
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as first:
        ex.execute(step(request))
    assert time.monotonic() - start < 10
    for word in words:
        assert word in str(first.value)
    assert gone(pids), "workers are left over"
    for call in (lambda: ex.execute(step("b")), lambda: ex.call_all("cache_hash"), ex.check):
        start = time.monotonic()
        with pytest.raises(EngineDeadError) as later:
            call()
        assert later.value is first.value and time.monotonic() - start < 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_engine_with_its_rank_and_signal(model: ModelConfig, rank: int) -> None:
    with executor(model, timeout=30) as ex:
        pid = ex.pids[rank]
        check_dead(ex, ex.pids, f"rank {rank} (pid {pid})", "SIGKILL", request=f"kill:{rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_ends_the_engine_with_its_traceback(model: ModelConfig, rank: int) -> None:
    with executor(model, timeout=30) as ex:
        pid = ex.pids[rank]
        words = (f"rank {rank} (pid {pid})", "ArithmeticError: the numbers are off", "_misbehave")
        check_dead(ex, ex.pids, *words, request=f"raise:{rank}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_in_an_endless_loop_ends_the_engine_with_its_stack(model: ModelConfig, rank: int) -> None:
    with executor(model) as ex:
        pid = ex.pids[rank]
        words = (f"rank {rank} (pid {pid})", "made no progress", "_misbehave")
        check_dead(ex, ex.pids, *words, request=f"hang:{rank}")


def test_a_stopped_worker_ends_the_engine(model: ModelConfig) -> None:
    with executor(model) as ex:
        check_dead(ex, ex.pids, f"rank 1 (pid {ex.pids[1]}) is stopped", request="stop:1")


def test_a_worker_stopped_while_idle_ends_the_engine_at_the_next_step(model: ModelConfig) -> None:
    with executor(model) as ex:
        ex.execute(step("a"))
        os.kill(ex.pids[1], signal.SIGSTOP)
        large = "x" * 10_000_000  # more than a pipe takes: sending must not block either
        check_dead(ex, ex.pids, f"rank 1 (pid {ex.pids[1]}) is stopped", request=large)


def test_a_worker_that_dies_while_idle_is_noticed_by_a_check(model: ModelConfig) -> None:
    with executor(model) as ex:
        ex.check()
        os.kill(ex.pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 5
        with pytest.raises(EngineDeadError, match=r"rank 0 .*while idle.*SIGKILL"):
            while time.monotonic() < deadline:
                ex.check()
        assert gone(ex.pids)


def test_a_long_step_with_progress_is_no_failure(model: ModelConfig) -> None:
    with executor(model, timeout=1.0) as ex:
        assert ex.execute(step("sleep:2.5")).sampled


def test_a_wrong_checkpoint_is_told_in_its_own_words(model: ModelConfig) -> None:
    with (
        pytest.raises(ValueError, match=r"lacks the tensor layers\.0\.attn\.wkv\.weight"),
        executor(model, "FailsToLoad"),
    ):
        pass


def test_a_crash_while_loading_has_the_traceback(model: ModelConfig) -> None:
    with (
        pytest.raises(EngineDeadError, match=r"rank 0 .* failed during start-up(.|\n)*ZeroDivisionError"),
        executor(model, "CrashesInLoad"),
    ):
        pass


def test_the_words_of_a_rank_that_failed_after_its_answer_are_heard() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("error", "Traceback: in load", None))
    theirs.close()
    w = _Worker(0, multiprocessing.Process(), ours, ours, answers=["hello"])
    _settle([w])
    assert w.error == "Traceback: in load"


def test_shutdown_can_be_repeated_and_ends_later_calls(model: ModelConfig) -> None:
    with executor(model) as ex:
        ex.shutdown()
        ex.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            ex.execute(step("a"))


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config
from paraflash.engine.executor import Executor

def main():
    config = EngineConfig(model={model!r}, device={device!r}, prefill_context_parallel_size=2, step_timeout=5.0)
    ex = Executor(config, load_config({model!r}), "fake_runners:FakeRunner", "fake_runners:rank_as_mesh")
    print(*ex.pids, flush=True)
    return ex
"""


def run_script(tmp_path: Path, body: str, stdin: bool = False, device: str = "cpu") -> subprocess.Popen[str]:
    text = SCRIPT.format(here=str(HERE), model=str(NARROW), device=device) + textwrap.dedent(body)
    path = tmp_path / "script.py"
    path.write_text(text)
    pipe: Any = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-" if stdin else str(path)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    if stdin:
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
    return process


def test_a_script_with_the_guard_works_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = run_script(tmp_path, 'if __name__ == "__main__":\n    main()\n    print("done")\n')  # no shutdown
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "done" in out, err
    assert gone([int(pid) for pid in out.split("\n")[0].split()])


def test_a_script_from_standard_input_works(tmp_path: Path) -> None:
    process = run_script(tmp_path, "main().shutdown()\nprint('done')\n", stdin=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "done" in out, err


def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    process = run_script(tmp_path, "main()\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert 'put what creates the LLM under if __name__ == "__main__":' in err.strip().splitlines()[-1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("busy", ["time.sleep(100)", "STEP"])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path, busy: str, device: str) -> None:
    if busy == "STEP":  # the workers are in an endless loop
        busy = "from test_executor import step; ex.execute(step('hang:0'))"
    process = run_script(tmp_path, f'if __name__ == "__main__":\n    ex = main()\n    {busy}\n', device=device)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert gone(pids)


def test_ctrl_c_ends_parent_and_workers(tmp_path: Path) -> None:
    body = "from test_executor import step; ex.execute(step('sleep:100'))"
    process = run_script(tmp_path, f'if __name__ == "__main__":\n    ex = main()\n    {body}\n')
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err and process.returncode != 0
    assert gone(pids)


def test_a_sigterm_for_the_whole_group_leaves_the_workers_to_the_parent(model: ModelConfig) -> None:
    with executor(model) as ex:
        for pid in ex.pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert ex.execute(step("a")).sampled["a"].token_id == 7
