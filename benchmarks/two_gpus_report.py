"""Numbers and tables of `two_gpus.py`. Plain data in, text out; no torch."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden" / "wide"
COMPONENTS = {  # kernel operation -> component; a linear's name also has its widths
    "linear": "dense products",
    "linear_fp32": "dense products",
    "grouped_output": "dense products",
    "attend": "sparse attention",
    "select_entries": "entry selection",
    "index_queries": "entry selection",
    "index_rows": "entry selection",
    "route": "experts",
    "experts": "experts",
}
OTHER = "norms, streams, cache rows"
TARGETS = (
    "TP1/PCP2 over TP2/PCP1 at the longest prompt: +20 %; over TP1/PCP1: 1.85 times; window exchange: at most 3 % of a "
    "step; decode of TP1/PCP2: at least 95 % of TP2/PCP1"
)


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Relative L2 difference of each row."""
    return np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)


def golden(files: dict[str, Path]) -> dict[str, Any]:
    """Each topology against the golden logits and against TP1/PCP1, per activation type."""
    from safetensors.numpy import load_file

    runs = {name: dict(np.load(path)) for name, path in files.items()}
    table: dict[str, Any] = {}
    for dtype, file in (("bfloat16", "expected.safetensors"), ("float32", "expected_plain.safetensors")):
        one = runs.get("TP1/PCP1", {})
        has_one = f"{dtype}.0.tokens" in one
        expected = load_file(GOLDEN / file)
        for name, run in runs.items():
            if f"{dtype}.0.tokens" not in run:
                continue
            pairs: dict[str, list[np.ndarray]] = {"golden": [], "TP1/PCP1": []}
            greedy, same, sure = 0, 0, 0
            for i in range(7):
                got, tokens = run[f"{dtype}.{i}.logits"], run[f"{dtype}.{i}.tokens"]
                wanted = expected[f"prompt.{i}.greedy"]
                differs = np.flatnonzero(tokens != wanted)
                greedy += int(differs[0]) if len(differs) else len(wanted)
                close = np.flatnonzero(expected[f"prompt.{i}.greedy_margin"] < 0.1)
                sure += int(close[0]) if len(close) else len(wanted)
                if has_one:
                    differs = np.flatnonzero(tokens != one[f"{dtype}.{i}.tokens"])
                    same += int(differs[0]) if len(differs) else len(wanted)
                if got.ndim == 2:
                    pairs["golden"].append(_differences(got, expected[f"prompt.{i}.logits"][:-1]))
                    if has_one:
                        pairs["TP1/PCP1"].append(_differences(got, one[f"{dtype}.{i}.logits"]))
            entry: dict[str, Any] = {
                "equal_caches": bool(run[f"{dtype}.equal_caches"]),
                "greedy_tokens_as_golden": greedy,
                "greedy_tokens_before_a_margin_below_0.1": sure,
                "greedy_tokens_as_one_rank": same,
                "greedy_tokens": 7 * 16,
            }
            for other, rows in pairs.items():
                if rows:
                    all_rows = np.concatenate(rows)
                    entry[f"against {other}"] = {
                        "median": float(np.median(all_rows)),
                        "p90": float(np.quantile(all_rows, 0.9)),
                        "max": float(all_rows.max()),
                    }
            table[f"{dtype} {name}"] = entry
    return table


def golden_text(table: dict[str, Any]) -> str:
    lines = []
    for name, entry in table.items():
        parts = [
            f"{other.removeprefix('against ')} {e['median']:.2e} / {e['p90']:.2e} / {e['max']:.2e}"
            for other, e in entry.items()
            if other.startswith("against")
        ]
        lines.append(
            f"  {name:18} median / 90 % / max: {'; '.join(parts)}; greedy {entry['greedy_tokens_as_golden']} golden, "
            f"{entry['greedy_tokens_as_one_rank']} as one rank, of {entry['greedy_tokens']}; equal caches "
            f"{entry['equal_caches']}"
        )
    return "\n".join(lines)


def ready_text(value: dict[str, Any]) -> str:
    rank = value["ranks"][0]
    return (
        f"loaded {value['loaded_seconds']:.1f} s, warm {value['warm_seconds']:.1f} s, weights "
        f"{rank['weight_bytes'] / 2**30:.1f} GiB a rank, peak {rank.get('allocated_bytes', 0) / 2**30:.1f} GiB; "
        f"{rank.get('gpu', 'cpu')}, torch {rank['torch']}, NCCL {rank.get('nccl', '-')}; {rank['kernels']}"
    )


