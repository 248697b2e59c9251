"""TP2/PCP1 against TP1/PCP2 on two GPUs of one machine, beside one GPU, inside one time box: `make bench-2gpu`.

All engines start together, each in its own process, and wait; then one at a time is measured, the most important cells
first. Sections: the golden model at every topology over NCCL; collectives; prefill; one step by component; decode. Each
is printed and added to results.json under --out at once, so that a run that is cut short leaves what it has. Weights
are random, of the released widths: twelve layers with every role and 96 experts, 48 a rank as on each of eight GPUs. On
a CPU a tiny model runs over gloo, to show that the script works.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

import two_gpus_report as report  # noqa: E402

TOPOLOGIES = {"TP2/PCP1": (2, 1), "TP1/PCP2": (1, 2), "TP1/PCP1": (1, 1)}
LAYERS = {
    "num_hidden_layers": 12,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 6],
    "index_source_layer_ids": [2, 6, 9],
    "candidate_source_layer_id": 6,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [384006168],
    "n_routed_experts": 96,
}
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 32, "o_lora_rank": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 16, "candidate_topk_blocks": 4, "engram_head_dim": 32, "sliding_window": 16,
    "engram_compressed_vocab_size": 500,
}  # fmt: skip
GPU: dict[str, Any] = {
    "budget": 4096,
    "lengths": [8192, 16384, 32768],
    "concurrencies": [1, 4, 8],
    "decode": [16, 4096, 48],
}
CPU: dict[str, Any] = {"budget": 64, "lengths": [128, 192, 256], "concurrencies": [1, 2, 3], "decode": [4, 32, 16]}
SECTIONS = ("golden", "matrix", "decode", "breakdown", "collectives")
GOLDEN_LIMIT = 0.5  # share of the time box after which the golden runs are ended


class OutOfTime(Exception):
    """The time box is spent."""


class Child:
    """One `two_gpus_engine.py`: jobs in, answers out, everything else that it prints in a log."""

    def __init__(self, name: str, tp: int, pcp: int, setup: dict[str, Any], log: Path, golden: Path | None = None):
        self.name, self.log, self.error = name, log, ""
        command = [sys.executable, str(HERE / "two_gpus_engine.py"), "--tp", str(tp), "--pcp", str(pcp)]
        command += ["--setup", json.dumps(setup), *(["--golden", str(golden)] if golden else [])]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the end

    def answer(self, until: float) -> Any:
        """The next answer. Raises OutOfTime, or RuntimeError once the process has failed."""
        try:
            line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise OutOfTime from None
        if not line:
            self.process.wait(10)
            told = [row for row in self.log.read_text("utf-8", "replace").splitlines() if row.strip()]
            self.error = f"exit status {self.process.returncode}: {told[-1] if told else ''}"
            self._lines.put("")
            raise RuntimeError(f"{self.name}: {self.error}")
        return json.loads(line)

    def ask(self, until: float, job: str, *values: Any) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"job": job, "values": values}) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # `answer` says why
        return self.answer(until)

    def end(self) -> None:
        """Workers end with the process that started them."""
        self.process.kill()
        self.process.wait()


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.begin = time.monotonic()
        self.until = self.begin + args.minutes * 60
        self.out, self.folder, self.device, self.sections = args.out, folder, args.device, args.sections
        self.scale = GPU if args.device == "cuda" else CPU
        model = json.loads((HERE.parent / "tests" / "data" / "released_config.json").read_text("utf-8"))
        model["text_config"].update(LAYERS | (SMALL if args.device == "cpu" else {}))
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        longest = max(self.scale["lengths"])
        most = longest * max(self.scale["concurrencies"])
        self.setup = {
            "model": str(folder),
            "device": args.device,
            "budget": self.scale["budget"],
            "longest": longest,
            "blocks": most // 64 + 128,
            "replay": args.replay,
        }
        self.engines: dict[str, Child] = {}
        self.spent = False
        self.results: dict[str, Any] = {"setup": {**self.setup, "layers": LAYERS, **self.scale}}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def save(self, name: str, value: Any) -> None:
        self.results[name] = value
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def start(self) -> None:
        """Starts all engines and the golden runs together, and waits for both."""
        files = {n: self.folder / f"golden-{tp}-{pcp}.npz" for n, (tp, pcp) in TOPOLOGIES.items()}
        golden, engines = {}, {}
        for name, (tp, pcp) in TOPOLOGIES.items():
            log = self.folder / f"{tp}-{pcp}"
            engines[name] = Child(name, tp, pcp, self.setup, log.with_suffix(".log"))
            if "golden" in self.sections:
                golden[name] = Child(f"golden {name}", tp, pcp, self.setup, log.with_suffix(".golden"), files[name])
        self.all = [*engines.values(), *golden.values()]
        limit = self.begin + GOLDEN_LIMIT * (self.until - self.begin)
        for name, child in golden.items():
            try:
                child.answer(limit)
            except (OutOfTime, RuntimeError) as error:
                self.say(f"golden {name}: {'not done in time' if isinstance(error, OutOfTime) else error}")
            child.end()
        if golden:
            table = report.golden({name: path for name, path in files.items() if path.exists()})
            self.save("golden", table)
            self.say("golden model, rows' relative difference of logits\n" + report.golden_text(table))
        started = {}
        for name, child in engines.items():
            try:
                started[name] = child.answer(self.until)
                self.engines[name] = child
                self.say(f"{name} ready: {report.ready_text(started[name])}")
            except RuntimeError as error:
                started[name] = {"error": str(error)}
                self.say(str(error))
        self.save("engines", started)

    def each(self, section: str, key: str, job: str, *values: Any) -> dict[str, Any]:
        """Asks every living engine; failed ones are left out from then on. Once out of time, it gives what it has."""
        if self.spent:
            raise OutOfTime
        found = {}
        for name, child in list(self.engines.items()):
            try:
                found[name] = child.ask(self.until, job, *values)
            except OutOfTime:
                self.spent = True
                break
            except RuntimeError as error:
                self.say(f"{section} {key}: {error}")
                del self.engines[name]
        return found

    def collectives(self) -> None:
        child = self.engines.get("TP2/PCP1") or self.engines.get("TP1/PCP2")
        if child is None:
            return
        sizes = [1 << n for n in range(16, 28)] if self.device == "cuda" else [1 << 16, 1 << 18]
        try:
            table = child.ask(self.until, "collectives", sizes, 20)["ranks"][0]
            self.save("collectives", table)
            self.say("collectives over two ranks\n" + report.collectives_text(table))
            measured = child.ask(self.until, "hardware")["ranks"][0]
        except RuntimeError as error:
            self.say(str(error))
            return
        entry = report.hardware_entry(measured, table, self.results["engines"][child.name]["ranks"][0])
        self.save("hardware", entry)
        (self.out / "hardware.json").write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")
        self.say("hardware entry: " + ", ".join(f"{k} {v['value']:.4g}" for e in entry.values() for k, v in e.items()))

    def matrix(self, cells: list[tuple[int, int]]) -> None:
        found = self.results.setdefault("matrix", {})
        for length, concurrency in cells:
            got = self.each("prefill", f"{length} x{concurrency}", "cell", length, concurrency, 2)
            for name, value in got.items():
                found[f"{name} {length} {concurrency}"] = value
            self.save("matrix", found)
            self.say(f"prefill {length} x{concurrency}: " + report.cell_text(got))

    def decode(self) -> None:
        got = self.each("decode", f"{self.scale['decode'][0]} rows", "decode", *self.scale["decode"])
        self.save("decode", got)
        self.say("decode: " + report.decode_text(got, self.scale["decode"]))

    def breakdown(self) -> None:
        budget, longest = self.scale["budget"], max(self.scale["lengths"])
        rows, context, _ = self.scale["decode"]
        found = {}
        for kind, values in (("prefill", (longest, budget)), ("decode", (rows, context))):
            got = self.each("breakdown", kind, "breakdown", kind, *values, 3)
            found[kind] = {name: report.summarise(value["ranks"]) for name, value in got.items()}
            self.save("breakdown", found)
            what = f"mean step of {budget} tokens of a prompt of {longest}" if kind == "prefill" else f"{rows} rows"
            self.say(f"{kind}, {what}, ms\n" + report.breakdown_text(found[kind]))

    def run(self) -> None:
        lengths, concurrencies = self.scale["lengths"], self.scale["concurrencies"]
        cells = [(n, c) for n in lengths[::-1] for c in concurrencies]
        first = [(lengths[-1], concurrencies[0]), (lengths[0], concurrencies[1])]
        try:
            self.start()
            if "matrix" in self.sections:
                self.matrix(first)
            for section in ("decode", "breakdown", "collectives"):
                if section in self.sections:
                    getattr(self, section)()
            if "matrix" in self.sections:
                self.matrix([cell for cell in cells if cell not in first])
        except OutOfTime:
            self.say("the time box is spent; what is missing below was not run")
        text = report.summary(self.results, lengths, concurrencies)
        (self.out / "summary.md").write_text(text, encoding="utf-8")
        self.say("\n" + text)

    def end(self) -> None:
        for child in getattr(self, "all", []):
            child.end()
        logs = [
            f"== {path.name}\n{path.read_text('utf-8', 'replace')}" for path in sorted(self.folder.glob("*-*.*o*g*"))
        ]
        (self.out / "log.txt").write_text("\n".join(logs), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench-2gpu"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=7.0, help="time box, start-up included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--replay", action="store_true", help="drop prompt rows before the decoder layers where allowed"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        try:
            bench.run()
        finally:
            bench.end()
    return 0 if len(bench.engines) == len(TOPOLOGIES) else 1


if __name__ == "__main__":
    sys.exit(main())
