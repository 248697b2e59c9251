"""`paraflash bench sweep`: the matrix topologies x input lengths x concurrencies, one server start a topology.

Everything lands in one folder: `sweep.json` (settings, environment, how each topology fared), `raw/` (one result file a
cell), `logs/` (the servers' output), and the report. A cell that is finished is never measured again, so the same
command resumes a sweep; a topology that fails is a row that says why, and the next one goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paraflash.bench.flags import count_from, positive
from paraflash.topology import Topology, all_splits, parse_topology

if TYPE_CHECKING:
    import httpx

    from paraflash.bench.load import Load
    from paraflash.bench.prompts import TokenPool
    from paraflash.bench.server_process import ServerProcess
    from paraflash.bench.stats import Outcome

DEFAULT_COMMAND = (
    "paraflash serve {model} --tensor-parallel-size {tp} --prefill-context-parallel-size {pcp} --port {port}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="model folder, given to the server")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--topologies", nargs="+", metavar="NAME", help="e.g. tp8 tp4pcp2 tp2pcp4; the first is the base"
    )
    which.add_argument("--world", type=count_from(1), metavar="N", help="every TP x PCP split of N ranks")
    parser.add_argument(
        "--input-lens", type=count_from(1), nargs="+", default=[8192, 16384, 32768], metavar="N", help="prompt lengths"
    )
    parser.add_argument(
        "--concurrencies", type=count_from(1), nargs="+", default=[1, 4, 8], metavar="N", help="requests in flight"
    )
    parser.add_argument("--output-len", type=count_from(1), default=1, help="tokens; 1 measures the prefill alone")
    parser.add_argument("--warmup-waves", type=count_from(0), default=1, help="waves before each cell, not counted")
    parser.add_argument(
        "--waves", type=count_from(1), default=4, help="measured waves of a cell, as many requests as its concurrency"
    )
    parser.add_argument("--seed", type=count_from(0), default=0, help="of the prompts")
    parser.add_argument("--tokenizer", help="model folder or tokenizer.json to take token ids from")
    parser.add_argument("--vocab-size", type=count_from(10), help="draw ids from a vocabulary of this size")
    parser.add_argument(
        "--server-command", default=DEFAULT_COMMAND, metavar="TEMPLATE", help=f"default: {DEFAULT_COMMAND}"
    )
    parser.add_argument(
        "--server-args", default="", metavar="FLAGS", help='more flags, e.g. --server-args="--device cpu"'
    )
    parser.add_argument("--start-timeout", type=positive, default=1800.0, metavar="S", help="for a server to be ready")
    parser.add_argument("--cell-timeout", type=positive, default=3600.0, metavar="S", help="for one cell")
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="folder of the report and the raw results")
    parser.add_argument("--title", default="Topology sweep", help="heading of the report")


@dataclass(frozen=True)
class Settings:
    """What makes two cells comparable; a folder holds results of one such setting only."""

    model: str
    output_len: int
    warmup_waves: int
    waves: int
    seed: int
    tokenizer: str | None
    vocab_size: int | None
    server_command: str
    server_args: str


@dataclass(frozen=True)
class Cell:
    topology: Topology
    input_len: int
    concurrency: int

    @property
    def label(self) -> str:
        return f"{self.input_len} x {self.concurrency}"

    def path(self, out: Path) -> Path:
        return out / "raw" / f"{self.topology.name}_{self.input_len}x{self.concurrency}.json"

    def seed(self, base: int) -> int:
        """Differs by cell, so that no cell's prompts are in the prefix cache from another; equal for all topologies."""
        return base * 1_000_003 + self.input_len * 1009 + self.concurrency


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a sweep may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(value, indent=1), encoding="utf-8")
    draft.replace(path)


def finished(cell: Cell, out: Path) -> bool:
    try:
        return bool(json.loads(cell.path(out).read_text("utf-8"))["status"] == "ok")
    except (OSError, ValueError, KeyError):
        return False