def collectives_text(table: list[dict[str, Any]]) -> str:
    sizes = sorted({e["nbytes"] for e in table})
    by = {(e["op"], e["nbytes"]): e for e in table}
    lines = [
        "| bytes | " + " | ".join(f"{op} us, GB/s" for op in ("all_gather", "reduce_scatter", "all_reduce")) + " |"
    ]
    lines.append("|---|---|---|---|")
    for size in sizes:
        cells = [by[op, size] for op in ("all_gather", "reduce_scatter", "all_reduce")]
        texts = [f"{c['burst_seconds'] * 1e6:.1f}, {c['bus_bytes_per_second'] / 1e9:.1f}" for c in cells]
        lines.append(f"| {size >> 10} KiB | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def hardware_entry(measured: dict[str, float], table: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """An entry of the planner's hardware file; link and latency from the measured all-reduces."""
    gpu = facts.get("gpu", "CPU")
    reduces = sorted((e for e in table if e["op"] == "all_reduce"), key=lambda e: e["nbytes"])
    largest = reduces[-1]
    numbers = {
        "fp8_flops": measured["bf16_flops"],
        "memory_bytes": 1.0,
        "host_bandwidth": measured["memory_bandwidth"],
        **measured,
        "link_bandwidth": largest["bus_bytes_per_second"],
        "collective_latency": reduces[0]["burst_seconds"],
        "gpus_per_node": 2,
    }
    sources = {
        "link_bandwidth": f"measured on 2 x {gpu}: all-reduce of {largest['nbytes'] >> 20} MiB",
        "collective_latency": f"measured on 2 x {gpu}: all-reduce of {reduces[0]['nbytes'] >> 10} KiB, back to back",
        "gpus_per_node": "counted",
    }
    fields = {k: {"value": v, "source": sources.get(k, f"measured on {gpu}")} for k, v in sorted(numbers.items())}
    return {f"{gpu} x2": fields}


def cell_text(got: dict[str, Any]) -> str:
    return ", ".join(
        f"{n} {v['input_throughput']:.0f} tok/s TTFT {v['mean_ttft'] * 1e3:.0f} ms" for n, v in got.items()
    )


def decode_text(got: dict[str, Any], shape: list[int]) -> str:
    head = f"{shape[0]} rows after {shape[1]} tokens each: "
    return head + ", ".join(
        f"{n} {v['tokens_per_second']:.0f} tok/s, {v['median_seconds'] * 1e3:.2f} ms a step" for n, v in got.items()
    )


def summarise(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean seconds of a step by component. A rank that comes early to a collective waits in it, so the least time over
    the ranks is what the exchange itself takes; the rest of rank 0's time in it counts as waiting."""
    steps = len(ranks[0]["step"])
    parts: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    sent: dict[str, int] = defaultdict(int)
    window = 0.0
    for step in range(steps):
        for name, _, seconds in ranks[0]["parts"][step]:
            if name == "window":
                window += seconds / steps
            elif name.startswith("kernel "):
                operation = name.removeprefix("kernel ")
                operations[operation] += seconds / steps
                parts[COMPONENTS.get(operation.split()[0], OTHER)] += seconds / steps
        exchanges = [[p for p in rank["parts"][step] if p[0].startswith("exchange ")] for rank in ranks]
        for same in zip(*exchanges, strict=True):
            name, nbytes, own = same[0]
            least = min(seconds for _, _, seconds in same)
            parts[name] += least / steps
            parts["waiting for the other rank"] += (own - least) / steps
            sent[name] += nbytes // steps
    noted = statistics.mean(ranks[0]["recorded_step"])
    parts["between the parts"] = noted - sum(parts.values())
    exchange = sum(s for name, s in parts.items() if name.startswith("exchange "))
    halo = sum(s for name, s in parts.items() if name.startswith(("exchange pcp window", "exchange pcp outbox")))
    return {
        "step_seconds": statistics.mean(ranks[0]["step"]),
        "last_step_seconds": ranks[0]["step"][-1],
        "enqueue_seconds": statistics.mean(ranks[0]["enqueue"]),
        "recorded_step_seconds": noted,
        "parts": dict(parts),
        "operations": dict(sorted(operations.items(), key=lambda item: -item[1])),
        "bytes_sent_a_step": dict(sent),
        "exchange_share": exchange / noted,
        "window_collective_share": halo / noted,
        "window_step_seconds": window,
    }


def breakdown_text(found: dict[str, Any]) -> str:
    names = list(found)
    keys = list(dict.fromkeys(k for entry in found.values() for k in entry["parts"]))
    lines = ["| part | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for key in keys:
        cells = [found[n]["parts"].get(key) for n in names]
        lines.append(f"| {key} | " + " | ".join("-" if c is None else f"{c * 1e3:.3f}" for c in cells) + " |")
    for label, key in (
        ("step with marks", "recorded_step_seconds"),
        ("step", "step_seconds"),
        ("last step", "last_step_seconds"),
        ("host busy until enqueued", "enqueue_seconds"),
        ("whole window step of all layers", "window_step_seconds"),
    ):
        lines.append(f"| {label} | " + " | ".join(f"{found[n][key] * 1e3:.3f}" for n in names) + " |")
    for label, key in (("all exchange", "exchange_share"), ("window exchange", "window_collective_share")):
        lines.append(f"| {label}, share | " + " | ".join(f"{found[n][key]:.2%}" for n in names) + " |")
    return "\n".join(lines)


def _table(results: dict[str, Any], key: str, factor: float, lengths: list[int], concurrencies: list[int]) -> list[str]:
    names = ["TP2/PCP1", "TP1/PCP2", "TP1/PCP1"]
    lines = ["| Input length | Concurrency | " + " | ".join(names) + " |", "|---|---|---|---|---|"]
    for length in lengths:
        for concurrency in concurrencies:
            values = [results.get("matrix", {}).get(f"{name} {length} {concurrency}") for name in names]
            base, cells = values[0], []
            for value in values:
                if value is None:
                    cells.append("not run")
                elif value is base or base is None:
                    cells.append(f"{value[key] * factor:.2f}")
                else:
                    cells.append(f"{value[key] * factor:.2f} ({value[key] / base[key] - 1:+.2%})")
            lines.append(f"| {length} | {concurrency} | " + " | ".join(cells) + " |")
    return lines


def targets(results: dict[str, Any], lengths: list[int], concurrencies: list[int]) -> list[str]:
    lines = []
    for concurrency in concurrencies:
        got = {
            n: results.get("matrix", {}).get(f"{n} {max(lengths)} {concurrency}", {}).get("input_throughput")
            for n in ("TP2/PCP1", "TP1/PCP2", "TP1/PCP1")
        }
        pcp = got["TP1/PCP2"]
        if pcp and got["TP2/PCP1"]:
            lines.append(f"{max(lengths)} x{concurrency}: TP1/PCP2 over TP2/PCP1 {pcp / got['TP2/PCP1'] - 1:+.1%}")
        if pcp and got["TP1/PCP1"]:
            lines.append(f"{max(lengths)} x{concurrency}: TP1/PCP2 over TP1/PCP1 {pcp / got['TP1/PCP1']:.2f} times")
    window = results.get("breakdown", {}).get("prefill", {}).get("TP1/PCP2")
    if window:
        lines.append(f"window exchange: {window['window_collective_share']:.2%} of a step")
    decode = results.get("decode", {})
    if "TP1/PCP2" in decode and "TP2/PCP1" in decode:
        share = decode["TP1/PCP2"]["tokens_per_second"] / decode["TP2/PCP1"]["tokens_per_second"]
        lines.append(f"decode: TP1/PCP2 at {share:.1%} of TP2/PCP1")
    return lines


def summary(results: dict[str, Any], lengths: list[int], concurrencies: list[int]) -> str:
    blocks = [
        "## Input throughput (tok/s)\n\n" + "\n".join(_table(results, "input_throughput", 1.0, lengths, concurrencies)),
        "## Mean TTFT (ms)\n\n" + "\n".join(_table(results, "mean_ttft", 1e3, lengths, concurrencies)),
        "## Against the targets\n\n" + "\n".join(f"- {line}" for line in targets(results, lengths, concurrencies)),
        f"Targets: {TARGETS}.",
        "Setup: `" + json.dumps(results["setup"]) + "`",
    ]
    return "\n\n".join(blocks) + "\n"
