"""The demo: one checkpoint in the released format, the same prompts at four TP x PCP splits, the same tokens.

Writes a small random checkpoint (quantised as released), runs a long prompt and several short ones at every split in
fp32 without cache rounding (with random weights the trained rounding turns last-bit noise into other tokens, so only
this mode can ask for equality), prints a table and exits with 1 if any token differs. Needs no GPU.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]
LONG_PROMPT = 2048
SHORT_PROMPTS = [1, 2, 5, 17, 40, 63, 130]
OUTPUT_TOKENS = 16


def make_prompts(vocab_size: int) -> list[dict[str, list[int]]]:
    """One long prompt and several short ones, as token ids from a fixed seed."""
    chosen = random.Random(0)
    lengths = [LONG_PROMPT, *SHORT_PROMPTS]
    return [{"prompt_token_ids": [chosen.randrange(16, vocab_size) for _ in range(n)]} for n in lengths]


def run_topology(folder: Path, tp: int, pcp: int) -> dict[str, Any]:
    """Runs the prompts at one split; returns tokens and measurements."""
    from paraflash import LLM, SamplingParams

    with LLM(
        str(folder),
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        kv_cache_rounding="none",
        max_num_batched_tokens=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        swa_bounded_replay=False,
        enable_prefix_caching=False,
    ) as llm:
        prompts = make_prompts(llm.core.model.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        llm.generate(prompts[1:3], params, use_tqdm=False)  # warm-up
        start = time.perf_counter()
        first = llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        prefill = LONG_PROMPT / (time.perf_counter() - start)
        outputs = llm.generate(prompts, params)
        times = [o.metrics for o in outputs]
        decode = sum(len(o.outputs[0].token_ids) - 1 for o in outputs) / (
            max(t.last_token_time for t in times) - min(t.first_token_time for t in times)
        )
        return {
            "prefill": prefill,
            "ttft": sum(t.first_token_time - t.arrival_time for t in times) / len(times),
            "decode": decode,
            "cache_bytes": llm.core.info()["ranks"][0]["cache_bytes"],
            "tokens": [first[0].outputs[0].token_ids, *(o.outputs[0].token_ids for o in outputs)],
        }


def main() -> int:
    from rich.table import Table

    from paraflash.cli import main as paraflash
    from paraflash.console import table_console

    console = table_console()
    with tempfile.TemporaryDirectory(prefix="paraflash-demo-") as name:
        folder = Path(name) / "checkpoint"
        console.print("[bold]1. A random checkpoint in the released format[/bold] (FP8 32x32, FP4 experts, FP8 Engram)")
        if paraflash(["checkpoint", "synth", str(folder), "--preset", "small"]):
            return 1
        console.print(f"\n[bold]2. The same {1 + len(SHORT_PROMPTS)} prompts at every split[/bold]")
        results = {(tp, pcp): run_topology(folder, tp, pcp) for tp, pcp in TOPOLOGIES}
    table = Table(title=f"one prompt of {LONG_PROMPT} tokens and {len(SHORT_PROMPTS)} short ones, CPU, fp32")
    for column in ("topology", "prefill tok/s", "mean TTFT", "decode tok/s", "cache MB a rank", "tokens equal"):
        table.add_column(column, justify="left" if column == "topology" else "right")
    base = results[TOPOLOGIES[0]]["tokens"]
    for (tp, pcp), r in results.items():
        equal = "yes" if r["tokens"] == base else "NO"
        table.add_row(
            f"TP{tp}/PCP{pcp}",
            f"{r['prefill']:.0f}",
            f"{r['ttft']:.2f} s",
            f"{r['decode']:.1f}",
            f"{r['cache_bytes'] / 1e6:.1f}",
            equal,
        )
    console.print(table)
    console.print("Ranks are processes on the same cores: the table shows equal tokens, not how GPUs scale.")
    return 0 if all(r["tokens"] == base for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