def server_command(settings: Settings, topology: Topology, port: int | str) -> list[str]:
    """The command line of one topology's server. Fields are put in after splitting, so paths may hold blanks."""
    values = {"{model}": settings.model, "{tp}": topology.tp, "{pcp}": topology.pcp, "{port}": port}
    words = shlex.split(settings.server_command)
    for name, value in values.items():
        words = [word.replace(name, str(value)) for word in words]
    return words + shlex.split(settings.server_args)


def runnable(command: list[str]) -> list[str]:
    """The same command with this interpreter's paraflash, whatever PATH says."""
    return [sys.executable, "-m", "paraflash.cli", *command[1:]] if command[0] == "paraflash" else command


def cell_load(settings: Settings, cell: Cell, model: str) -> Load:
    from paraflash.bench.load import Load

    return Load(
        model=model,
        num_prompts=cell.concurrency,
        input_len=cell.input_len,
        output_len=settings.output_len,
        seed=cell.seed(settings.seed),
        max_concurrency=cell.concurrency,
        warmup_waves=settings.warmup_waves,
        waves=settings.waves,
        ignore_eos=True,
        fields={"temperature": 0.0},
    )


def cell_command(settings: Settings, cell: Cell) -> str:
    """The `bench serve` line that measures the same by hand."""
    words: list[str | int] = ["paraflash", "bench", "serve", "--base-url", "http://127.0.0.1:PORT"]
    words += ["--random-input-len", cell.input_len, "--random-output-len", settings.output_len]
    words += ["--num-prompts", cell.concurrency, "--max-concurrency", cell.concurrency]
    words += ["--num-warmup-waves", settings.warmup_waves, "--num-waves", settings.waves]
    words += ["--ignore-eos", "--seed", cell.seed(settings.seed)]
    words += ["--tokenizer", settings.tokenizer] if settings.tokenizer else []
    words += ["--vocab-size", settings.vocab_size] if settings.vocab_size else []
    return shlex.join(map(str, words))


async def measure_cell(
    server: ServerProcess,
    client: httpx.AsyncClient,
    settings: Settings,
    cell: Cell,
    pool: TokenPool,
    model: str,
    limit: float,
) -> dict[str, Any]:
    """One cell's record. Raises ServerLost, with the wave in which it happened."""
    from paraflash.bench.load import run_load
    from paraflash.bench.server_process import ServerLost
    from paraflash.bench.stats import summarize

    stage = "the first request"

    def progress(now: str, outcome: Outcome) -> None:
        nonlocal stage
        stage = now

    try:
        done = await server.guard(run_load(client, cell_load(settings, cell, model), pool, progress), limit)
        result = summarize(done.waves)
        if result["failed"]:
            await server.check_alive(client)
    except ServerLost as problem:
        raise ServerLost(f"{problem} (at {cell.label}, {stage})") from None
    record = {"topology": cell.topology.name, "input_len": cell.input_len, "concurrency": cell.concurrency}
    record |= {"status": "ok", "reason": None, "command": cell_command(settings, cell), "result": result}
    result |= {"wave_durations": [w.duration for w in done.waves], "server_counters": done.server_counted}
    if result["failed"]:
        error = next(e for e in result["errors"] if e)
        total = result["failed"] + result["completed"]
        record |= {"status": "failed", "reason": f"{result['failed']} of {total} requests failed: {error}"}
    elif result["prompt_length_mismatches"]:
        first = result["prompt_length_mismatches"][0]
        reason = f"prompt length mismatch: sent {first['sent']}, server counted {first['server']}"
        record |= {"status": "failed", "reason": reason}
    return record


