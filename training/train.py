"""Trains the miniature: `python -m training.train --stage 1 --out A`, then `--stage 2 --start A --out B`.

The schedule counts steps, so a run is a function of seed and steps; `--minutes` only stops it early. Writes log.jsonl
and weights-*.safetensors into the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from paraflash.config.model import ModelConfig, parse_config
from paraflash.model.engram_hash import token_map
from training.config import raw_config
from training.data import Batch, Shape, batches, problem_batches
from training.model import Hints, Miniature, Mode
from training.optimiser import Optimiser
from training.tasks import TASKS, vocab
from training.testset import test_problems
from training.vocabulary import write_tokenizer
from training.weights import stored_as

ROUTE_PENALTY, POINTER, BALANCE = 0.15, 1.0, 2e-3
STEPS = {1: 1500, 2: 3000}
# What must cost `pairs` its answers, or they do not come from linked ratio-2 entries.
FAULTS: dict[str, dict[str, Any]] = {"ratio 2 hidden": {"hidden_ratio": 2}, "pairs unlinked": {"unlinked": True}}


@dataclass(frozen=True)
class Step:
    """One training step: what the batch holds, how the forward runs, and the learning rate."""

    batch: Batch
    mode: Mode
    rate: float

    @property
    def key(self) -> tuple[Shape, Mode]:
        """What a captured graph depends on."""
        return self.batch.shape, self.mode


def ramp(done: float, begin: float, end: float) -> float:
    """0 before `begin`, 1 after `end`, linear between."""
    return min(1.0, max(0.0, (done - begin) / (end - begin)))


def schedule(stage: int, step: int, steps: int, small: bool, dtype: torch.dtype) -> Step:
    """Stage 1 learns the tasks with dense attention and hard routes, in short sequences. Stage 2 trains the indexers,
    releases the routes, lets the indexers choose, and rounds the weights; sequence by sequence, since the jumps are
    large."""
    done = step / steps
    warm = min(1.0, (step + 1) / 100)
    mode = Mode(hints=True, dtype=dtype)
    if stage == 1:
        shape = Shape(32, 512) if done < 0.795 else Shape(16, 1024)
        mode = replace(mode, losses=done >= 0.795, round_cache=done >= 0.928)
        rate = warm if done < 0.795 else 0.5
        return Step(Batch(Shape(4, 256) if small else shape, kinds="pprs"), mode, rate)
    shape = Shape(16, 1024)
    if step % 16 == 15 and done >= 0.5:
        shape = Shape(4, 4096)
    elif step % 4 == 3:
        shape = Shape(8, 2048)
    mode = replace(mode, losses=True, round_cache=True, sparse=done >= 0.4, round_weights=done >= 0.6)
    batch = Batch(
        Shape(4, 256) if small else shape,
        kinds="pprsprps",
        hard=1 - ramp(done, 0.15, 0.55),
        dense=1 - 0.85 * ramp(done, 0.4, 0.65),
    )
    return Step(batch, mode, warm * 0.35 * (1 - 0.97 * ramp(done, 0.5, 1.0)))


def parameter_groups(names: list[str], stage: int) -> dict[str, tuple[str, float]]:
    """Optimiser and learning rate of every parameter; stage 2 is gentle with what steers the streams and experts."""
    small, steering, rows, tables = (4e-3, 2e-3, 4e-3, 1e-2) if stage == 1 else (1e-3, 5e-4, 1e-3, 3e-3)
    out = {}
    for name in names:
        if name.startswith("engram.embed"):
            out[name] = ("adam", tables)
        elif name in ("embed", "head"):
            out[name] = ("adam", rows)
        elif name in ("hc_attn_fn", "hc_ffn_fn", "ffn.gate"):
            out[name] = ("adam", steering)
        elif name == "indexer.weights_proj":  # must be good before the indexers choose, and steers nothing until then
            out[name] = ("adam", 2e-3)
        elif stored_as(name)[1]:
            out[name] = ("muon", 1.2e-2)
        else:
            out[name] = ("adam", small)
    return out


def loss_and_counts(model: Miniature, batch: dict[str, Tensor], mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """Scalar loss, counts [tasks + 1, 2] (right, asked; last row: sums of losses), expert loads [layers, experts]."""
    hints = Hints(batch["route"], batch["source"], batch["decoy"])
    logits, extras = model(batch["ids"], batch["hashes"].long(), mode, hints)
    weight, targets = batch["weight"], batch["targets"]
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weight)
    answer = (each * weight).sum() / weight.sum().clamp_min(1.0)
    zero = answer.new_zeros(())
    index, route, point = (sum(x, zero) for x in (extras.index_loss, extras.route_loss, extras.point_loss))
    with torch.no_grad():
        counted = (weight >= 0.4).float()
        right = (logits.argmax(-1) == targets).float() * counted
        place = batch["task"].clamp_min(0).flatten()
        counts = torch.zeros(len(TASKS) + 1, 2, device=logits.device)
        counts[:-1, 0].scatter_add_(0, place, right.flatten())
        counts[:-1, 1].scatter_add_(0, place, counted.flatten())
        counts[-1, 0], counts[-1, 1] = answer, index
    total = answer + index + ROUTE_PENALTY * route + POINTER * point
    return total, counts, torch.stack(extras.loads)


class Trainer:
    """Owns model and optimiser; on a GPU each kind of step is captured once as a CUDA graph and replayed."""

    def __init__(self, model: Miniature, graphs: bool, stage: int):
        self.model, self.graphs = model, graphs
        self.device = next(model.parameters()).device
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.optimiser = Optimiser(
            model.parameters_by_name,
            parameter_groups(list(model.parameters_by_name), stage),
            dtype,
            decay=0.0 if stage == 1 else 0.1,
        )
        self.counts = torch.zeros(len(TASKS) + 1, 2, device=self.device)
        self._captured: dict[str, tuple[Any, dict[str, Tensor]]] = {}
        self._eager: dict[str, int] = {}
        self._pool: Any = None

    def _step(self, batch: dict[str, Tensor], mode: Mode) -> None:
        self.optimiser.zero()
        loss, counts, loads = loss_and_counts(self.model, batch, mode)
        loss.backward()
        self.optimiser.step()
        with torch.no_grad():
            self.counts += counts
            bias = self.model.parameters_by_name["ffn.gate_bias"]
            bias += BALANCE * self.optimiser.rate * torch.sign(loads.mean(-1, keepdim=True) - loads)

    def step(self, batch: dict[str, Tensor], key: tuple[Shape, Mode]) -> None:
        mode = key[1]
        if not self.graphs:
            self._step({k: v.to(self.device, non_blocking=True) for k, v in batch.items()}, mode)
            return
        name = repr(key)
        if name in self._captured:
            graph, static = self._captured[name]
            for k, v in batch.items():
                static[k].copy_(v, non_blocking=True)
            graph.replay()
            return
        static = {k: v.to(self.device) for k, v in batch.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(static, mode)
        torch.cuda.current_stream().wait_stream(side)
        self._eager[name] = self._eager.get(name, 0) + 1
        if self._eager[name] >= 2:  # kernels are compiled and libraries warm: capture (this runs nothing)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(static, mode)
            self._captured[name] = (graph, static)

    def state(self, step: int) -> dict[str, Any]:
        """Everything a later run needs to continue before `step` exactly."""
        o = self.optimiser
        return {"step": step, "model": self.model.state_dict(), "first": o.first, "second": o.second, "steps": o.steps}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for name in ("first", "second"):
            for key, value in getattr(self.optimiser, name).items():
                value.copy_(state[name][key])
        self.optimiser.steps.copy_(state["steps"])

    def drop_graphs(self, keep: str) -> None:
        """Frees the graphs of earlier phases."""
        for name in [n for n in self._captured if keep not in n]:
            del self._captured[name]
        self._pool = None  # a pool dies with its last graph


@torch.no_grad()
def accuracy(model: Miniature, tests: dict[str, list[dict[str, Any]]], mode: Mode) -> dict[str, float]:
    """Share of problems whose whole answer is the most likely one token by token (equal to greedy decoding)."""
    device = next(model.parameters()).device
    out = {}
    for task, packed in tests.items():
        right = total = 0
        for batch in packed:
            logits, _ = model(batch["ids"].to(device), batch["hashes"].to(device).long(), mode)
            good = (logits.argmax(-1) == batch["targets"].to(device)) | ~batch["answer"].to(device)
            right += int(good.all(-1).sum())
            total += len(good)
        out[task] = right / total
    return out


def save(model: Miniature, folder: Path, limit: int = 15 << 20) -> None:
    """fp32 parameters in files of at most about `limit` bytes each."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, p in model.parameters_by_name.items():
        if size and size + p.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = p.detach().cpu().contiguous()
        size += p.nbytes
    for i, part in enumerate(parts):
        save_file(part, folder / f"weights-{i}.safetensors")