async def run_topology(
    args: argparse.Namespace, settings: Settings, topology: Topology, cells: list[Cell], state: dict[str, Any]
) -> None:
    """Starts the server, measures `cells`, and notes in `state` how it went. The server is gone afterwards."""
    from paraflash.bench import client as http
    from paraflash.bench.prompts import NoVocabulary, find_pool
    from paraflash.bench.server_process import ServerLost, ServerProcess, free_port

    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    command = runnable(server_command(settings, topology, port))
    server = ServerProcess(command, args.out / "logs" / f"{topology.name}.log", base_url)
    print(f"{topology}: starting {shlex.join(server_command(settings, topology, port))}", flush=True)
    waiting = list(cells)
    try:
        server.start()
        async with http.open_client(base_url) as client:
            state["ready_seconds"] = round(await server.wait_ready(client, args.start_timeout), 1)
            print(f"{topology}: ready after {state['ready_seconds']} s", flush=True)
            entries = await http.models(client)
            model = entries[0]["id"]
            pool = await find_pool(client, settings.model, entries, settings.vocab_size, settings.tokenizer)
            for cell in cells:
                record = await measure_cell(server, client, settings, cell, pool, model, args.cell_timeout)
                write_json(cell.path(args.out), record)
                waiting.remove(cell)
                print(f"{topology} {cell.label}: {_one_line(record)}", flush=True)
                await server.check_alive(client)
        state |= {"status": "ok", "reason": None}
    except (ServerLost, http.ServerProblem, NoVocabulary) as problem:
        state |= {"status": "failed", "reason": str(problem)}
        print(f"{topology}: FAILED, {problem}", flush=True)
        for cell in waiting:
            record = {"topology": topology.name, "input_len": cell.input_len, "concurrency": cell.concurrency}
            write_json(cell.path(args.out), record | {"status": "failed", "reason": str(problem), "result": None})
    finally:
        server.stop()


def _one_line(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return f"FAILED, {record['reason']}"
    result = record["result"]
    return f"{result['input_throughput']:.2f} input tok/s, mean TTFT {result['mean_ttft_ms']:.2f} ms"


def load_state(out: Path, settings: Settings) -> dict[str, Any]:
    """The sweep.json of `out`, or a new one. Raises ValueError if `out` holds a sweep with other settings."""
    path = out / "sweep.json"
    if not path.exists():
        return {"settings": asdict(settings), "environment": {}, "topologies": {}}
    state: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for name, value in asdict(settings).items():
        if state["settings"].get(name) != value:
            raise ValueError(
                f"{out} holds a sweep with {name} {state['settings'].get(name)!r}, not {value!r}; "
                "use another --out, or the same settings to resume"
            )
    return state


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 1 if a cell or a topology failed, 2 for bad settings, 130 if interrupted. Writes the report."""
    from paraflash.bench.environment import describe_environment
    from paraflash.bench.report import write_report

    try:
        topologies = all_splits(args.world) if args.world else [parse_topology(t) for t in args.topologies]
        settings = Settings(
            model=args.model,
            output_len=args.output_len,
            warmup_waves=args.warmup_waves,
            waves=args.waves,
            seed=args.seed,
            tokenizer=args.tokenizer,
            vocab_size=args.vocab_size,
            server_command=args.server_command,
            server_args=args.server_args,
        )
        state = load_state(args.out, settings)
    except ValueError as problem:
        print(f"bench sweep: {problem}", file=sys.stderr)
        return 2
    topologies = list(dict.fromkeys(topologies))
    state |= {"title": args.title, "input_lens": args.input_lens, "concurrencies": args.concurrencies}
    state["order"] = [t.name for t in topologies]
    interrupted = False
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for topology in topologies:
            cells = [Cell(topology, n, c) for n in args.input_lens for c in args.concurrencies]
            pending = [cell for cell in cells if not finished(cell, args.out)]
            if not pending:
                print(f"{topology}: all {len(cells)} cells are finished already", flush=True)
                continue
            shown = shlex.join(server_command(settings, topology, "PORT"))
            mine = state["topologies"][topology.name] = {"tp": topology.tp, "pcp": topology.pcp, "command": shown}
            mine |= {"status": "failed", "reason": "interrupted", "ready_seconds": None}
            state["environment"] = describe_environment()
            write_json(args.out / "sweep.json", state)
            asyncio.run(run_topology(args, settings, topology, pending, mine))
            write_json(args.out / "sweep.json", state)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, previous)
    write_json(args.out / "sweep.json", state)
    failures = write_report(args.out)
    print(f"Report written to {args.out / 'report.md'} and {args.out / 'report.html'}")
    return 130 if interrupted else 1 if failures else 0