def load(model: Miniature, folder: Path) -> None:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        found.update(load_file(path))
    with torch.no_grad():
        for name, p in model.parameters_by_name.items():
            p.copy_(found[name])


def clone(value: Any) -> Any:
    """A copy of nested dicts of tensors."""
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def judged(loss: float, best: float) -> tuple[bool, float]:
    """Whether a mean loss is a blow-up, given the best so far, and what the next one is to be compared with.

    After a blow-up any finite loss will do: the schedule has moved on meanwhile, and what it asks now may cost more for
    good. Going back again and again would leave the weights behind it for the rest of the run.
    """
    if not loss <= 2 * best + 0.3:
        return True, math.inf
    return not math.isfinite(loss), min(best * 1.1, loss)


def prepare(folder: Path, small: bool) -> tuple[dict[str, Any], ModelConfig, Any]:
    """Writes tokenizer and config.json into `folder`; returns raw config, config and the Engram token map."""
    write_tokenizer(folder, vocab())
    mapping, classes = token_map(folder / "tokenizer.json")
    raw = raw_config(classes, len(vocab()), small)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    return raw, parse_config(raw), mapping


def run(options: argparse.Namespace, say: Callable[[str], None] = print) -> None:
    begun = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    _, config, mapping = prepare(options.out, options.small)
    state = torch.load(options.state, map_location="cpu") if options.state and options.state.exists() else {}
    begin = state.get("step", 0)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    steps = options.steps or STEPS[options.stage]
    plan = [schedule(options.stage, s, steps, options.small, dtype) for s in range(steps)]
    source = batches(
        config,
        mapping,
        [s.batch for s in plan],
        options.seed + 2 * (options.stage - 1),  # other sequences in each stage
        options.workers,
        device.type == "cuda",
        begin,
    )
    first = next(source)  # starts the workers before the GPU is touched
    tests = (
        {t: problem_batches(config, mapping, test_problems(t, options.problems), 32768) for t in TASKS}
        if options.problems
        else {}
    )
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Miniature(config, options.seed).to(device)
    model.parameters_by_name = {n: getattr(model, n.replace(".", "__")) for n in model.parameters_by_name}
    if options.start:
        load(model, options.start)
    trainer = Trainer(model, device.type == "cuda" and not options.eager, options.stage)
    if state:
        trainer.restore(state)
    log = (options.out / "log.jsonl").open("a", encoding="utf-8")
    say(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"ready after {time.monotonic() - begun:.1f} s"
    )

    def record(row: dict[str, Any]) -> None:
        line = json.dumps({"seconds": round(time.monotonic() - begun, 1), **row})
        log.write(line + "\n")
        log.flush()
        say(line)

    def evaluate(label: str) -> None:
        kept = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        for rounded in (False, True):
            got = accuracy(model, tests, Mode(round_cache=True, sparse=True, round_weights=rounded))
            record({"eval": label, "weights": "released format" if rounded else "fp32", **got})
        for name, fault in FAULTS.items():
            got = accuracy(model, {"pairs": tests["pairs"]}, Mode(round_cache=True, sparse=True, **fault))
            record({"eval": label, "weights": f"fp32, {name}", **got})
        torch.backends.cuda.matmul.allow_tf32 = kept

    mode, last = None, time.monotonic()
    healthy, best = clone(trainer.state(begin)), math.inf
    for step, now in enumerate(plan[begin:], begin):
        batch = first if step == begin else next(source)
        if now.mode != mode:
            mode = now.mode
            if device.type == "cuda":
                trainer.drop_graphs(repr(mode))
            record({"step": step, "mode": [k for k, v in vars(mode).items() if v is True]})
        trainer.optimiser.rate.fill_(now.rate)
        trainer.step(batch, now.key)
        if (step + 1) % options.report == 0:
            counts = trainer.counts.tolist()
            trainer.counts.zero_()
            loss = counts[-1][0] / options.report
            shown = {t: round(right / max(asked, 1.0), 4) for t, (right, asked) in zip(TASKS, counts, strict=False)}
            pace = round(1000 * (time.monotonic() - last) / options.report, 1)
            last = time.monotonic()
            row = {
                "step": step + 1,
                "ms": pace,
                "loss": round(loss, 4),
                "index": round(counts[-1][1] / options.report, 3),
            }
            record({**row, **shown, "hard": round(now.batch.hard, 2), "dense": round(now.batch.dense, 2)})
            blown_up, best = judged(loss, best)
            if blown_up:  # go back, and go on with other batches
                trainer.restore(healthy)
                record({"step": step + 1, "restored": healthy["step"]})
            else:
                healthy = clone(trainer.state(step + 1))
            if time.monotonic() - begun > options.minutes * 60 - options.reserve:
                break
        if tests and options.evaluate and (step + 1) % options.evaluate == 0:
            save(model, options.out)
            evaluate(str(step + 1))
    save(model, options.out)
    if options.state:
        torch.save(trainer.state(step + 1), options.state)
    if tests:
        evaluate("end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, default=0, help="steps of the stage; 0: the recipe's number")
    parser.add_argument("--start", type=Path, default=None, help="folder with the weights that stage 1 wrote")
    parser.add_argument(
        "--state", type=Path, default=None, help="file to continue from if it exists; written at the end"
    )
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--reserve", type=float, default=15.0, help="seconds kept for saving and the last evaluation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--report", type=int, default=100)
    parser.add_argument("--evaluate", type=int, default=0, help="evaluate every so many steps; 0: only at the end")
    parser.add_argument("--problems", type=int, default=200, help="test problems a task; 0: none")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
